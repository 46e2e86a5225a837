"""Drawn routings: as a benchmark's data, and as the planner expects them.

    uniform         any experts
    skewed          the i-th most wanted expert is drawn with weight 1/i
    node-limited    experts on half of the nodes (rounded down), which are drawn for every token

Data and expectation stand here together because they have to agree. In a skewed routing they do
because the order of the experts is the first draw from the seed, in the data of every rank and in
the planner's sample.

Notation: T = tokens of a rank, N = tokens of a sample, E = experts, k = experts of a token, P =
parts of the experts.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from monta_megatron.common.units import counted
from monta_megatron.core import Routing
from monta_megatron.planner.routing.expected import ExpectedRouting, UniformRouting


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


# Tokens drawn to find the expected counts of a routing that has no formula.
NUM_SAMPLES = 4096


def make_routing(
    name: str, num_tokens: int, topk: int, expert_nodes: NDArray[np.int64], seed: int, rank: int
) -> NDArray[np.bool_]:
    """The data: which experts the tokens of one rank go to, the same wherever it is made.

    Args:
        name: one of the above.
        num_tokens: T of this rank.
        topk: experts of a token.
        expert_nodes: [E] node of each expert.
        seed: seed of the benchmark.
        rank: the rank whose tokens these are.

    Returns:
        [T, E] with exactly `topk` experts for every token.

    Raises:
        ValueError: "node-limited" where half of the nodes hold too few experts.
    """
    num_experts = len(expert_nodes)
    generator = np.random.default_rng([seed, rank])
    scores = generator.gumbel(size=(num_tokens, num_experts))
    if name == "skewed":
        scores += _log_weights(np.random.default_rng(seed), num_experts)
    if name == "node-limited":
        nodes, experts_on_node = np.unique(expert_nodes, return_counts=True)
        limit = _node_limit(len(nodes), int(experts_on_node.min()), topk)
        drawn = generator.random((num_tokens, len(nodes))).argsort(axis=1)[:, :limit]
        # [T, limit, 1] == [E] -> [T, E]
        scores[~(nodes[drawn][:, :, None] == expert_nodes).any(axis=1)] = -np.inf
    return _with_highest(scores, topk)


def expected_routing(
    name: str, num_experts: int, topk: int, num_nodes: int, seed: int = 0
) -> Routing:
    """Routing that the planner expects of the data.

    Args:
        name: one of the above.
        num_experts: E.
        topk: experts of a token.
        num_nodes: nodes of the exchange, which share the experts evenly.
        seed: seed of the data.

    Raises:
        ValueError: "node-limited" where half of the nodes hold too few experts.
    """
    if name == "skewed":
        return skewed_routing(num_experts, topk, seed)
    if name == "node-limited":
        return UniformRouting(
            num_experts=num_experts,
            topk=topk,
            num_groups=num_nodes,
            group_topk=_node_limit(num_nodes, num_experts // num_nodes, topk),
        )
    return UniformRouting(num_experts=num_experts, topk=topk)


def skewed_routing(num_experts: int, topk: int, seed: int = 0) -> SampledRouting:
    """Expected routing of "skewed": shares in a sample, because they have no formula."""
    generator = np.random.default_rng(seed)
    log_weights = _log_weights(generator, num_experts)
    scores = generator.gumbel(size=(NUM_SAMPLES, num_experts)) + log_weights
    return SampledRouting(name="skewed", routing_map=_with_highest(scores, topk))


def _log_weights(generator: np.random.Generator, num_experts: int) -> NDArray[np.float64]:
    """[E] of "skewed", by the first draw of a generator; see the top of this file."""
    log_weights: NDArray[np.float64] = -np.log1p(generator.permutation(num_experts))
    return log_weights


def _with_highest(scores: NDArray[np.float64], topk: int) -> NDArray[np.bool_]:
    """[T, E] scores -> [T, E] whether an expert is among the `topk` highest of its token.

    With scores of log-weight + Gumbel noise this is a weighted draw without replacement.
    """
    chosen = np.argpartition(scores, -topk, axis=1)[:, -topk:]
    routing_map = np.zeros(scores.shape, dtype=np.bool_)
    np.put_along_axis(routing_map, chosen, True, axis=1)
    return routing_map


def _node_limit(num_nodes: int, experts_on_node: int, topk: int) -> int:
    """On how many nodes a token's experts lie in "node-limited"."""
    limit = num_nodes // 2
    if limit == 0:
        raise ValueError(
            "--routing: got node-limited, must not be where an exchange lies on "
            f"{counted(num_nodes, 'node')}"
        )
    if topk > limit * experts_on_node:
        raise ValueError(
            f"--routing: got node-limited, must leave the {topk} experts of a token to choose "
            f"from; half of {counted(num_nodes, 'node')}, rounded down, hold "
            f"{limit * experts_on_node}"
        )
    return limit
