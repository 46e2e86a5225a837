"""The exchange alone, every chain: equal to the reference, rounded as seldom as said, sending the
bytes that were said, with the same bits on every run.

The backward passes are the transposes of the forward ones because those of the reference are.
"""

import dataclasses
import math
from collections import Counter

import pytest
import reference
import torch
from equal import assert_equal
from exchanges import (
    ROUTINGS,
    Case,
    bytes_of_passes,
    check_deterministic,
    check_many,
    errors_of,
    make_data,
)
from pool import Pools

from monta_megatron.chains import CHAINS

# (ep, etp, ranks per node), on 4 ranks; 3 leaves the nodes uneven.
SHAPES = [
    (4, 1, 4),
    (4, 1, 2),
    (4, 1, 1),
    (4, 1, 3),
    (2, 2, 4),
    (2, 2, 2),
    (2, 2, 1),
    (1, 4, 4),
]


def case_of(chain: str, shape: tuple[int, int, int], **changes: object) -> Case:
    ep, etp, ranks_per_node = shape
    case = Case(chain=chain, ep=ep, etp=etp, ranks_per_node=ranks_per_node)
    return dataclasses.replace(case, **changes)


def in_chunks(case: Case, num_chunks: int) -> Case:
    """The case in so many chunks, of one block each, or of more where the number is odd."""
    if CHAINS[case.chain].serial:
        return case
    num_blocks = num_chunks + 2 if num_chunks % 2 else num_chunks
    return dataclasses.replace(case, num_chunks=num_chunks, num_blocks=num_blocks)


CHAIN_AND_SHAPE = [
    (chain, shape)
    for chain in CHAINS
    for shape in SHAPES
    if CHAINS[chain].incompatibility(case_of(chain, shape).layout(0)) is None
]


def name_of(value: object) -> str:
    if isinstance(value, tuple):
        return "ep{}-etp{}-node{}".format(*value)
    return str(value)


