"""The exchange alone, every chain: rounded as seldom as said, and the same bits in every run.

`test_exchange_properties` compares it with the reference.
"""

import math
from dataclasses import replace
from unittest import mock

import layers
import pytest
import reference
import torch
from equal import assert_equal
from exchanges import Case, cases_on, make_data, place_of, run_passes
from layers import assert_same_results, build_pair, forward_backward, gathered
from pool import on_ranks

from monta_megatron.exchange import executor
from monta_megatron.exchange.streams import Streams

# On two nodes of two ranks.
CASES = cases_on([(4, 1, 2), (2, 2, 2), (1, 4, 2)])
# Hops on which partial sums of a token move: each rounds once to the dtype of the wire.
HOPS = {
    "alltoall": 0,
    "alltoall_allgather": 0,
    "allgather": 1,
    "alltoall_dedup": 1,
    "hierarchical_allgather": 2,
    "hierarchical_alltoall": 2,
}
# Rounding h + 1 times adds up to sqrt(1 + h) times the error of one rounding, and some more,
# because the sum of two bf16 numbers of one size lies on their grid: every fifth is a tie, which
# is rounded by a full half unit.
MARGIN = 1.05
# The last as with --moe-router-dtype fp64, where copies of tokens are summed in fp32 all the same;
# permuted tokens are then summed in fp64, which is not what the stock sums here do.
ROUNDED = [("bfloat16", "float32"), ("float32", "float32"), ("float32", "float64")]


class DeviceOrder(Streams):
    """Programs as they are on devices, run by the host, which waits for each collective."""

    policy = "streams"


def ascending_sum(terms: torch.Tensor) -> torch.Tensor:
    """One fp32 sum in order, rounded once: [T, N, H] -> [T, H]. Adding a 0 rounds nothing."""
    total = torch.zeros_like(terms[:, 0], dtype=torch.float32)
    for term in terms.unbind(dim=1):
        total += term.float()
    return total.to(terms.dtype)


def rms_errors(case: Case) -> tuple[dict[str, float], int]:
    """Root mean square errors against the fp64 reference, over the entries of all ranks.

    Returns:
        those of "one rounding", of one ascending fp32 sum; of "stock", over the ETP ranks, rounded,
        then over the experts, rounded; of our "output" and "token_gradient"; and how many entries
        of ours have other bits than stock's.
    """
    rank, data = place_of(case)[1], make_data(case)
    ours, again = (run_passes(case, data)[0] for _ in range(2))
    for name, value in ours.items():
        assert_equal(again[name], value, f"{case}: {name} of a second run")
    with mock.patch.object(executor, "streams_for", lambda device: DeviceOrder()):
        on_device, _ = run_passes(case, data)
    maps, num_tokens = data.routing_maps, case.tokens[0]
    exact = reference.combine(data.expert_rows, maps, case.ep, case.etp)[rank]
    # [T, E, ETP, H] of all ranks: what the experts' ranks hand back for each token, else 0.
    terms = torch.zeros(
        case.size * num_tokens, case.num_experts, case.etp, case.hidden, dtype=case.torch_dtype
    )
    by_rank = reference.arrivals(maps, case.ep, case.etp)
    for peer, (arrived, rows) in enumerate(zip(by_rank, data.expert_rows, strict=True)):
        terms[arrived.token, arrived.expert, peer % case.etp] = rows
    terms = terms.split(num_tokens)[rank]
    # [T, E, ETP, H] -> [T, E, H]; with one ETP rank nothing is added, and so nothing rounded.
    by_pair = ascending_sum(terms.flatten(0, 1)).unflatten(0, (num_tokens, -1))
    sums = {"one rounding": ascending_sum(terms.flatten(1, 2)), "stock": ascending_sum(by_pair)}
    differ = 0
    for name in ("output", "token_gradient"):
        sums[name] = ours[name]
        differ += int((ours[name] != sums["stock"]).sum())
        # Sums have the same terms in the same order, however their program is executed.
        assert_equal(on_device[name], ours[name], f"{case}: {name} in the order of devices")
    squares = {name: (each.double() - exact).square().mean() for name, each in sums.items()}
    means = {
        name: math.sqrt(sum(gathered(square.item())) / case.size)
        for name, square in squares.items()
    }
    return means, differ


