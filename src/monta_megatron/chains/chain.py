"""A chain: a short list of stages, and the rule that turns counts into rows per stage and chunk.

Dispatch applies the chain to the rows, and combine applies its transpose; the backward pass of
dispatch is the transpose again, and that of combine the chain. So one description serves all four
passes. A chunk is a run of each rank's token blocks, or, where rows are permuted tokens, a share of
every expert's rows; every chunk scatters its rows into stock's order. No torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains.stages import (
    AllGather,
    AllToAll,
    BoundStage,
    Duplicate,
    RowCounts,
    Stage,
    StageShape,
)
from monta_megatron.common.errors import UserError
from monta_megatron.core import GroupName, Layout


def split(rows: RowCounts, num_chunks: int) -> RowCounts:
    """Split every count into `num_chunks` shares: equal ones, and a last one of half their size.

    Each source's rows for each expert are split separately, so a chunk holds the same share of all
    of them, and every rank knows every split from the counts alone. The first count is rounded to
    the nearest row; the remainders of neighbouring experts fall into different chunks, not in one.

    The last chunk is smaller because nothing hides the copies after its collective; transposed
    passes start with it (`chains/lower.py`).

    Args:
        rows: [..., L] counts.
        num_chunks: C.

    Returns:
        [C + 1, ..., L] bounds of the chunks, from 0 to `rows`.
    """
    halves = 2 * num_chunks - 1
    steps = 2 * np.arange(num_chunks + 1).reshape(-1, *[1] * rows.ndim)
    if rows.dtype.kind == "f":
        return np.minimum(steps * rows / halves, rows)
    remainders = np.arange(num_chunks - 1, num_chunks - 1 + rows.shape[-1]) % halves
    return np.minimum((steps * rows + remainders) // halves, rows)


# Tokens are counted in at least this many blocks for several chunks, which consist of whole blocks.
NUM_BLOCKS = 8


def blocks_for(num_chunks: int) -> int:
    """B: number of token blocks to count for a chain that may run in `num_chunks` chunks."""
    return 1 if num_chunks == 1 else max(NUM_BLOCKS, num_chunks)


@cache
def first_blocks(num_blocks: int, num_chunks: int) -> NDArray[np.int64]:
    """[C] first block of each chunk, where chunks consist of whole blocks."""
    return split(np.array([num_blocks]), num_chunks)[:-1, 0]


def starts_of(lengths: RowCounts) -> RowCounts:
    """First row of each run, laid end to end: the exclusive prefix sum of `lengths`, flat."""
    flat = lengths.ravel()
    return (flat.cumsum() - flat).reshape(lengths.shape)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of token-expert pairs, for the chains whose rows are permuted tokens.

    Counts are integers at run time, and expected values (floats) in the planner.

    Attributes:
        sent: [D, L] rows of this rank for each expert, by the expert's EP rank.
        received: [G, D, L] rows from every source rank for each expert of this EP rank.
    """

    sent: RowCounts
    received: RowCounts

    def rows_per_local_expert(self, stages: Sequence[BoundStage]) -> RowCounts:
        """[L] rows on the expert side."""
        rows: RowCounts = self.received.sum(axis=(0, 1))
        return rows


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Counts by token block, for the chains whose rows are tokens.

    "For" a rank or a node means tokens with at least one expert there. Counts that the chain does
    not need are None.

    Attributes:
        tokens: [S, B] tokens of every source.
        experts: [S, B, L] token-expert pairs of every source for each expert of this rank.
        sent_to_ranks: [B, D] tokens of this rank for each EP rank.
        for_rank: [S, B] tokens of every source for this rank.
        sent_to_nodes: [B, A] tokens of this rank for each node.
        for_node: [S, B] tokens of every source for this node.
        for_node_ranks: [S, B, Q] tokens of every source for each rank of this node.
    """

    tokens: RowCounts
    experts: RowCounts
    sent_to_ranks: RowCounts | None = None
    for_rank: RowCounts | None = None
    sent_to_nodes: RowCounts | None = None
    for_node: RowCounts | None = None
    for_node_ranks: RowCounts | None = None

    def rows_per_local_expert(self, stages: Sequence[BoundStage]) -> RowCounts:
        """[L] rows on the expert side, which the last stage but one copies; see `Chain`."""
        rows: RowCounts = stages[-2].receive.sum(axis=0)
        return rows

    def of_blocks(self, first: int, end: int) -> "TokenCounts":
        """Counts of the token blocks from `first` to before `end`."""

        def cut(counts: RowCounts | None, axis: int) -> RowCounts | None:
            return None if counts is None else counts.take(range(first, end), axis=axis)

        return replace(
            self,
            tokens=self.tokens[:, first:end],
            experts=self.experts[:, first:end],
            sent_to_ranks=cut(self.sent_to_ranks, 0),
            for_rank=cut(self.for_rank, 1),
            sent_to_nodes=cut(self.sent_to_nodes, 0),
            for_node=cut(self.for_node, 1),
            for_node_ranks=cut(self.for_node_ranks, 1),
        )


Rows: TypeAlias = Literal["permuted tokens", "tokens"]
# What a chain is bound to, by its `rows`.
ChainCounts: TypeAlias = Counts | TokenCounts


def order_of_issue(offsets: Sequence[int], num_chunks: int) -> list[tuple[int, int]]:
    """(index of a stage in the pass, iteration) in the order of issue, the same on every rank.

    Iteration i works on the i-th chunk of the pass. Its stage `at` is issued in pipeline step
    i + offsets[at]; within a step, stages go in order.

    Args:
        offsets: steps by which each stage of a pass trails the first; see `pipeline_offsets`.
        num_chunks: C.
    """
    return [
        (at, step - offset)
        for step in range(num_chunks + offsets[-1])
        for at, offset in enumerate(offsets)
        if 0 <= step - offset < num_chunks
    ]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A list of stages and its binding.

    Attributes:
        name: as in options, such as "alltoall_allgather".
        rows: a row of the source side: a permuted token, by Megatron's own permutation, or a token,
            which is copied for the parts that it goes to.
        stages: applied left to right by dispatch, transposed right to left by combine. A chain of
            tokens ends with a `Duplicate` per expert and a `Permute`.
        bind_stages: (layout, counts, num_chunks) -> the stages with their rows.
        incompatibility: why the chain cannot run on a layout, or None if it can.
        serial: the chain runs in one chunk.
    """

    name: str
    rows: Rows
    stages: tuple[Stage, ...]
    bind_stages: Callable[[Layout, ChainCounts, int], tuple[BoundStage, ...]]
    incompatibility: Callable[[Layout], str | None] = lambda layout: None
    serial: bool = False

    @property
    def copies_per(self) -> tuple[str, ...]:
        """What the chain makes a copy of a token for, in order: "node", "rank", "expert"."""
        return tuple(stage.per for stage in self.stages if isinstance(stage, Duplicate))

    @property
    def groups(self) -> tuple[GroupName, ...]:
        """The groups of its collectives, in order."""
        return tuple(
            stage.group for stage in self.stages if isinstance(stage, AllToAll | AllGather)
        )

    def bind(self, layout: Layout, counts: ChainCounts, num_chunks: int) -> "BoundChain":
        """Rows per stage, chunk and peer for these counts.

        Args:
            layout: this rank's place.
            counts: `Counts` where rows are permuted tokens, `TokenCounts` where they are tokens.
            num_chunks: C; at most B where rows are tokens, whose chunks consist of whole blocks.

        Raises:
            UserError: `num_chunks` is below 1, or above the number of blocks.
        """
        if num_chunks < 1:
            raise UserError(f"num_chunks: got {num_chunks}, must be at least 1")
        if isinstance(counts, TokenCounts) and num_chunks > counts.tokens.shape[1]:
            raise UserError(
                f"num_chunks: got {num_chunks}, must be at most the number of token blocks, "
                f"{counts.tokens.shape[1]}"
            )
        return BoundChain(
            chain=self,
            layout=layout,
            counts=counts,
            num_chunks=num_chunks,
            stages=self.bind_stages(layout, counts, num_chunks),
        )


