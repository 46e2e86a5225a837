"""A chain: a short list of stages, and the rule that turns counts into rows per stage and chunk.

Dispatch applies the chain to the rows, and combine applies its transpose; the backward pass of
each applies what the other does. So one description serves all four walks.

Notation: C = number of chunks, B = number of token blocks, S = source ranks, EP = expert parallel
size, ETP = expert tensor parallel size, L = local experts per EP rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from monta_megatron.chains.stages import (
    AllGather,
    AllToAll,
    BoundStage,
    Replicate,
    RowCounts,
    Stage,
)
from monta_megatron.topology.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts of (token, expert) pairs, for the chains whose rows are pairs.

    Run-time counts are integers; the planner passes expected values as floats through the same
    code.

    Attributes:
        sent: [EP, L] rows of this rank for each expert, by the expert's EP rank.
        received: [ETP, EP, L] rows from every source rank for each expert of this EP rank.
    """

    sent: RowCounts
    received: RowCounts


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """Counts by token block, for the chains whose rows are tokens.

    "For" a rank or a node means tokens with at least one expert there. Only what the chain needs
    is set; the rest is None.

    Attributes:
        tokens: [S, B] tokens of every source.
        experts: [S, B, L] pairs of every source for each expert of this rank.
        sent_to_ranks: [B, EP] tokens of this rank for each EP rank.
        for_rank: [S, B] tokens of every source for this rank.
        sent_to_nodes: [B, nodes] tokens of this rank for each node.
        for_node: [S, B] tokens of every source for this node.
        for_node_ranks: [S, B, R] tokens of every source for each rank of this node.
    """

    tokens: RowCounts
    experts: RowCounts
    sent_to_ranks: RowCounts | None = None
    for_rank: RowCounts | None = None
    sent_to_nodes: RowCounts | None = None
    for_node: RowCounts | None = None
    for_node_ranks: RowCounts | None = None


