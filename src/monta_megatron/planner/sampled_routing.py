"""Routings without a formula: drawn, or read from a trace.

Notation: N = tokens of the sample, E = experts, P = parts of the experts.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from monta_megatron.planner.routing import ExpectedRouting

# Tokens drawn to find the expected counts of a routing that has no formula.
NUM_SAMPLES = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledRouting(ExpectedRouting):
    """Shares in a sample of tokens: from a trace, or drawn if there is no formula.

    Attributes:
        name: for messages and plans.
        routing_map: [N, E] bool, one row per token of the sample.
    """

    name: str
    routing_map: NDArray[np.bool_]
    _hits: dict[int, NDArray[np.float64]] = field(default_factory=dict, repr=False)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.routing_map.shape[1]

    @property
    def list_width(self) -> int:
        """The longest list of any token in the sample."""
        return max(int(self.routing_map.sum(axis=1).max(initial=0)), 1)

    @cached_property
    def pairs(self) -> NDArray[np.float64]:
        """[E] pairs per token and expert."""
        return self.routing_map.mean(axis=0)

    def hits(self, num_parts: int) -> NDArray[np.float64]:
        """[P] share of the tokens that have an expert in each part."""
        if num_parts not in self._hits:
            parts = self.routing_map.reshape(self.routing_map.shape[0], num_parts, -1)
            self._hits[num_parts] = parts.any(axis=2).mean(axis=0)
        return self._hits[num_parts]


def skewed_routing(num_experts: int, topk: int, seed: int = 0) -> SampledRouting:
    """A routing that draws the i-th most wanted expert with weight 1/i, in random order."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(num_experts)
    # The top k of log-weight + Gumbel noise are a weighted draw without replacement.
    scores = generator.gumbel(size=(NUM_SAMPLES, num_experts)) - np.log1p(order)
    chosen = np.argpartition(scores, num_experts - topk, axis=1)[:, num_experts - topk :]
    routing_map = np.zeros((NUM_SAMPLES, num_experts), dtype=np.bool_)
    np.put_along_axis(routing_map, chosen, True, axis=1)
    return SampledRouting(name="skewed", routing_map=routing_map)
