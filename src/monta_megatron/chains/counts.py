"""Counts that a chain is bound to, and the columns of the messages in which they arrive.

A rank counts tokens by expert, and by the parts that the chains copy tokens for, in each block. It
sends every rank one message of int32, all of the same size, with these columns for each block:

    header               facts about the sender, repeated in all messages and blocks: its tokens;
                         rows that its experts received in the last exchange; most experts of a
                         token; its tag, in two columns
    experts              token-expert pairs for each expert of that rank
    for_node             tokens for its node
    for_rank             tokens for itself; or, where tokens are copied for nodes first,
    for_node_ranks       for each rank of its node

Columns of parts exist only if one of the chains copies tokens for those parts. If no chain's rows
are tokens, there is one block. No torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from monta_megatron.chains.stages import BoundStage, RowCounts
from monta_megatron.core import Layout

if TYPE_CHECKING:
    from monta_megatron.chains.chain import Chain

# Columns of the header.
HEADER_SIZE = 5
# int32 holds the tokens of one rank, which are checked against this limit, and the experts of one
# token, which are fewer than a row of the routing map has bytes. The host sums over ranks in int64.
COUNT_BYTES = 4
MOST_TOKENS = 2**31 - 1


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

    def num_source_rows(self, rank: int) -> float:
        """Rows of this rank on the source side; an integer at run time."""
        return self.sent.sum().item()

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

    def num_source_rows(self, rank: int) -> float:
        """Tokens of a rank; an integer at run time."""
        return self.tokens[rank].sum().item()

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


def num_parts(chains: Sequence["Chain"], layout: Layout) -> dict[str, int]:
    """Number of parts by name ("node", "rank"), of those that a chain copies tokens for."""
    named = {part for chain in chains for part in chain.copies_per}
    sizes = {"node": layout.num_nodes, "rank": layout.ep}
    return {part: size for part, size in sizes.items() if part in named}


def num_counted_blocks(chains: Sequence["Chain"], num_blocks: int) -> int:
    """Number of counted token blocks: only chains whose rows are tokens need more than one."""
    return num_blocks if any(chain.rows == "tokens" for chain in chains) else 1


def message_columns(chains: Sequence["Chain"], layout: Layout) -> dict[str, int]:
    """Columns of a message by section, in order.

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


def message_size(chains: Sequence["Chain"], layout: Layout, num_blocks: int) -> int:
    """Integers that a rank sends to each rank, for `num_blocks` token blocks."""
    blocks = num_counted_blocks(chains, num_blocks)
    return blocks * sum(message_columns(chains, layout).values())
