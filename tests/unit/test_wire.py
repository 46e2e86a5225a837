"""Rows in eight bits: the format, bit by bit, against torch's own e4m3."""

from dataclasses import replace

import pytest
import torch

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import (
    COMBINE_BACKWARD,
    DISPATCH,
    FORWARD_BACKWARD,
    Pass,
)
from monta_megatron.chains.wire_format import row_bytes
from monta_megatron.core import Layout, Shape
from monta_megatron.exchange.sums import E4M3, dequantize, quantize
from monta_megatron.planner.chain_price import peak_bytes, price_chain
from monta_megatron.planner.cluster_file import uncalibrated
from monta_megatron.planner.routing.expected import UniformRouting
from monta_megatron.planner.shape import bind_expected, lower_expected
from monta_megatron.planner.traffic import pass_traffic

# The largest and the least normal value of e4m3, and its least step.
LARGEST, LEAST, STEP = 448.0, 2.0**-6, 2.0**-9


def sent(rows: torch.Tensor) -> torch.Tensor:
    """[N, H] -> [N, B]."""
    quantized = torch.zeros(len(rows), row_bytes(rows.shape[1]), dtype=torch.uint8)
    quantize(quantized, rows)
    return quantized


def travelled(rows: torch.Tensor) -> torch.Tensor:
    """[N, H] rows as they arrive."""
    arrived = torch.full_like(rows, torch.nan)
    dequantize(arrived, sent(rows))
    return arrived


def test_bytes_of_a_row() -> None:
    # 7,168 values and 56 scales; a byte, a scale behind 3 of padding, 8 to a multiple of 16.
    assert row_bytes(7168) == 7168 + 56 * 4 == 7392
    assert row_bytes(1) == 16
    assert row_bytes(4096) / (2 * 4096) < 0.52


def test_a_hand_worked_group() -> None:
    """The largest is 3 = 1.5 x 2^1, so the scale is 2^(1-8), and 3 is sent as 384."""
    rows = torch.tensor([[3.0, -0.5, 0.0, -0.0, 1.0625]])
    message = sent(rows)[0]
    assert message[8:12].view(torch.float32).item() == 2.0**-7
    assert message[:5].view(E4M3).tolist() == [384.0, -64.0, 0.0, -0.0, 136 - 8]
    # 1.0625 lies in the middle between 1 and 1.125, of which 1 is even.
    assert travelled(rows).tolist() == [[3.0, -0.5, 0.0, 0.0, 1.0]]
    assert torch.equal(travelled(rows).signbit(), rows.signbit())


def test_every_code_is_read_as_torch_reads_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(E4M3).float()
    message = torch.zeros(1, row_bytes(256), dtype=torch.uint8)
    message[0, :256] = codes
    message[0, 256:264].view(torch.float32).fill_(1.0)
    arrived = torch.empty(1, 256)
    dequantize(arrived, message)
    # No group with a number as its scale holds the two codes of NaN.
    is_number = ~expected.isnan()
    assert is_number.sum() == 254
    assert torch.equal(arrived[0, is_number], expected[is_number])
    assert torch.equal(arrived[0].signbit(), expected.signbit())


