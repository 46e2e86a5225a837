"""How often experts are chosen together, and what it costs: copies of a token by rank and node.

An exchange that sends one copy of a token to each part of the experts (a rank, a node) sends as
many as the token has parts with an expert of its. Experts that tokens choose together collaborate
(Occult, arXiv 2505.13345): within a part it saves copies, across parts it costs them.

Notation: T = tokens, E = experts, k = experts per token, P = equal parts of the experts, in order.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monta_megatron.planner.routing.expected import UniformRouting

Routings = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Collaboration:
    """What a layer's tokens need of P parts of its experts, beside uniform routing.

    Attributes:
        copies: parts per token that hold an expert of its.
        uniform_copies: the same, were experts chosen at random.
        intra: share of the pairs of experts of a token that lie in one part.
        uniform_intra: the same, were experts chosen at random.
        load: token-expert pairs of the busiest part over their mean.
    """

    copies: float
    uniform_copies: float
    intra: float
    uniform_intra: float
    load: float

    @property
    def inter(self) -> float:
        """Share of the pairs of experts of a token that lie in two parts."""
        return 1 - self.intra


def collaboration(routing_map: Routings, num_parts: int, uniform: UniformRouting) -> Collaboration:
    """What the tokens of a layer need.

    Args:
        routing_map: [T, E] whether a token goes to an expert; T is at least 1.
        num_parts: P.
        uniform: routing of the same router at random.
    """
    # [T, E] -> [T, P] experts of a token in each part
    chosen = routing_map.reshape(len(routing_map), num_parts, -1).sum(axis=2, dtype=np.int64)
    topk = chosen.sum(axis=1)
    pairs = (topk * (topk - 1)).sum()
    load = chosen.sum(axis=0)
    together = (chosen * (chosen - 1)).sum()
    return Collaboration(
        copies=float((chosen > 0).sum(axis=1).mean()),
        uniform_copies=float(uniform.hits(num_parts).sum()),
        intra=float(together / pairs) if pairs else 1.0,
        uniform_intra=_uniform_intra(num_parts, uniform),
        load=float(load.max() / load.mean()) if load.any() else 1.0,
    )


def _uniform_intra(num_parts: int, uniform: UniformRouting) -> float:
    """Chance that two experts of a token lie in one part: those next to a first one, of all.

    Of the other allowed experts each is as likely. Those of the first one's group are allowed,
    and those of another group if it is one of the `group_topk - 1` besides.
    """
    groups, group_topk = uniform.num_groups, uniform.group_topk
    part, group = uniform.num_experts // num_parts, uniform.num_experts // groups
    if group_topk * group == 1:
        return 1.0
    others = max(part - group, 0)
    share = (group_topk - 1) / (groups - 1) if groups > 1 else 0.0
    return (min(part, group) - 1 + others * share) / (group_topk * group - 1)


def co_activation(routing_map: Routings) -> NDArray[np.float64]:
    """[T, E] -> [E, E] share of the tokens that go to both experts; on the diagonal, to one."""
    chosen = routing_map.astype(np.float32)
    shares: NDArray[np.float64] = (chosen.T @ chosen).astype(np.float64) / max(len(chosen), 1)
    return shares