# In fp64 our sums, which have another order than the reference's, agree to fp64 rounding: the bound
# in `exchanges.rounding_bound` is 2e-15 of the sum of absolute values here.
DTYPES = [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")]


@pytest.mark.parametrize(("chain", "shape"), CHAIN_AND_SHAPE, ids=name_of)
def test_equals_the_reference(pools: Pools, chain: str, shape: tuple[int, int, int]) -> None:
    data = [
        *((routing, (12, 12, 12, 12)) for routing in ROUTINGS),
        ("uniform", (0, 9, 1, 12)),
        ("uniform", (0, 0, 0, 0)),
        ("uniform", (2, 1, 3, 2)),
    ]
    cases = []
    for position, (routing, tokens) in enumerate(data):
        dtype, probs_dtype = DTYPES[position % 3]
        case = case_of(
            chain, shape, dtype=dtype, probs_dtype=probs_dtype, routing=routing, tokens=tokens
        )
        cases.append(in_chunks(case, 1 + position % 5))
    for found in pools[4].run(check_many, cases):
        assert not found, "\n".join(f"{cases[position]}: {line}" for position, line in found)


@pytest.mark.parametrize(("chain", "shape"), CHAIN_AND_SHAPE, ids=name_of)
def test_same_bits_on_every_run(pools: Pools, chain: str, shape: tuple[int, int, int]) -> None:
    case = case_of(
        chain, shape, dtype="bfloat16", topk=3, num_local_experts=4, tokens=(40, 64, 0, 17)
    )
    pools[4].run(check_deterministic, in_chunks(case, 5))


# Hops on which partial sums of a token move: each rounds once to the dtype of the wire.
HOPS = {
    "alltoall": 0,
    "alltoall_allgather": 0,
    "allgather": 1,
    "alltoall_dedup": 1,
    "hierarchical_allgather": 2,
    "hierarchical_alltoall": 2,
}
NUMERICS_SHAPES = [(4, 1, 2), (2, 2, 2)]
# Rounding h + 1 times adds up to sqrt(1 + h) times the error of one rounding, and some more,
# because the sum of two bf16 numbers of one size lies on their grid: every fifth is a tie, which
# is rounded by a full half unit.
MARGIN = 1.05


def rms_of(by_rank: list[dict[str, float]]) -> dict[str, float]:
    """Root mean square errors against fp64, over all ranks."""
    total = {name: sum(errors[name] for errors in by_rank) for name in by_rank[0]}
    return {name: math.sqrt(value / total["entries"]) for name, value in total.items()}


def numerics_case(
    chain: str,
    shape: tuple[int, int, int],
    dtype: str,
    num_chunks: int,
    probs_dtype: str = "float32",
) -> Case:
    """Top-8 of 32, and entries enough that the root mean square is sure to a percent or so."""
    return case_of(
        chain,
        shape,
        dtype=dtype,
        probs_dtype=probs_dtype,
        topk=8,
        num_local_experts=32 // shape[0],
        tokens=(128,) * 4,
        hidden=64,
        num_chunks=num_chunks,
        num_blocks=num_chunks,
    )


# The last as with --moe-router-dtype fp64, where copies of tokens are summed in fp32 all the same;
# permuted tokens are then summed in fp64, which is not what the stock sums here do.
ROUNDED = [("bfloat16", "float32"), ("float32", "float32"), ("float32", "float64")]


@pytest.mark.parametrize(
    ("chain", "shape", "dtype", "probs_dtype"),
    [
        pytest.param(chain, shape, *dtypes, id="-".join((name_of(chain), name_of(shape), *dtypes)))
        for chain, shape in CHAIN_AND_SHAPE
        for dtypes in ROUNDED
        if shape in NUMERICS_SHAPES and (HOPS[chain] > 0 or dtypes != ROUNDED[-1])
    ],
)
def test_rounding(
    pools: Pools,
    chain: str,
    shape: tuple[int, int, int],
    dtype: str,
    probs_dtype: str,
) -> None:
    for num_chunks in (1,) if CHAINS[chain].serial else (1, 4):
        case = numerics_case(chain, shape, dtype, num_chunks, probs_dtype)
        rms = rms_of(pools[4].run(errors_of, case))
        # Sums have the same terms in the same order, however their program is executed.
        assert rms == rms_of(pools[4].run(errors_of, case, True))
        if HOPS[chain] == 0:
            # Stock's own sum, pair by pair.
            assert rms["differ"] == 0, f"{case}: not stock's bits"
            continue
        bound = 1.5 * rms["stock"]
        if dtype == "bfloat16":
            bound = MARGIN * math.sqrt(1 + HOPS[chain]) * rms["one rounding"]
        for name in ("combine", "dispatch backward"):
            assert rms[name] <= bound, f"{case}: {name} {rms[name]:.3e} > {bound:.3e}"


def align(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def expected_bytes(case: Case) -> list[Counter[tuple[str, str]]]:
    """Per rank, what dispatch forward has to send by stage and resource, from the routing alone."""
    maps = make_data(case).routing_maps
    layout = case.layout(0)
    size, etp, num_local_experts = case.size, case.etp, case.num_local_experts
    node_of = layout.nodes
    width = max(max((int(each.sum(dim=1).max()) for each in maps if len(each)), default=0), 1)
    row = case.hidden * case.torch_dtype.itemsize
    # Probabilities are fp32, ids int32; a pair has no id.
    pair = align(row + 4) if case.num_chunks > 1 else row + 4
    packed, unpacked = align(row + width * 4 + width * 4), row + width * 4 + width * 4

    # [S][T, S] whether a token has an expert on each rank.
    wants = [
        each.unflatten(1, (case.ep, num_local_experts)).any(dim=2).repeat_interleave(etp, dim=1)
        for each in maps
    ]
    num_nodes, per_node = layout.num_nodes, layout.ranks_per_node
    sent: list[Counter[tuple[str, str]]] = [Counter() for _ in range(size)]

    def send(stage: str, source: int, peer: int, num_bytes: int) -> None:
        resource = "intra" if node_of[source] == node_of[peer] else "inter"
        if source != peer:
            sent[source][stage, resource] += num_bytes

    if CHAINS[case.chain].rows == "permuted tokens":
        for source, routing_map in enumerate(maps):
            pairs = routing_map.unflatten(1, (case.ep, num_local_experts)).sum(dim=(0, 2))
            for ep_rank, count in enumerate(pairs.tolist()):
                # Along the same ETP position, then from there to the other ETP ranks.
                via = ep_rank * etp + source % etp
                send("alltoall", source, via, count * pair)
                for peer in range(ep_rank * etp, (ep_rank + 1) * etp):
                    send("allgather", via, peer, count * pair)
    elif case.chain == "allgather":
        for source, routing_map in enumerate(maps):
            for peer in range(size):
                send("allgather", source, peer, len(routing_map) * unpacked)
    elif case.chain == "alltoall_dedup":
        for source, want in enumerate(wants):
            for peer in range(size):
                send("alltoall", source, peer, int(want[:, peer].sum()) * packed)
    else:
        for source, want in enumerate(wants):
            position = source % per_node
            for node in range(num_nodes):
                on_node = slice(node * per_node, (node + 1) * per_node)
                to_node = want[:, on_node].any(dim=1)
                via = node * per_node + position
                send("alltoall between nodes", source, via, int(to_node.sum()) * packed)
                for peer in range(size)[on_node]:
                    if case.chain == "hierarchical_allgather":
                        send("allgather in node", via, peer, int(to_node.sum()) * packed)
                    else:
                        send("alltoall in node", via, peer, int(want[:, peer].sum()) * packed)
    return [Counter({key: value for key, value in each.items() if value}) for each in sent]


@pytest.mark.parametrize(("chain", "shape"), CHAIN_AND_SHAPE, ids=name_of)
def test_bytes(pools: Pools, chain: str, shape: tuple[int, int, int]) -> None:
    for num_chunks in (1,) if CHAINS[chain].serial else (1, 3):
        each = in_chunks(case_of(chain, shape, topk=3, num_local_experts=4, hidden=6), num_chunks)
        for dtype, routing in (("bfloat16", "uniform"), ("float32", "any_number")):
            case = dataclasses.replace(each, dtype=dtype, routing=routing, tokens=(12, 0, 5, 30))
            expected = expected_bytes(case)
            for rank, (by_pass,) in enumerate(pools[4].run(bytes_of_passes, [case])):
                assert by_pass["dispatch"] == expected[rank], f"{case}, rank {rank}"


def test_reference_by_hand() -> None:
    """The example of reference.py."""
    a, b, c = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([3.0])
    tokens = [torch.stack([a, b]), c[None]]
    maps = [torch.tensor([[True, True], [False, True]]), torch.tensor([[True, False]])]
    probs = [torch.tensor([[0.1, 0.2], [0.3, 0.4]]), torch.tensor([[0.5, 0.6]])]
    first, second = reference.dispatch(tokens, maps, probs, ep=2, etp=1)
    assert first.rows.flatten().tolist() == [1.0, 3.0]
    assert second.rows.flatten().tolist() == [1.0, 2.0]
    assert_equal(first.probs, torch.tensor([0.1, 0.5]), "probs of the first rank")
    assert_equal(second.probs, torch.tensor([0.2, 0.4]), "probs of the second rank")
    assert first.tokens_per_expert.tolist() == [2] and second.tokens_per_expert.tolist() == [2]
    outputs = [torch.tensor([[10.0], [30.0]]), torch.tensor([[100.0], [200.0]])]
    combined = reference.combine(outputs, maps, ep=2, etp=1)
    assert combined[0].flatten().tolist() == [110.0, 200.0]
    assert combined[1].flatten().tolist() == [30.0]

    # Both experts in halves on both ranks.
    for inputs in reference.dispatch(tokens, maps, probs, ep=1, etp=2):
        assert inputs.rows.flatten().tolist() == [1.0, 3.0, 1.0, 2.0]
        assert inputs.tokens_per_expert.tolist() == [2, 2]
    halves = [torch.tensor([[1.0], [2.0], [3.0], [4.0]])] * 2
    combined = reference.combine(halves, maps, ep=1, etp=2)
    assert combined[0].flatten().tolist() == [8.0, 8.0]
    assert combined[1].flatten().tolist() == [4.0]
    gradients = reference.combine_probs([half.flatten() for half in halves], maps, ep=1, etp=2)
    assert gradients[0].tolist() == [[2.0, 6.0], [0.0, 8.0]]
    assert gradients[1].tolist() == [[4.0, 0.0]]
