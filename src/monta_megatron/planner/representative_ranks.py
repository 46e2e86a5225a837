"""The ranks that are priced: of those that do the same, one stands for all.

Two ranks move the same number of bytes in every stage of every chain if

- the routing is even: a rank has as many rows for any peer as for any other; or, on even nodes in
  order, both get as many rows, on nodes that do (`Routing.kinds`), and
- in every group, each of them has as many peers on its node as the other.

On even nodes in order all ranks are such. Elsewhere, few are not: of 256 consecutive ranks on nodes
of 72, those on the first, the last and the other nodes. Ranks that share a network interface are
priced together, so it is interfaces that have to be the same, rank by rank.

Notation: S = ranks of the exchange.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from monta_megatron.chains.layout import FLAT_GROUPS, Layout
from monta_megatron.planner.routing import Routing


@dataclass(frozen=True, kw_only=True)
class PricedRanks:
    """The ranks that are priced, those of a network interface one after the other.

    Attributes:
        layouts: as they see the exchange; the first rank of the exchange comes first.
        num_represented: number of ranks that each of them stands for, itself included.
        nic_starts: position in `layouts` of the first rank of each network interface.
    """

    layouts: tuple[Layout, ...]
    num_represented: tuple[int, ...]
    nic_starts: tuple[int, ...]


# Needed for every chain and number of chunks.
@lru_cache(maxsize=64)
def priced_ranks(layout: Layout, routing: Routing, ranks_per_nic: int) -> PricedRanks:
    """Find the ranks of an exchange that are priced.

    Args:
        layout: layout of the exchange, as any of its ranks sees it.
        routing: where tokens go.
        ranks_per_nic: ranks of a node that share a network interface.
    """
    kinds = _kinds(layout, routing)
    num_represented: dict[tuple[Hashable, ...], int] = {}
    ranks_of: dict[tuple[Hashable, ...], list[int]] = {}
    for ranks in _by_nic(layout, ranks_per_nic):
        kind = tuple(kinds[rank] for rank in ranks)
        num_per_rank = 1
        if len(set(kind)) == 1:
            # Together they are as busy as one by itself.
            kind, ranks, num_per_rank = kind[:1], ranks[:1], len(ranks)
        ranks_of.setdefault(kind, ranks)
        num_represented[kind] = num_represented.get(kind, 0) + num_per_rank
    layouts: list[Layout] = []
    nic_starts = []
    for ranks in ranks_of.values():
        nic_starts.append(len(layouts))
        layouts += [replace(layout, rank=rank) for rank in ranks]
    return PricedRanks(
        layouts=tuple(layouts),
        num_represented=tuple(
            num_represented[kind] for kind, ranks in ranks_of.items() for _ in ranks
        ),
        nic_starts=tuple(nic_starts),
    )


def _kinds(layout: Layout, routing: Routing) -> Sequence[Hashable]:
    """[S] equal for two ranks only if they move the same in every stage of every chain."""
    num_ranks = len(layout.nodes)
    in_order = layout.uneven_nodes() is None
    # Chains copy tokens for ranks, and for nodes if these are even.
    parts = {layout.ep, layout.num_nodes} if in_order else {layout.ep}
    if not all(routing.is_even(num_parts) for num_parts in parts):
        return routing.kinds(layout) if in_order else range(num_ranks)
    if in_order:
        return (None,) * num_ranks
    on_node = []
    for name in FLAT_GROUPS:
        peers = [(layout.members(name, rank), layout.nodes[rank]) for rank in range(num_ranks)]
        num_peers = Counter(peers)
        on_node.append([num_peers[key] for key in peers])
    return list(zip(*on_node, strict=True))


def _by_nic(layout: Layout, ranks_per_nic: int) -> list[list[int]]:
    """The ranks of each network interface."""
    by_nic: dict[tuple[int, int], list[int]] = {}
    on_node: Counter[int] = Counter()
    for rank, node in enumerate(layout.nodes):
        by_nic.setdefault((node, on_node[node] // ranks_per_nic), []).append(rank)
        on_node[node] += 1
    return list(by_nic.values())
