"""Routings without a formula: shares in a sample of tokens, drawn or read from a trace.

Notation: N = tokens of the sample, E = experts, P = parts of the experts.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from monta_megatron.planner.routing import ExpectedRouting


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledRouting(ExpectedRouting):
    """Shares in a sample of tokens.

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
    def max_experts_per_token(self) -> int:
        """The most experts of any token in the sample."""
        return max(int(self.routing_map.sum(axis=1).max(initial=0)), 1)

    @cached_property
    def expert_shares(self) -> NDArray[np.float64]:
        """[E] share of the tokens that go to each expert."""
        return self.routing_map.mean(axis=0)

    def hits(self, num_parts: int) -> NDArray[np.float64]:
        """[P] share of the tokens that have an expert in each part."""
        if num_parts not in self._hits:
            parts = self.routing_map.reshape(self.routing_map.shape[0], num_parts, -1)
            self._hits[num_parts] = parts.any(axis=2).mean(axis=0)
        return self._hits[num_parts]
