"""Programs: by hand, one structure for all counts, and one truth for all readers."""

import dataclasses
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest

from monta_megatron.chains import CHAINS, BoundChain, Counts
from monta_megatron.chains import lower as lower_module
from monta_megatron.chains.chain import order_of_issue
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import COMBINE, DISPATCH, Policy, RowFormat
from monta_megatron.core import Layout

BF16 = RowFormat(hidden_size=8, value_bytes=2, prob_bytes=4, sum_bytes=4)


def bound_chain(rows: int = 3, num_chunks: int = 2) -> BoundChain:
    """2 nodes of 2 ranks at EP 2 x ETP 2, as rank 0 sees them; each expert gets so many rows."""
    layout = Layout(ep=2, etp=2, num_local_experts=2, rank=0, nodes=(0, 0, 1, 1))
    counts = Counts(sent=np.full((2, 2), rows), received=np.full((2, 2, 2), rows))
    return CHAINS["alltoall_allgather"].bind(layout, counts, num_chunks)


def listed(bound: BoundChain, policy: Policy) -> list[str]:
    program = lower(bound, COMBINE, BF16, 0, policy).program
    return [f"{each.kind}: {each.stage} {each.chunk}" for each in program.operations]


# Transposed, from the last chunk to the first. The parts that an AllGather's transpose brings are
# summed by the stage that sends the sums on; chunk 0's parts are under way meanwhile.
ON_STREAMS = """
    pack: order 1 | alltoall: allgather 1
    pack: order 0 | alltoall: allgather 0
    reduce_ranks: sum of allgather 1 | alltoall: alltoall 1
    reduce_ranks: sum of allgather 0 | alltoall: alltoall 0
    put: pack 1 | put: pack 0
"""
# A host moves what stays on its node itself, and puts nothing off for it.
ON_THE_HOST = """
    pack: order 1 | alltoall: allgather 1 | reduce_ranks: sum of allgather 1 | alltoall: alltoall 1
    pack: order 0 | alltoall: allgather 0 | reduce_ranks: sum of allgather 0 | alltoall: alltoall 0
    put: pack 1 | put: pack 0
"""


@pytest.mark.parametrize(("policy", "by_hand"), [("streams", ON_STREAMS), ("host", ON_THE_HOST)])
def test_combine_by_hand(policy: Policy, by_hand: str) -> None:
    expected = [each.strip() for line in by_hand.strip().split("\n") for each in line.split("|")]
    assert listed(bound_chain(), policy) == expected


def test_memory_is_used_again_after_the_turns_that_read_it() -> None:
    """Dispatch in 6 chunks. Steps: pack and A2A in c, AG in c + 1, order in c + 2."""
    program = lower(bound_chain(rows=66, num_chunks=6), DISPATCH, BF16, 0).program
    slots: dict[str, list[int]] = {}
    for buffer in program.buffers:
        slots.setdefault(buffer.name, []).append(buffer.slot)
    # The A2A of a chunk, which reads what was packed, is waited for a step later; its result is
    # read by the AllGather a step later, which is waited for another step later.
    assert {name: len(set(found)) for name, found in slots.items()} == {
        "input": 1,
        "pack": 2,
        "alltoall": 3,
        "allgather": 2,
        "output": 1,
    }
    assert slots["pack"] == slots["pack"][:2] * 3


def test_columns_share_a_message_where_rows_are_copied() -> None:
    bound = lower(bound_chain(), DISPATCH, BF16, 0)
    pack = bound.program.operations[0]
    # 8 bf16 values and an fp32 probability: 20 bytes, aligned to 32; in place, one after the other.
    assert bound.message_bytes(bound.program.buffers[pack.writes[0]]) == (32,)
    assert bound.message_bytes(bound.program.buffers[bound.program.output]) == (16, 4)


def test_one_structure_serves_all_counts_widths_and_ranks() -> None:
    few, many = bound_chain(rows=1), bound_chain(rows=50)
    other = dataclasses.replace(few, layout=dataclasses.replace(few.layout, rank=3))
    first = lower(few, DISPATCH, BF16, max_experts_per_token=2)
    assert lower(many, DISPATCH, BF16, max_experts_per_token=7).program is first.program
    assert lower(other, DISPATCH, BF16, max_experts_per_token=2).program is first.program


def test_nothing_waits_for_what_is_issued_later_in_any_order() -> None:
    """As in the benchmark's ablation, where all chunks are packed before the first one is sent."""

    def places_apart(offsets: Sequence[int], num_chunks: int) -> list[tuple[int, int]]:
        order = order_of_issue(offsets, num_chunks)
        return sorted(order, key=lambda issued: (issued[0] > 0, issued[0] == len(offsets) - 1))

    # Programs are cached whatever their order.
    structure = lower_module._structure.__wrapped__
    with mock.patch.multiple(lower_module, order_of_issue=places_apart, _structure=structure):
        program = lower(bound_chain(rows=66, num_chunks=6), DISPATCH, BF16, 0).program
    assert [each.stage for each in program.operations[:6]] == ["pack"] * 6
    for operation in program.operations:
        before = (*operation.waits, *operation.after, *operation.launch_after)
        assert all(number < operation.number for number in before)
