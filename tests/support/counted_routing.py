"""A routing given by its rows: integer counts, as the executor counts them.

Notation: T = tokens of a rank, E = experts, S = source ranks, M = routing maps, B = token blocks,
L = local experts, P = parts of the experts, EP = expert parallel size.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import Chain, ChainCounts, Counts, TokenCounts
from monta_megatron.core import Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class CountedRouting:
    """One micro-batch of every rank of the exchange: integer counts, as the executor counts them.

    Attributes:
        name: for messages and plans.
        routing_maps: [M] of [T, E]; rank r has the one at r % M. Ranks may have different numbers
            of tokens, the most of them as many as the shape says.
    """

    name: str
    routing_maps: tuple[NDArray[np.bool_], ...]
    _counted: dict[tuple[int, int], NDArray[np.int64]] = field(default_factory=dict, repr=False)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.routing_maps[0].shape[1]

    # Needed for every program.
    @cached_property
    def max_experts_per_token(self) -> int:
        """The most experts of any token of any rank."""
        return max(
            max((int(rows.sum(axis=1).max(initial=0)) for rows in self.routing_maps), default=0), 1
        )

    def is_even(self, num_parts: int) -> bool:
        """Every rank has counts of its own."""
        return False

    def counts(
        self, chain: Chain, layout: Layout, tokens_per_rank: int, num_blocks: int
    ) -> ChainCounts:
        """See `Routing`; the tokens are those of the maps."""
        local = slice(layout.first_expert, layout.first_expert + layout.num_local_experts)
        # [S]
        map_of = np.arange(len(layout.nodes)) % len(self.routing_maps)
        if chain.rows == "permuted tokens":
            # [M, E] -> [S, E] -> [EP, ETP, E] -> [ETP, EP, L]
            table = self._hits(1, self.num_experts)[:, 0][map_of]
            received = table.reshape(layout.ep, layout.etp, -1).transpose(1, 0, 2)[:, :, local]
            return Counts(sent=table[layout.rank].reshape(layout.ep, -1), received=received)

        lengths = np.array([_block_lengths(len(rows), num_blocks) for rows in self.routing_maps])
        fields: dict[str, Any] = {}
        for part in chain.copies_per:
            if part == "node":
                by_node = self._hits(num_blocks, layout.num_nodes)[map_of]
                fields["sent_to_nodes"] = by_node[layout.rank]
                fields["for_node"] = by_node[:, :, layout.node]
            elif part == "rank":
                by_rank = self._hits(num_blocks, layout.ep)[map_of]
                if "node" in chain.copies_per:
                    first = layout.node * layout.ranks_per_node
                    fields["for_node_ranks"] = by_rank[:, :, first : first + layout.ranks_per_node]
                else:
                    fields["sent_to_ranks"] = by_rank[layout.rank]
                    fields["for_rank"] = by_rank[:, :, layout.rank]
        by_expert = self._hits(num_blocks, self.num_experts)[map_of]
        return TokenCounts(tokens=lengths[map_of], experts=by_expert[:, :, local], **fields)

    def _hits(self, num_blocks: int, num_parts: int) -> NDArray[np.int64]:
        """[M, B, P] tokens with an expert in each of P equal parts of the experts."""
        key = (num_blocks, num_parts)
        if key not in self._counted:
            self._counted[key] = np.array(
                [
                    [block.sum(axis=0) for block in np.split(_parts(rows, num_parts), cuts)]
                    for rows in self.routing_maps
                    for cuts in [np.cumsum(_block_lengths(len(rows), num_blocks))[:-1]]
                ]
            )
        return self._counted[key]


def _parts(routing_map: NDArray[np.bool_], num_parts: int) -> NDArray[np.bool_]:
    """[T, E] -> [T, P]: whether a token has an expert in each part."""
    parts: NDArray[np.bool_] = routing_map.reshape(
        len(routing_map), num_parts, routing_map.shape[1] // num_parts
    ).any(axis=2)
    return parts


def _block_lengths(num_tokens: int, num_blocks: int) -> list[int]:
    """[B] tokens of each block: full ones, then the rest, as the executor cuts them."""
    size = max(-(-num_tokens // num_blocks), 1)
    return [min(max(num_tokens - block * size, 0), size) for block in range(num_blocks)]