def order_of_issue(depths: Sequence[int], num_chunks: int) -> list[tuple[int, int]]:
    """(stage, chunk) pairs in the order of issue, which is the same on every rank.

    Stage s of chunk c is issued in step c + depths[s]; within a step, stages go in order.

    Args:
        depths: how many steps each stage of a walk trails the first; see `BoundChain.depths`.
        num_chunks: C; chunks are numbered in the order of the walk, see `BoundChain.chunk`.
    """
    return [
        (position, step - depth)
        for step in range(num_chunks + depths[-1])
        for position, depth in enumerate(depths)
        if 0 <= step - depth < num_chunks
    ]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A list of stages and its binding.

    Attributes:
        name: what users write, such as "alltoall_allgather".
        rows: what a row is on the source side: a (token, expert) pair, in Megatron's own
            permutation, or a token, which is copied for the parts it goes to.
        stages: applied left to right by dispatch, transposed right to left by combine.
        bind_stages: (layout, counts, num_chunks) -> the stages with their rows.
        refusal: why the chain cannot run on a layout, or None if it can.
        serial: the chain runs in one chunk.
        order: (depths of a walk's stages, num_chunks) -> (stage, chunk) in the order of issue.
    """

    name: str
    rows: Literal["pairs", "tokens"]
    stages: tuple[Stage, ...]
    bind_stages: Callable[[Layout, Any, int], tuple[BoundStage, ...]]
    refusal: Callable[[Layout], str | None] = lambda layout: None
    serial: bool = False
    order: Callable[[Sequence[int], int], list[tuple[int, int]]] = order_of_issue

    @property
    def parts(self) -> tuple[str, ...]:
        """What the chain copies tokens for, in order: "node", "rank", "expert"."""
        return tuple(stage.part for stage in self.stages if isinstance(stage, Replicate))

    def bind(self, layout: Layout, counts: Counts | TokenCounts, num_chunks: int) -> "BoundChain":
        """Rows per stage, chunk and peer for these counts.

        Args:
            layout: this rank's place.
            counts: `Counts` where rows are pairs, `TokenCounts` where they are tokens.
            num_chunks: C; at most B where rows are tokens, whose chunks are made of whole blocks.

        Raises:
            ValueError: `num_chunks` is below 1, or above the number of blocks.
        """
        if num_chunks < 1:
            raise ValueError(f"num_chunks: got {num_chunks}, must be at least 1")
        if isinstance(counts, Counts):
            num_source_rows = counts.sent.sum().item()
            rows_per_local_expert = counts.received.sum(axis=(0, 1))
        else:
            if num_chunks > counts.tokens.shape[1]:
                raise ValueError(
                    f"num_chunks: got {num_chunks}, must be at most the number of token blocks, "
                    f"{counts.tokens.shape[1]}"
                )
            num_source_rows = counts.tokens[layout.rank].sum().item()
            by_class = counts.experts.sum(axis=(0, 1)).reshape(-1, layout.classes)
            rows_per_local_expert = by_class.sum(axis=1)
        return BoundChain(
            chain=self,
            layout=layout,
            num_chunks=num_chunks,
            stages=self.bind_stages(layout, counts, num_chunks),
            num_source_rows=num_source_rows,
            rows_per_local_expert=rows_per_local_expert,
        )


@dataclass(frozen=True, kw_only=True)
class BoundChain:
    """A chain with the rows that one rank moves in each stage and chunk.

    Attributes:
        chain: the chain that was bound.
        layout: the rank's place.
        num_chunks: C.
        stages: one entry per stage of the chain, in its order.
        num_source_rows: rows of the whole tensor on the source side; an integer at run time.
        rows_per_local_expert: [L / classes] rows on the expert side, by the layer's local expert.
    """

    chain: Chain
    layout: Layout
    num_chunks: int
    stages: tuple[BoundStage, ...]
    num_source_rows: float
    rows_per_local_expert: RowCounts

    @property
    def num_expert_rows(self) -> float:
        """Rows of the whole tensor on the experts' side."""
        return self.rows_per_local_expert.sum().item()

    @property
    def packs(self) -> bool:
        """Whether the lanes share messages: they do wherever rows are copied on the way in."""
        return self.num_chunks > 1 or self.chain.rows == "tokens"

    @cached_property
    def turns_back(self) -> bool:
        """Whether transposed walks take the chunks from the last to the first: the small one first.

        After a single collective there is only a copy to hide, and with a small first chunk the
        large ones would be in memory together with the output.
        """
        return self.depths(transpose=False, copies_block_host=False)[-1] > 1

    def depths(self, transpose: bool, copies_block_host: bool) -> list[int]:
        """[N] how many steps each stage of a walk trails the first one.

        One step for every collective before it, so that each collective has two chunks under way.
        A copy needs no step of its own, because it runs together with the stage after it; nor does
        a group of one rank, where nothing moves.

        Where the host itself moves what stays on a node, it can do nothing else meanwhile, so
        nothing trails a collective inside a node: a chunk that waited there would only reach the
        network, or its place, later. If no collective leaves its node, all of them are trailed:
        ranks that are not equally far along then wait less for each other.

        Args:
            transpose: the walk goes through the stages from the last to the first.
            copies_block_host: the host moves what stays on a node, as CPU ranks do; see above.
        """
        stages = self.stages[::-1] if transpose else self.stages
        groups = [
            bound.stage.group
            if isinstance(bound.stage, AllToAll | AllGather) and bound.send.shape[1] > 1
            else None
            for bound in stages
        ]
        trailed = set(groups) - {None}
        if copies_block_host:
            trailed = trailed & self.layout.crossing_groups or trailed
        return [0, *accumulate(int(group in trailed) for group in groups[:-1])]

    def copies_per_sum(self, num_copies: int) -> int:
        """How many adjacent copies of a row are summed first, before those sums are added up.

        The ETP parts of each expert's output, as in stock; all copies if there is no such nesting.
        """
        etp = self.layout.etp
        return etp if 1 < etp < num_copies and num_copies % etp == 0 else num_copies

    def chunk(self, turn: int, transpose: bool) -> int:
        """The chunk that a walk takes in this turn."""
        return self.num_chunks - 1 - turn if transpose and self.turns_back else turn

    def walked(self, transpose: bool) -> tuple[BoundStage, ...]:
        """The stages of a walk in its order, each with its chunks in the order of the walk."""
        if not transpose:
            return self.stages
        order = slice(None, None, -1 if self.turns_back else 1)
        return tuple(
            replace(stage, send=stage.send[order], receive=stage.receive[order])
            for stage in self.stages[::-1]
        )