@dataclass(frozen=True, kw_only=True)
class BoundChain:
    """A chain with the rows of one rank in each stage and chunk.

    Attributes:
        chain: the chain that was bound.
        layout: the rank's place.
        counts: that it was bound to.
        num_chunks: C.
        stages: one entry per stage of the chain, in its order.
    """

    chain: Chain
    layout: Layout
    counts: ChainCounts
    num_chunks: int
    stages: tuple[BoundStage, ...]

    @property
    def num_source_rows(self) -> float:
        """Rows of the whole tensor on the source side; an integer at run time."""
        return sum(self.rows_at[0])

    @property
    def num_expert_rows(self) -> float:
        """Rows of the whole tensor on the experts' side."""
        return sum(self.rows_at[-1])

    @cached_property
    def rows_per_local_expert(self) -> RowCounts:
        """[L] rows on the expert side, by the layer's local expert."""
        return self.counts.rows_per_local_expert(self.stages)

    @cached_property
    def rows_by_boundary(self) -> RowCounts:
        """[boundaries, C] rows before the first stage, between two stages, and after the last."""
        return np.array(self.rows_at)

    @cached_property
    def rows_at(self) -> list[list[float]]:
        """[boundaries][C] as Python numbers; integers at run time."""
        before = [stage.rows_before.tolist() for stage in self.stages]
        return [*before, self.stages[-1].rows_after.tolist()]

    @cached_property
    def shape(self) -> "ChainShape":
        """Properties that its programs depend on; the same object for equal ones."""
        stages = tuple([stage.shape for stage in self.stages])
        layout = self.layout
        return _chain_shape(stages, self.num_chunks, layout.etp, layout.crossing_groups)


