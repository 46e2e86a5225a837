"""What chains whose rows are tokens share: splitting tokens, and ordering them for the experts."""

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains.chain import TokenCounts
from monta_megatron.chains.chunks import expert_order, first_blocks, starts_of
from monta_megatron.chains.layout import Layout
from monta_megatron.chains.stages import (
    AllToAll,
    BoundStage,
    Duplicate,
    ExpertRange,
    Permute,
    RowCounts,
    Segments,
)

SPLIT = Permute(name="split")
TO_NODES = Duplicate(name="copy per node", part="node")
TO_RANKS = Duplicate(name="copy per rank", part="rank")
RAIL_EXCHANGE = AllToAll(name="alltoall between nodes", group="rail")
TO_EXPERTS = Duplicate(name="copy per expert", part="expert")
ORDER = Permute(name="order")


def by_chunk(blocks: RowCounts, num_chunks: int, axis: int) -> RowCounts:
    """Sum the blocks of each chunk: [..., B, ...] -> [..., C, ...] along `axis`."""
    starts = first_blocks(blocks.shape[axis], num_chunks)
    return np.add.reduceat(blocks, starts, axis=axis)


def bind_split(layout: Layout, counts: TokenCounts, num_chunks: int) -> BoundStage:
    """The tokens of each chunk: one run of this rank's tokens."""
    lengths = by_chunk(counts.tokens[layout.rank], num_chunks, axis=0)[:, None]
    segments = Segments(starts=starts_of(lengths), lengths=lengths)
    return BoundStage(stage=SPLIT, send=lengths, receive=lengths, segments=segments)


def bind_copies(
    stage: Duplicate, rows: RowCounts, copies: RowCounts, parts: ExpertRange
) -> BoundStage:
    """A `Duplicate` of rows [C] into copies [C, P]."""
    return BoundStage(stage=stage, send=rows[:, None], receive=copies, parts=parts)


def bind_node_exchange(
    layout: Layout, counts: TokenCounts, num_chunks: int
) -> tuple[BoundStage, BoundStage, BoundStage]:
    """One copy of a token per node, sent along the rail: the first half of both hierarchies.

    The rail joins the ranks that have the same position on their nodes, in the order of the nodes.
    """
    assert counts.sent_to_nodes is not None and counts.for_node is not None
    split = bind_split(layout, counts, num_chunks)
    send = by_chunk(counts.sent_to_nodes, num_chunks, axis=0)  # [C, nodes]
    rail = np.arange(layout.num_nodes) * layout.ranks_per_node + layout.position
    receive = by_chunk(counts.for_node[rail], num_chunks, axis=1).T  # [C, nodes]
    parts = ExpertRange(
        first=0, size=layout.num_experts // layout.num_nodes, num_parts=layout.num_nodes
    )
    return (
        split,
        bind_copies(TO_NODES, split.receive[:, 0], send, parts),
        BoundStage(stage=RAIL_EXCHANGE, send=send, receive=receive),
    )


def arrival_on_node(layout: Layout) -> NDArray[np.int64]:
    """[S] sources in the order of their tokens on a node: by position on the node, then by node."""
    # This is the order after the node's ranks have shared what their rails brought.
    return np.arange(len(layout.nodes)).reshape(-1, layout.ranks_per_node).T.ravel()


def bind_experts(
    layout: Layout, counts: TokenCounts, arrived: BoundStage, arrival: NDArray[np.int64]
) -> tuple[BoundStage, BoundStage]:
    """The copies for the local experts, and their places in stock's order.

    Args:
        layout: this rank's place.
        counts: by token block.
        arrived: the collective that brought the tokens.
        arrival: [S'] the sources whose tokens lie in a chunk, in the order of their tokens.
    """
    rows = arrived.receive.sum(axis=1)  # [C]
    # [S, B, L] -> [C, L, S'] in the order in which a chunk's copies lie
    runs = by_chunk(counts.experts[arrival], len(rows), axis=1).transpose(1, 2, 0)
    # Stock orders sources by ETP rank, then EP rank; ranks are numbered with ETP fastest.
    ep_ranks, etp_ranks = np.divmod(arrival, layout.etp)
    source_order = np.lexsort((ep_ranks, etp_ranks)).tolist()
    experts = ExpertRange(first=layout.first_expert, size=1, num_parts=layout.num_local_experts)
    copies = runs.sum(axis=2)
    total = copies.sum(axis=1)
    return (
        bind_copies(TO_EXPERTS, rows, copies, experts),
        BoundStage(
            stage=ORDER,
            send=total[:, None],
            receive=total[:, None],
            segments=expert_order(runs, source_order, counts.classes),
        ),
    )
