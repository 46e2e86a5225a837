"""Stages that the chains of tokens share, and their binding to counts.

The split of tokens into chunks; a copy per node, sent along the rail; and, last in all of them, the
copies for the local experts, in stock's order. No torch.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains.chain import TokenCounts, first_blocks, starts_of
from monta_megatron.chains.stages import (
    AllToAll,
    BoundStage,
    Duplicate,
    Parts,
    Permute,
    RowCounts,
    Segments,
)
from monta_megatron.core import Layout

SPLIT = Permute(name="split")
TO_NODES = Duplicate(name="copy per node", per="node")
TO_RANKS = Duplicate(name="copy per rank", per="rank")
RAIL_ALLTOALL = AllToAll(name="alltoall between nodes", group="rail")
TO_EXPERTS = Duplicate(name="copy per expert", per="expert")
ORDER = Permute(name="order")


def by_chunk(blocks: RowCounts, num_chunks: int, axis: int) -> RowCounts:
    """Sum the blocks of each chunk: [..., B, ...] -> [..., C, ...] along `axis`."""
    if blocks.shape[axis] == num_chunks:
        return blocks
    starts_C = first_blocks(blocks.shape[axis], num_chunks)
    return np.add.reduceat(blocks, starts_C, axis=axis)


def bind_split(layout: Layout, counts: TokenCounts, num_chunks: int) -> BoundStage:
    """The tokens of each chunk: one run of this rank's tokens."""
    tokens_C1 = by_chunk(counts.tokens[layout.rank], num_chunks, axis=0)[:, None]
    segments = Segments(num_runs=1, find_runs=lambda: (tokens_C1, starts_of(tokens_C1)))
    return BoundStage(stage=SPLIT, send=tokens_C1, receive=tokens_C1, segments=segments)


def bind_node_copies(
    layout: Layout, counts: TokenCounts, num_chunks: int
) -> tuple[BoundStage, BoundStage, BoundStage]:
    """One copy of a token per node, sent along the rail: the first half of both hierarchies.

    The rail joins the ranks that have the same position on their nodes, in the order of the nodes.
    """
    assert counts.sent_to_nodes is not None and counts.for_node is not None
    split = bind_split(layout, counts, num_chunks)
    sent_CA = by_chunk(counts.sent_to_nodes, num_chunks, axis=0)
    of_rail_AB = counts.for_node[layout.position :: layout.ranks_per_node]
    received_CA = by_chunk(of_rail_AB, num_chunks, axis=1).T
    parts = Parts(first=0, size=layout.num_experts // layout.num_nodes, num_parts=layout.num_nodes)
    return (
        split,
        BoundStage(stage=TO_NODES, send=split.receive, receive=sent_CA, parts=parts),
        BoundStage(stage=RAIL_ALLTOALL, send=sent_CA, receive=received_CA),
    )


class Arrival(NamedTuple):
    """Order of the source ranks in a chunk; the same for all micro-batches.

    Attributes:
        sources: [S] source ranks in the order of their tokens.
        stock_order: [S] indices into `sources`, in stock's order: by ETP rank, then EP rank.
        from_stock: [S] the inverse: indices into `stock_order`, in the order of `sources`.
    """

    sources: NDArray[np.int64]
    stock_order: NDArray[np.int64]
    from_stock: NDArray[np.int64]


@cache
def arrival(num_sources: int, etp: int, ranks_per_node: int = 1) -> Arrival:
    """Order of arrival: by rail, then by node, which is rank order where nodes have one rank.

    It is the order in which the ranks of a node pass on what they received along their rails.
    """
    sources = np.arange(num_sources).reshape(-1, ranks_per_node).T.ravel()
    # Ranks are numbered with ETP fastest.
    ep_ranks, etp_ranks = np.divmod(sources, etp)
    stock_order = np.lexsort((ep_ranks, etp_ranks))
    return Arrival(sources, stock_order, np.argsort(stock_order))


def expert_order(runs_CLS: RowCounts, order: Arrival) -> tuple[RowCounts, RowCounts]:
    """Scatter map of each chunk's rows into stock's order on the expert side.

    Args:
        runs_CLS: rows of each chunk in its own order: by expert, then by source.
        order: of the sources.

    Returns:
        Lengths and starts, [C, L * S], of runs whose order in the tensor is (expert, source in
        stock's order, chunk).
    """
    # [C, L, S] -> [L, S in stock's order, C], laid end to end, and back
    stock_LSC = runs_CLS.take(order.stock_order, axis=2).transpose(1, 2, 0)
    starts_CLS = starts_of(stock_LSC).transpose(2, 0, 1).take(order.from_stock, axis=2)
    return runs_CLS.reshape(len(runs_CLS), -1), starts_CLS.reshape(len(runs_CLS), -1)


def bind_experts(
    layout: Layout, counts: TokenCounts, arrived: BoundStage, order: Arrival
) -> tuple[BoundStage, BoundStage]:
    """The copies for the local experts, and their scatter map into stock's order.

    Args:
        layout: this rank's place.
        counts: by token block.
        arrived: the last collective of the chain.
        order: source ranks in the order of arrival.
    """
    rows_C1 = arrived.receive.sum(axis=1, keepdims=True)
    pairs_SCL = by_chunk(counts.experts, len(rows_C1), axis=1)
    experts = Parts(first=layout.first_expert, size=1, num_parts=layout.num_local_experts)
    copies_CL = pairs_SCL.sum(axis=0)
    copies_C1 = copies_CL.sum(axis=1)[:, None]

    def find_runs() -> tuple[RowCounts, RowCounts]:
        # [S, C, L] -> [S in order of arrival, C, L] -> [C, L, S], the order of a chunk's copies
        return expert_order(pairs_SCL.take(order.sources, axis=0).transpose(1, 2, 0), order)

    return (
        BoundStage(stage=TO_EXPERTS, send=rows_C1, receive=copies_CL, parts=experts),
        BoundStage(
            stage=ORDER,
            send=copies_C1,
            receive=copies_C1,
            segments=Segments(
                num_runs=len(order.sources) * layout.num_local_experts, find_runs=find_runs
            ),
        ),
    )
