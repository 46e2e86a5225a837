"""The routing observed in a training, reduced to the figures that prices depend on.

A collective takes as long as its busiest rank. So of all ranks those of the busiest node, and on
every node the busiest rank, have figures of their own, and the others their mean. A plan is then
found again whichever ranks are the busiest, and four ranks are priced, not all of them. Figures are
rounded, so that no plan is made for noise.

Notation: EP = expert parallel size, N = nodes, E = experts, R = EP ranks of a node.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains.layout import Layout
from monta_megatron.planner.routing.expected import ExpectedRouting

# Figures are rounded to powers of 2^(1/32), by 1.1% at most; one that has changed by 2 steps, 4%,
# is another routing.
STEPS_PER_OCTAVE = 32
STEPS_TO_NOTICE = 2
# Below this share of the tokens nothing is told apart.
LEAST_SHARE = 2.0**-10
# An iteration's weight in the moving average, once there have been as many.
AVERAGED_ITERATIONS = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """Traffic of an exchange, per token of all ranks.

    Attributes:
        pairs: [EP] token-expert pairs for each EP rank's experts.
        rank_hits: [EP] tokens with an expert there; empty where no chain copies tokens for ranks.
        node_hits: [N] tokens with an expert on each node; likewise.
    """

    pairs: NDArray[np.float64]
    rank_hits: NDArray[np.float64]
    node_hits: NDArray[np.float64]

    def averaged(self, latest: "Traffic", num_iterations: int) -> "Traffic":
        """The moving average after one more iteration.

        Args:
            latest: the traffic of that iteration.
            num_iterations: how many are in the average.
        """
        weight = 1 / min(num_iterations + 1, AVERAGED_ITERATIONS)
        return Traffic(
            **{
                name: before + weight * (getattr(latest, name) - before)
                for name, before in vars(self).items()
            }
        )


@dataclass(frozen=True, kw_only=True)
class ObservedRouting(ExpectedRouting):
    """A routing of four kinds of ranks: the busiest one or another, of the busiest node or another.

    The busiest node stands first, and so does the busiest rank of every node. Figures are exponents
    of 2^(1/32).

    Attributes:
        num_experts: E.
        topk: experts of a token by the configuration.
        ep: EP.
        num_nodes: N; 1 where the ranks do not lie evenly on nodes in order.
        pairs: [2, 2] for the busiest node and the others, of its busiest rank and the others.
        rank_hits: likewise; None where they are not counted.
        node_hits: [2] of the busiest node and the others; likewise.
    """

    num_experts: int
    topk: int
    ep: int
    num_nodes: int
    pairs: tuple[int, ...]
    rank_hits: tuple[int, ...] | None
    node_hits: tuple[int, ...] | None

    @property
    def name(self) -> str:
        """See `Routing`."""
        return "observed"

    @property
    def max_experts_per_token(self) -> int:
        """The configured number; the exchanged counts say where there are more."""
        return self.topk

    @cached_property
    def expert_shares(self) -> NDArray[np.float64]:
        """[E] the experts of a rank get as many tokens each."""
        experts_of_rank = self.num_experts // self.ep
        return np.repeat(self._by_rank(self.pairs) / experts_of_rank, experts_of_rank)

    def hits(self, num_parts: int) -> NDArray[np.float64]:
        """[P] share of the tokens that have an expert in each part."""
        if num_parts == self.num_nodes and self.node_hits is not None:
            busiest, other = np.minimum(_values(self.node_hits), 1.0)
            return np.array([busiest, *[other] * (num_parts - 1)])
        if num_parts == self.ep and self.rank_hits is not None:
            return np.minimum(self._by_rank(self.rank_hits), 1.0)
        # Not counted, as no chain asks for it: at most one token per pair.
        pairs = self.expert_shares.reshape(num_parts, -1).sum(axis=1)
        return np.minimum(pairs, 1.0)

    def kinds(self, layout: Layout) -> Sequence[int]:
        """See `Routing`."""
        if layout.num_nodes != self.num_nodes:
            return range(len(layout.nodes))
        ranks_of_node = self.ep // self.num_nodes
        kinds = np.full((self.num_nodes, ranks_of_node), 3)
        kinds[0], kinds[:, 0], kinds[0, 0] = 2, 1, 0
        return [int(kind) for kind in np.repeat(kinds.ravel(), layout.etp)]

    def differs(self, other: "ObservedRouting") -> bool:
        """Whether another routing is so different that it is worth another plan."""
        figures = [
            (*routing.pairs, *(routing.rank_hits or ()), *(routing.node_hits or ()))
            for routing in (self, other)
        ]
        return any(
            abs(mine - theirs) >= STEPS_TO_NOTICE for mine, theirs in zip(*figures, strict=True)
        )

    def _by_rank(self, figures: Sequence[int]) -> NDArray[np.float64]:
        """[2, 2] exponents -> [EP]."""
        table = np.empty((self.num_nodes, self.ep // self.num_nodes))
        values = _values(figures).reshape(2, 2)
        table[:, :1], table[:, 1:] = values[1, 0], values[1, 1]
        table[0, :1], table[0, 1:] = values[0, 0], values[0, 1]
        return table.ravel()


def observed_routing(traffic: Traffic, layout: Layout, topk: int) -> ObservedRouting:
    """The routing that this traffic amounts to.

    Args:
        traffic: of all ranks.
        layout: the exchange, as any of its ranks sees it.
        topk: experts of a token by the configuration.
    """
    num_nodes = 1 if layout.uneven_nodes() is not None else layout.num_nodes
    # Nodes that are uneven have no chain that copies tokens for them.
    node_hits = np.sort(traffic.node_hits)[::-1][None, :]
    return ObservedRouting(
        num_experts=layout.num_experts,
        topk=topk,
        ep=layout.ep,
        num_nodes=num_nodes,
        pairs=_reduced(traffic.pairs.reshape(num_nodes, -1)),
        rank_hits=_reduced(traffic.rank_hits.reshape(num_nodes, -1))
        if traffic.rank_hits.size
        else None,
        node_hits=_reduced(node_hits)[:2] if traffic.node_hits.size else None,
    )


def expected_traffic(routing: ExpectedRouting, layout: Layout, like: Traffic) -> Traffic:
    """Expected traffic of a routing.

    Args:
        routing: that is expected.
        layout: the exchange, as any of its ranks sees it.
        like: traffic that has the same figures.
    """
    return Traffic(
        pairs=routing.expert_shares.reshape(layout.ep, -1).sum(axis=1),
        rank_hits=routing.hits(layout.ep) if like.rank_hits.size else like.rank_hits,
        node_hits=routing.hits(layout.num_nodes) if like.node_hits.size else like.node_hits,
    )


def _reduced(by_node: NDArray[np.float64]) -> tuple[int, ...]:
    """[N, R] -> [2, 2] exponents: the busiest node, the others; the busiest rank, the others."""
    # [N, R] each node's busiest rank first, then the node with the busiest of all first
    sorted_ranks = np.sort(by_node, axis=1)[:, ::-1]
    nodes = sorted_ranks[np.argsort(-sorted_ranks[:, 0], kind="stable")]
    busiest, others = nodes[:1], nodes[1:] if len(nodes) > 1 else nodes[:1]
    return tuple(
        _exponent(part[:, columns].mean() if part[:, columns].size else 0.0)
        for part in (busiest, others)
        for columns in (slice(0, 1), slice(1, None))
    )


def _exponent(share: float) -> int:
    return round(STEPS_PER_OCTAVE * math.log2(max(share, LEAST_SHARE)))


def _values(figures: Sequence[int]) -> NDArray[np.float64]:
    return np.exp2(np.array(figures) / STEPS_PER_OCTAVE)