def test_every_bf16_value_is_rounded_as_torch_rounds_it() -> None:
    """In a group whose largest value is 448, so that the scale is 1."""
    values = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
    values = values[values.abs() <= LARGEST]
    num_groups = -(-len(values) // 127)
    rows = torch.zeros(num_groups, 128, dtype=torch.bfloat16)
    rows[:, 0] = LARGEST
    rows[:, 1:] = torch.nn.functional.pad(values, (0, num_groups * 127 - len(values))).view(-1, 127)
    expected = rows.float().to(E4M3)
    assert torch.equal(sent(rows)[:, :128], expected.view(torch.uint8))
    assert torch.equal(travelled(rows), expected.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden_size", [1, 127, 128, 300, 2049, 7168])
def test_errors_are_within_the_bound_of_the_format(dtype: torch.dtype, hidden_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-4, 4, 20)[:, None]
    rows = (torch.randn(20, hidden_size, generator=generator) * sizes).to(dtype)
    error = (travelled(rows).double() - rows.double()).abs()
    groups = torch.nn.functional.pad(rows.double().abs(), (0, -hidden_size % 128))
    largest = groups.unflatten(1, (-1, 128)).amax(dim=2).repeat_interleave(128, dim=1)
    # A scale is less than the largest value over 224. Half a step of the least, or of a value with
    # 3 bits after the first; and the dtype's own rounding.
    least_step = largest[:, :hidden_size] / 224 * STEP / 2
    bound = torch.maximum(rows.double().abs() * 2.0**-4, least_step)
    assert (error <= bound * (1 + torch.finfo(dtype).eps)).all()


def test_values_of_four_bits_come_through() -> None:
    """Which the check at first use relies on."""
    rows = torch.randint(-15, 16, (50, 1000), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(travelled(rows), rows)
    assert torch.equal(travelled(2.0**100 * rows), 2.0**100 * rows)


def test_what_is_no_number_takes_its_group_along() -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        rows = torch.ones(2, 300)
        rows[0, 130] = value
        is_nan = travelled(rows).isnan()
        assert is_nan[0, 128:256].all() and is_nan.sum() == 128


def test_subnormal_and_huge_groups() -> None:
    """Steps of 2^-135; and 1.96 x 2^127 becomes 2 x 2^127, which is none of fp32."""
    rows = torch.tensor([[2.0**-130], [2.0**-133], [2.0**-149], [2.0**127], [1.96 * 2.0**127]])
    assert travelled(rows)[:, 0].tolist() == [2.0**-130, 2.0**-133, 0.0, 2.0**127, torch.inf]


def test_rows_are_taken_and_put_by_an_index() -> None:
    rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([4, 0, 5])
    message = torch.zeros(3, row_bytes(40), dtype=torch.uint8)
    quantize(message, rows, index)
    assert torch.equal(message, sent(rows[index]))
    arrived = torch.zeros(6, 40)
    dequantize(arrived, message, index)
    assert torch.equal(arrived[index], travelled(rows[index]))
    assert not arrived[[1, 2, 3]].any()


LAYOUT = Layout(ep=8, etp=1, num_local_experts=8, rank=0, nodes=(0, 0, 0, 0, 1, 1, 1, 1))
PLAIN = Shape(
    layout=LAYOUT,
    hidden_size=1024,
    value_bytes=2,
    prob_bytes=2,
    routing=UniformRouting(num_experts=64, topk=8),
    tokens_per_rank=512,
)
QUANTIZED = replace(PLAIN, quantized=True)


def test_dispatch_sends_little_more_than_half() -> None:
    """Top-8 in bf16: a row has 16 bytes of probabilities and 32 of ids, rounded up to 16."""
    chain, sent_bytes = CHAINS["hierarchical_alltoall"], []
    for shape in (PLAIN, QUANTIZED):
        bound = lower_expected(shape, bind_expected(shape, chain, 4), DISPATCH, "streams")
        traffic = pass_traffic([bound], 512, 0)
        stages = [stage for stage in traffic.pipeline if stage.operation == "alltoall"]
        sent_bytes.append(sum(stage.moved[stage.resource].num_bytes.sum() for stage in stages))
    # 1,024 values and 8 scales in place of 1,024 values of 2 bytes.
    assert sent_bytes[1] / sent_bytes[0] == pytest.approx((1024 + 32 + 48) / (2048 + 48))
    assert sent_bytes[1] < 0.55 * sent_bytes[0]


@pytest.mark.parametrize(
    ("shape", "heaviest"),
    # Gradients on the way of the tokens are as wide as ever.
    [(PLAIN, DISPATCH), (QUANTIZED, COMBINE_BACKWARD)],
)
def test_peak_bytes_are_those_of_the_widest_pass(shape: Shape, heaviest: Pass) -> None:
    cluster = replace(uncalibrated(LAYOUT, "H100"), fused_kernels=True)
    chain = CHAINS["hierarchical_alltoall"]
    bound = bind_expected(shape, chain, 4)
    peaks = {
        pass_: peak_bytes(lower_expected(shape, bound, pass_, "fused"))
        for pass_ in FORWARD_BACKWARD
    }
    price = price_chain(shape, cluster, chain, 4, "forward_backward")
    assert price.peak_bytes == max(peaks.values()) == peaks[heaviest]
