"""Routing given by its rows: the routing maps of every rank of one exchange.

What is expected of shares of tokens (`routing.ExpectedRouting`) is the same for every rank, and the
mean of layers that differ is more even than any of them. Here each rank has the rows that it has:
which of them goes where, and how much the busiest rank gets, is that of one real exchange.

Notation: T = tokens of a rank, E = experts, S = source ranks, M = routing maps, B = token blocks,
L = local experts, P = parts of the experts, EP = expert parallel size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import Chain, Counts, TokenCounts
from monta_megatron.chains.layout import Layout

# The routing maps of one exchange: rank r has the one at r, modulo their number.
Exchange: TypeAlias = tuple[NDArray[np.bool_], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedRouting:
    """One micro-batch of every rank of the exchange: integer counts, as the executor counts them.

    Attributes:
        name: for messages and plans.
        routing_maps: [M] of [T, E]; rank r has the one at r % M. Ranks may have different numbers
            of tokens, the most of them as many as the workload says.
    """

    name: str
    routing_maps: Exchange
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

    def kinds(self, layout: Layout) -> range:
        """Likewise."""
        return range(len(layout.nodes))

    def counts(
        self, chain: Chain, layout: Layout, tokens_per_rank: int, num_blocks: int
    ) -> Counts | TokenCounts:
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
        for part in chain.parts:
            if part == "node":
                by_node = self._hits(num_blocks, layout.num_nodes)[map_of]
                fields["sent_to_nodes"] = by_node[layout.rank]
                fields["for_node"] = by_node[:, :, layout.node]
            elif part == "rank":
                by_rank = self._hits(num_blocks, layout.ep)[map_of]
                if "node" in chain.parts:
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


def typical_exchange(exchanges: Sequence[Exchange], num_ranks: int, ep: int) -> Exchange:
    """The exchange whose busiest rank is in the middle: half of the others have a busier one.

    Args:
        exchanges: at least one.
        num_ranks: S.
        ep: EP.
    """

    def busiest(exchange: Exchange) -> int:
        """Token-expert pairs of the expert parallel rank that gets most."""
        times = np.bincount(np.arange(num_ranks) % len(exchange), minlength=len(exchange))
        pairs = sum(
            int(count) * rows.sum(axis=0) for count, rows in zip(times, exchange, strict=True)
        )
        return int(np.reshape(pairs, (ep, -1)).sum(axis=1).max())

    loads = [busiest(exchange) for exchange in exchanges]
    order = sorted(range(len(loads)), key=lambda number: (loads[number], number))
    return exchanges[order[(len(order) - 1) // 2]]


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
