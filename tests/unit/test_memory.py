"""What a pass holds at most: the liveness of its buffers is what the executor allocates."""

from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from fake_kernels import recorded_launches
from stream_recorder import Recorder
from test_stream_safety import CASES, Layer

from monta_megatron.chains import CHAINS, BoundChain
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import FORWARD_BACKWARD, Pass, Policy, RowFormat
from monta_megatron.exchange import executor
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import run as run_pass
from monta_megatron.exchange.streams import CudaStreams, Streams
from monta_megatron.planner.price import peak_bytes

NUM_CHUNKS = (1, 2, 3, 4, 6)
# Rows weigh 2,048 and 5,120 bytes, their indices and lists a few times 8. In bf16 they are summed
# in two blocks of columns.
ROWS = {
    torch.float32: RowFormat(hidden_size=512, value_bytes=4, prob_bytes=4, sum_bytes=4),
    torch.bfloat16: RowFormat(hidden_size=2560, value_bytes=2, prob_bytes=4, sum_bytes=4),
}
# How programs are executed; "fused", around kernels that do not run.
POLICIES: dict[Policy, Callable[[torch.device], Streams]] = {
    "streams": CudaStreams,
    "fused": CudaStreams,
    "host": lambda device: Streams(),
}


def measure(
    chain_name: str, layout_name: str, num_chunks: int, dtype: torch.dtype, policy: Policy
) -> tuple[dict[str, int], BoundChain, int]:
    """Bytes at the peak of each pass beyond its input; the bound chain; the longest list."""
    streams, fused = POLICIES[policy], policy == "fused"
    recorder, peaks = Recorder(streams), dict[str, int]()
    of_rows = {"num_tokens": 96, "hidden": ROWS[dtype].hidden_size, "dtype": dtype}
    layer = Layer(chain_name, layout_name, num_chunks, recorder, fused=fused, **of_rows)

    def run(exchange: Exchange, way: Pass, columns: Columns) -> Columns:
        before = recorder.forget_peak(columns.tensors())
        outputs = run_pass(exchange, way, columns)
        peaks[way.name] = recorder.peak_bytes - before
        return outputs

    # Memory is allocated around kernels that do not run.
    kernels = recorded_launches(recorder.kernel) if fused else nullcontext()
    with kernels, mock.patch.object(executor, "run", run), recorder:
        layer.run()
    assert recorder.findings == []
    return peaks, layer.exchange.bound_chain, layer.exchange.max_experts_per_token


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", ROWS, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("chain_name", "layout_name"), CASES)
def test_peak_bytes(chain_name: str, layout_name: str, dtype: torch.dtype, policy: Policy) -> None:
    if policy == "fused":
        pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")
    chain = CHAINS[chain_name]
    serial: dict[str, int] = {}
    for num_chunks in (1,) if chain.serial else (1, 3) if policy == "fused" else NUM_CHUNKS:
        peaks, bound, width = measure(chain_name, layout_name, num_chunks, dtype, policy)
        serial = serial or peaks
        for way in FORWARD_BACKWARD:
            peak, what = peaks[way.name], (num_chunks, way.name)
            expected = peak_bytes(lower(bound, way, ROWS[dtype], width, policy))
            assert expected <= peak <= 1.03 * expected, what
            if policy == "streams":
                # Chunks of pairs are packed, where one of all pairs is sent as it lies.
                assert peak <= 1.55 * serial[way.name], what
            elif policy == "fused":
                # Rows are not in memory in two orders, nor are the terms of sums in fp32.
                otherwise = peak_bytes(lower(bound, way, ROWS[dtype], width))
                assert expected < otherwise or (chain.rows != "tokens" and expected == otherwise)
