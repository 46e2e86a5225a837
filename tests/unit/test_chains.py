"""The chain as plain data: hand-worked bindings, steps and orders.

`tests/dist/test_exchange_properties.py` sends rows through it.
"""

import numpy as np
import pytest

from monta_megatron.chains import CHAINS, BoundChain, Counts
from monta_megatron.chains.chain import first_blocks, order_of_issue, split
from monta_megatron.chains.lower import lower, pipeline_offsets
from monta_megatron.chains.program import COMBINE, Policy, RowFormat
from monta_megatron.chains.stage_operations import ranks_per_sum
from monta_megatron.chains.stages import Segments
from monta_megatron.chains.token_stages import arrival, expert_order
from monta_megatron.core import Layout

CHAIN = CHAINS["alltoall_allgather"]


def layout_of(
    ep: int, etp: int, num_local_experts: int, rank: int = 0, ranks_per_node: int | None = None
) -> Layout:
    """All ranks on one node, unless it has fewer."""
    num_ranks = ep * etp
    return Layout(
        ep=ep,
        etp=etp,
        num_local_experts=num_local_experts,
        rank=rank,
        nodes=tuple(each // (ranks_per_node or num_ranks) for each in range(num_ranks)),
    )


def rows_of(segments: Segments, chunk: int) -> list[int]:
    """Row numbers of a chunk, run by run."""
    return [
        start + offset
        for length, start in zip(*(each[chunk] for each in segments.runs), strict=True)
        for offset in range(length)
    ]


def test_hand_worked_two_chunks() -> None:
    # EP 2, ETP 1, L = 2, this is EP rank 0. Rows here: a a b b b b | c d d, for the experts
    # 0 1 | 2 3. Rank 1 sends 3 rows for expert 0 and 1 for expert 1.
    counts = Counts(sent=np.array([[2, 4], [1, 2]]), received=np.array([[[2, 4], [3, 1]]]))
    bound = CHAIN.bind(layout_of(2, 1, 2), counts, num_chunks=2)
    pack, exchange, gather, order = bound.stages

    # The first chunk takes two thirds of every count: rounded to the nearest row for the first
    # expert, up for the second.
    assert rows_of(pack.segments, 0) == [0, 2, 3, 4, 6, 7, 8]  # a b b b c d d
    assert rows_of(pack.segments, 1) == [1, 5]  # a b
    assert exchange.send.tolist() == [[4, 3], [2, 0]]
    assert exchange.receive.tolist() == [[4, 3], [2, 1]]
    assert gather.receive.tolist() == [[7], [3]]
    # On the experts' side: expert 0 from rank 0 (2 rows) and rank 1 (3), then expert 1 (4, 1).
    assert rows_of(order.segments, 0) == [0, 5, 6, 7, 2, 3, 9]
    assert rows_of(order.segments, 1) == [1, 8, 4]
    assert bound.rows_per_local_expert.tolist() == [5, 5]
    assert bound.num_expert_rows == 10


def test_one_chunk_copies_nothing_on_the_way_in() -> None:
    counts = Counts(sent=np.array([[3]]), received=np.array([[[3]], [[5]]]))
    pack, _, gather, order = CHAIN.bind(layout_of(1, 2, 1), counts, num_chunks=1).stages
    assert pack.segments is None
    assert order.segments is None  # one local expert: the gather's order is the experts' order
    assert gather.receive.tolist() == [[3, 5]]


def test_remainders_do_not_gather_in_one_chunk() -> None:
    # Eight experts with one row each are split as eight rows of one expert are.
    for rows in (np.ones(8, dtype=np.int64), np.array([8])):
        assert np.diff(split(rows, 4), axis=0).sum(axis=1).tolist() == [2, 3, 2, 1]


def test_the_last_chunk_is_smaller_and_first_on_the_way_back() -> None:
    assert [first_blocks(8, chunks).tolist() for chunks in (1, 2, 3, 4)] == [
        [0],
        [0, 5],
        [0, 3, 6],
        [0, 2, 5, 7],
    ]
    # Expected values are split likewise.
    counts = Counts(sent=np.full((2, 2), 1.5), received=np.full((2, 2, 2), 1.5))
    bound = CHAIN.bind(layout_of(2, 2, 2), counts, num_chunks=2)
    row = RowFormat(hidden_size=8, value_bytes=4, prob_bytes=0, sum_bytes=4)
    back = lower(bound, COMBINE, row, max_experts_per_token=0)
    exchange = [each for each in back.program.operations if each.stage == "alltoall"]
    assert [back.splits(each)[1] for each in exchange] == [[1.0, 1.0], [2.0, 2.0]]
    assert [each.chunk for each in exchange] == [1, 0]


def offsets(bound: BoundChain, transpose: bool, policy: Policy) -> list[int]:
    shapes = bound.shape.stages[:: -1 if transpose else 1]
    return pipeline_offsets(shapes, bound.layout.crossing_groups, policy)


@pytest.mark.parametrize(
    ("etp", "ranks_per_node", "policy", "forward", "back"),
    [
        # A step for each collective.
        (2, None, "streams", [0, 0, 1, 2], [0, 0, 1, 2]),
        (2, None, "host", [0, 0, 1, 2], [0, 0, 1, 2]),
        # The AllToAll crosses nodes; the AllGather stays on one, and a host moves its rows itself.
        (2, 2, "streams", [0, 0, 1, 2], [0, 0, 1, 2]),
        (2, 2, "host", [0, 0, 1, 1], [0, 0, 0, 1]),
        # A group of one rank takes no step.
        (1, None, "streams", [0, 0, 1, 1], [0, 0, 0, 1]),
    ],
)
def test_steps_of_the_stages(
    etp: int, ranks_per_node: int | None, policy: Policy, forward: list[int], back: list[int]
) -> None:
    counts = Counts(sent=np.ones((2, 1), int), received=np.ones((etp, 2, 1), int))
    layout = layout_of(2, etp, 1, ranks_per_node=ranks_per_node)
    bound = CHAIN.bind(layout, counts, num_chunks=2)
    assert offsets(bound, transpose=False, policy=policy) == forward
    assert offsets(bound, transpose=True, policy=policy) == back


def test_order_of_issue() -> None:
    pack, exchange, gather, order = range(4)
    assert order_of_issue([0, 0, 1, 1], num_chunks=2) == [
        *[(pack, 0), (exchange, 0)],
        *[(pack, 1), (exchange, 1), (gather, 0), (order, 0)],
        *[(gather, 1), (order, 1)],
    ]


def test_ranks_take_the_same_steps_if_some_groups_cross_nodes() -> None:
    """ETP 4 on nodes of 6: of ranks 0-3, 4-7 and 8-11 only those in the middle lie on two nodes."""
    counts = Counts(sent=np.ones((3, 1), int), received=np.ones((4, 3, 1), int))
    for transpose in (False, True):
        steps = [
            offsets(
                CHAIN.bind(layout_of(3, 4, 1, rank, ranks_per_node=6), counts, num_chunks=2),
                transpose,
                policy="host",
            )
            for rank in range(12)
        ]
        assert all(each == steps[0] for each in steps)


def test_the_parts_of_an_expert_are_added_first_as_in_stock() -> None:
    assert ranks_per_sum(etp=2, num_ranks=4) == 2
    # Nothing to nest: one expert's parts alone, or experts that are not cut.
    assert ranks_per_sum(etp=2, num_ranks=2) == 2
    assert ranks_per_sum(etp=1, num_ranks=4) == 4


def test_an_expert_takes_each_source_in_turn() -> None:
    """Two experts, two sources, two chunks."""
    # [C, L, S] pairs, as a chunk brings them: by expert, then by source.
    lengths, starts = expert_order(np.array([[[2, 1], [1, 0]], [[1, 1], [0, 3]]]), arrival(2, 1))
    assert lengths.tolist() == [[2, 1, 1, 0], [1, 1, 0, 3]]
    # 0-2 and 3-4 are the first expert's, of sources 0 and 1; 5 and 6-8 the second one's.
    assert starts.tolist() == [[0, 3, 5, 6], [2, 4, 6, 6]]


def test_num_chunks_below_one_is_refused() -> None:
    counts = Counts(sent=np.ones((1, 1), int), received=np.ones((1, 1, 1), int))
    with pytest.raises(ValueError, match="num_chunks: got 0"):
        CHAIN.bind(layout_of(1, 1, 1), counts, num_chunks=0)