@dataclass(frozen=True, eq=False)
class ChainShape:
    """Properties of a bound chain that do not depend on counts or ranks. Compared by identity.

    Attributes:
        stages: shapes of the stages, in the chain's order.
        num_chunks: C.
        etp: expert tensor parallel size.
        crossing_groups: the groups that span nodes.
    """

    stages: tuple[StageShape, ...]
    num_chunks: int
    etp: int
    crossing_groups: frozenset[GroupName]


# Programs are cached by the shape of a chain, whose hash is that of its identity: equal shapes are
# found once for a bound chain, and not in each of its passes.
_chain_shape = lru_cache(maxsize=4096)(ChainShape)


# Columns of the header.
HEADER_SIZE = 5
# int32 holds the tokens of one rank, which are checked against this limit, and the experts of one
# token, which are fewer than a row of the routing map has bytes. The host sums over ranks in int64.
COUNT_BYTES = 4
MOST_TOKENS = 2**31 - 1


def num_parts(chains: Sequence[Chain], layout: Layout) -> dict[str, int]:
    """Number of parts by name ("node", "rank"), of those that a chain copies tokens for."""
    named = {part for chain in chains for part in chain.copies_per}
    sizes = {"node": layout.num_nodes, "rank": layout.ep}
    return {part: size for part, size in sizes.items() if part in named}


def num_counted_blocks(chains: Sequence[Chain], num_blocks: int) -> int:
    """Number of counted token blocks: only chains whose rows are tokens need more than one."""
    return num_blocks if any(chain.rows == "tokens" for chain in chains) else 1


def message_columns(chains: Sequence[Chain], layout: Layout) -> dict[str, int]:
    """Columns of a message by section, in order, for each token block.

    A rank counts tokens by expert, and by the parts that the chains copy tokens for, in each block.
    It sends every rank one message of int32, all of the same size:

        header           facts about the sender, repeated in all messages and blocks: its tokens;
                         rows that its experts received in the last exchange; most experts of a
                         token; its tag, in two columns
        experts          token-expert pairs for each expert of that rank
        for_node         tokens for its node
        for_rank         tokens for itself; or, where tokens are copied for nodes first,
        for_node_ranks   for each rank of its node

    Columns of parts exist only if one of the chains copies tokens for those parts. If no chain's
    rows are tokens, there is one block.

    Args:
        chains: the candidates, one of which will run.
        layout: any rank's place.
    """
    parts = num_parts(chains, layout)
    columns = {"header": HEADER_SIZE, "experts": layout.num_local_experts}
    if "node" in parts:
        columns["for_node"] = 1
    if "rank" in parts:
        columns |= {"for_node_ranks": layout.ranks_per_node} if "node" in parts else {"for_rank": 1}
    return columns


def message_size(chains: Sequence[Chain], layout: Layout, num_blocks: int) -> int:
    """Integers that a rank sends to each rank, for `num_blocks` token blocks."""
    blocks = num_counted_blocks(chains, num_blocks)
    return blocks * sum(message_columns(chains, layout).values())