@pytest.mark.parametrize(
    ("case", "dtypes"),
    [
        pytest.param(case, dtypes, id=f"{case.chain}-etp{case.etp}-{dtypes}")
        for case in CASES
        for dtypes in ROUNDED
        if HOPS[case.chain] > 0 or dtypes != ROUNDED[-1]
    ],
)
@on_ranks(4)
def test_rounding(case: Case, dtypes: tuple[str, str]) -> None:
    """Top-8 of 32, and entries enough that the root mean square is sure to a percent or so."""
    case = replace(
        case,
        dtype=dtypes[0],
        probs_dtype=dtypes[1],
        topk=8,
        num_local_experts=32 // case.ep,
        tokens=(128,) * 4,
        hidden=64,
    )
    for num_chunks in (1, 4):
        rms, differ = rms_errors(replace(case, num_chunks=num_chunks, num_blocks=num_chunks))
        if HOPS[case.chain] == 0:
            # Stock's own sum, pair by pair, where it adds the ETP ranks in their order.
            assert differ == 0, f"{case}: not stock's bits"
            continue
        bound = 1.5 * rms["stock"]
        if case.dtype == "bfloat16":
            bound = MARGIN * math.sqrt(1 + HOPS[case.chain]) * rms["one rounding"]
        for name in ("output", "token_gradient"):
            assert rms[name] <= bound, f"{case}: {name} {rms[name]:.3e} > {bound:.3e}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chain", ["alltoall", "alltoall_allgather"])
@pytest.mark.parametrize("etp", [1, 2, 4])
@on_ranks(4)
def test_layers_have_stocks_bits_at_etp_2(etp: int, chain: str, dtype: str) -> None:
    """Beyond, stock's reduce-scatter adds the same terms in an order of its own."""
    case = layers.Case(
        chain=chain, tp=etp, ep=4 // etp, etp=etp, dtype=dtype, routing="router", hidden=32
    )
    stock, ours = (forward_backward(case, layer) for layer in build_pair(case))
    assert case.exact_sums == (etp <= 2)
    assert_same_results(ours, stock, case.exact_sums, f"{case}")


def test_reference_by_hand() -> None:
    """The example of reference.py."""
    a, b, c = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    tokens = [torch.stack([a, b]), c[None]]
    maps = [torch.tensor([[True, True], [False, True]]), torch.tensor([[True, False]])]
    probs = [torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6]])]
    outputs = [torch.tensor([[10.0], [30.0]]), torch.tensor([[100.0], [200.0]])]
    # Below, both experts in halves on both ranks.
    halves = [torch.tensor([[1.0], [2.0], [3.0], [4.0]])] * 2

    def lists(by_rank: list[torch.Tensor]) -> list[list[float]]:
        return [each.flatten().tolist() for each in by_rank]

    assert lists(reference.dispatch(tokens, maps, 2, 1)) == [[1, 3], [1, 2]]
    assert lists(reference.dispatch_probs(probs, maps, 2, 1)) == [[1, 5], [2, 4]]
    assert lists(reference.combine(outputs, maps, 2, 1)) == [[110, 200], [30]]
    assert lists(reference.dispatch(tokens, maps, 1, 2)) == [[1, 3, 1, 2]] * 2
    assert lists(reference.combine(halves, maps, 1, 2)) == [[8, 8], [4]]
    gradients = reference.combine_probs([half.flatten() for half in halves], maps, 1, 2)
    assert lists(gradients) == [[2, 6, 0, 8], [4, 0]]
    for shape, counts in (((2, 1), [[2], [2]]), ((1, 2), [[2, 2], [2, 2]])):
        arrived = reference.arrivals(maps, *shape)
        assert lists([each.tokens_per_expert for each in arrived]) == counts
