"""Expected counts of a router, by a formula.

The chains are bound to these counts by the same code that binds them to a micro-batch's counts,
with floats instead of integers.

Notation: T = tokens of a rank, E = experts, k = experts per token, S = source ranks, B = token
blocks, L = local experts, EP = expert parallel size.
"""

from dataclasses import dataclass
from functools import cache
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import Chain, ChainCounts, Counts, TokenCounts
from monta_megatron.common.text import counted
from monta_megatron.core import Layout


@dataclass(frozen=True, kw_only=True)
class UniformRouting:
    """k of E experts at random, within `group_topk` of `num_groups` groups, also at random.

    Attributes:
        num_experts: number of experts, E.
        topk: number of experts per token, k.
        num_groups: number of expert groups; 1 where every expert may be chosen.
        group_topk: number of groups that a token may use.
    """

    num_experts: int
    topk: int
    num_groups: int = 1
    group_topk: int = 1

    @property
    def name(self) -> str:
        """See `Routing`."""
        if self.group_topk == self.num_groups:
            return "uniform"
        return f"uniform in {self.group_topk} of {counted(self.num_groups, 'group')}"

    @property
    def max_experts_per_token(self) -> int:
        """The number of experts per token, k."""
        return self.topk

    def hits(self, num_parts: int) -> NDArray[np.float64]:
        """[P] share of the tokens that have an expert in each part."""
        return _uniform_hits(self, num_parts)

    def is_even(self, num_parts: int) -> bool:
        """See `Routing`."""
        return not np.ptp(self.hits(num_parts))

    def counts(
        self, chain: Chain, layout: Layout, tokens_per_rank: int, num_blocks: int
    ) -> ChainCounts:
        """See `Routing`."""
        share = self.topk / self.num_experts
        if chain.rows == "permuted tokens":
            received = np.full(
                (layout.etp, layout.ep, layout.num_local_experts), tokens_per_rank * share
            )
            return Counts(sent=received[0], received=received)
        block = tokens_per_rank / num_blocks
        num_sources = len(layout.nodes)

        def everywhere(counts: NDArray[np.float64]) -> NDArray[np.float64]:
            """[...] -> [S, B, ...]: the same from every source in every block."""
            return np.broadcast_to(counts, (num_sources, num_blocks, *counts.shape))

        fields: dict[str, Any] = {}
        for part in chain.copies_per:
            if part == "node":
                to_nodes = block * self.hits(layout.num_nodes)
                fields["sent_to_nodes"] = everywhere(to_nodes)[0]
                fields["for_node"] = everywhere(to_nodes[layout.node])
            elif part == "rank":
                to_ranks = block * self.hits(layout.ep)
                if "node" in chain.copies_per:
                    first = layout.node * layout.ranks_per_node
                    here = to_ranks[first : first + layout.ranks_per_node]
                    fields["for_node_ranks"] = everywhere(here)
                else:
                    fields["sent_to_ranks"] = everywhere(to_ranks)[0]
                    fields["for_rank"] = everywhere(to_ranks[layout.rank])
        return TokenCounts(
            tokens=everywhere(np.array(block)),
            experts=everywhere(np.full(layout.num_local_experts, block * share)),
            **fields,
        )


@cache
def _uniform_hits(routing: UniformRouting, num_parts: int) -> NDArray[np.float64]:
    part_size = routing.num_experts // num_parts
    group_size = routing.num_experts // routing.num_groups
    shares = []
    for start in range(0, routing.num_experts, part_size):
        overlaps = [
            max(min(start + part_size, group + group_size) - max(start, group), 0)
            for group in range(0, routing.num_experts, group_size)
        ]
        shares.append(1 - _misses(routing, tuple(sorted(overlaps))))
    return np.array(shares)


@cache
def _misses(routing: UniformRouting, overlaps: tuple[int, ...]) -> float:
    """Share of the tokens whose k experts all lie outside a range of experts.

    Without groups this is C(E - n, k) / C(E, k) for a range of n experts. With groups it is the
    mean of this over all choices of groups.

    Args:
        routing: the router.
        overlaps: number of experts of the range in each group.
    """
    # ways[chosen, shared]: number of choices of `chosen` groups with `shared` experts of the range.
    ways = {(0, 0): 1}
    for overlap in overlaps:
        for (chosen, shared), count in list(ways.items()):
            if chosen < routing.group_topk:
                key = (chosen + 1, shared + overlap)
                ways[key] = ways.get(key, 0) + count
    allowed = routing.group_topk * (routing.num_experts // routing.num_groups)
    missing = sum(
        count * comb(allowed - shared, routing.topk)
        for (chosen, shared), count in ways.items()
        if chosen == routing.group_topk
    )
    return missing / (comb(routing.num_groups, routing.group_topk) * comb(allowed, routing.topk))
