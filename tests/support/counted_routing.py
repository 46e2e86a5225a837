"""A routing given by its rows: integer counts, as the executor counts them.

Notation: T = tokens of a rank, E = experts, S = source ranks, M = routing maps, B = token blocks,
P = parts of the experts, EP = expert parallel size.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import Chain, ChainCounts, Counts, TokenCounts
from monta_megatron.core import Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class CountedRouting:
    """One micro-batch of every rank of the exchange; a `Routing` of integers.

    Attributes:
        routing_maps: [M] of [T, E]; rank r has the one at r % M. Ranks may have different numbers
            of tokens, the most of them as many as the shape says.
        name: for messages and plans.
    """

    routing_maps: tuple[NDArray[np.bool_], ...]
    name: str = "recorded"

    @property
    def num_experts(self) -> int:
        """E."""
        return self.routing_maps[0].shape[1]

    @property
    def max_experts_per_token(self) -> int:
        """The most experts of any token of any rank."""
        return max(1, *(int(rows.sum(axis=1).max(initial=0)) for rows in self.routing_maps))

    def is_even(self, num_parts: int) -> bool:
        """Every rank has counts of its own."""
        return False

    def counts(
        self, chain: Chain, layout: Layout, tokens_per_rank: int, num_blocks: int
    ) -> ChainCounts:
        """See `Routing`; the tokens are those of the maps."""
        blocks = 1 if chain.rows == "permuted tokens" else num_blocks
        # [S]
        map_of = np.arange(len(layout.nodes)) % len(self.routing_maps)
        here = slice(layout.first_expert, layout.first_expert + layout.num_local_experts)
        # [M, B, E] -> [S, B, E]
        by_expert = self._hits(blocks, self.num_experts)[map_of]
        if chain.rows == "permuted tokens":
            # [S, E] -> [EP, ETP, E]
            table = by_expert[:, 0].reshape(layout.ep, layout.etp, -1)
            sent = by_expert[layout.rank, 0].reshape(layout.ep, -1)
            return Counts(sent=sent, received=table.transpose(1, 0, 2)[:, :, here])

        fields = {}
        if "node" in chain.copies_per:
            by_node = self._hits(blocks, layout.num_nodes)[map_of]
            fields = {"sent_to_nodes": by_node[layout.rank], "for_node": by_node[:, :, layout.node]}
        if "rank" in chain.copies_per:
            by_rank = self._hits(blocks, layout.ep)[map_of]
            if fields:
                first = layout.node * layout.ranks_per_node
                fields["for_node_ranks"] = by_rank[:, :, first : first + layout.ranks_per_node]
            else:
                fields["sent_to_ranks"] = by_rank[layout.rank]
                fields["for_rank"] = by_rank[:, :, layout.rank]
        lengths = np.array([_block_lengths(len(rows), blocks) for rows in self.routing_maps])
        return TokenCounts(tokens=lengths[map_of], experts=by_expert[:, :, here], **fields)

    def _hits(self, num_blocks: int, num_parts: int) -> NDArray[np.int64]:
        """[M, B, P] tokens with an expert in each of P equal parts of the experts."""
        hits = []
        for rows in self.routing_maps:
            # [T, E] -> [T, P]
            in_part = rows.reshape(len(rows), num_parts, rows.shape[1] // num_parts).any(axis=2)
            ends = np.cumsum(_block_lengths(len(rows), num_blocks))
            hits.append([block.sum(axis=0) for block in np.split(in_part, ends[:-1])])
        return np.array(hits)


def _block_lengths(num_tokens: int, num_blocks: int) -> list[int]:
    """[B] tokens of each block: full ones, then the rest, as the executor cuts them."""
    size = max(-(-num_tokens // num_blocks), 1)
    return [min(max(num_tokens - block * size, 0), size) for block in range(num_blocks)]
