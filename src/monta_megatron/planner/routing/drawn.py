"""Drawn routings: as a benchmark's data, and as the planner expects them.

    uniform         any experts
    skewed          the i-th most wanted expert is drawn with weight 1/i
    node-limited    experts on half of the nodes (rounded down), which are drawn for every token

Data and expectation stand here together because they have to agree. In a skewed routing they do
because the order of the experts is the first draw from the seed, in the data of every rank and in
the planner's sample.

The workloads of token imbalance, W0 to W7, are those of Megatron-LM's pull request 7488. Every rank
brings the same rows, which follow from workload, seed and step alone. Each token has k distinct
experts, drawn evenly from a pool; most pools are those of all tokens but every fourth, which draws
from all experts. The hot set is max(k, E / 4) consecutive experts.

    W0  token t has the experts t k to t k + k - 1, modulo E: nothing is drawn
    W1  the hot set is the first experts
    W2  as W1: that one rank holds the hot set is a matter of the layout
    W3  every other expert, and so half of them, is hot
    W4  all experts for every token
    W5  only the upper half of the experts, for every token
    W6  as W1, but the hot set moves on by its size every 3 steps
    W7  all experts, and in every 4th step the first experts for every other token

Only the random number generator differs from the pull request. "Source ragged", its name of W4,
does not show in its rows either: every rank has as many.

Notation: T = tokens of a rank, N = tokens of a sample, E = experts, k = experts of a token, P =
parts of the experts.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from monta_megatron.common.units import counted
from monta_megatron.planner.routing.expected import ExpectedRouting, Routing, UniformRouting
from monta_megatron.planner.routing.names import IMBALANCE_WORKLOADS
from monta_megatron.planner.routing.recorded import RecordedRouting, typical_exchange


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


STEPS_OF_A_HOTSPOT = 3
STEPS_OF_A_BURST = 4


def num_steps(name: str, num_experts: int, topk: int) -> int:
    """Number of steps after which the pools of a workload come again."""
    if name == "W6":
        return STEPS_OF_A_HOTSPOT * (
            num_experts // math.gcd(num_experts, _hot_size(num_experts, topk))
        )
    return STEPS_OF_A_BURST if name == "W7" else 1


@lru_cache(maxsize=32)
def imbalance_map(
    name: str, num_tokens: int, num_experts: int, topk: int, seed: int, step: int
) -> NDArray[np.bool_]:
    """The rows of every rank in one step.

    Args:
        name: one of `IMBALANCE_WORKLOADS`.
        num_tokens: T.
        num_experts: E.
        topk: k, at most E.
        seed: of the draws.
        step: from 0.

    Returns:
        [T, E] with exactly k experts for every token; not to be written to.

    Raises:
        ValueError: W5 where half of the experts are too few.
    """
    tokens, experts = np.arange(num_tokens), np.arange(num_experts)
    routing_map: NDArray[np.bool_] = np.zeros((num_tokens, num_experts), dtype=np.bool_)
    if name == "W0":
        chosen = (tokens[:, None] * topk + np.arange(topk)) % num_experts
    else:
        generator = np.random.default_rng([list(IMBALANCE_WORKLOADS).index(name), seed, step])
        scores = generator.random((num_tokens, num_experts))
        scores[_outside_pool(name, tokens, experts, topk, step)] = -1.0
        chosen = np.argpartition(scores, -topk, axis=1)[:, -topk:]
    np.put_along_axis(routing_map, chosen, True, axis=1)
    routing_map.flags.writeable = False
    return routing_map


def imbalance_routing(
    name: str, num_tokens: int, num_experts: int, topk: int, num_ranks: int, ep: int, seed: int = 0
) -> RecordedRouting:
    """Expected routing: the rows of a typical step.

    Args:
        name, num_tokens, num_experts, topk, seed: see `imbalance_map`.
        num_ranks: ranks of the exchange.
        ep: its expert parallel size.
    """
    exchanges = [
        (imbalance_map(name, num_tokens, num_experts, topk, seed, step),)
        for step in range(num_steps(name, num_experts, topk))
    ]
    return RecordedRouting(
        name=IMBALANCE_WORKLOADS[name], routing_maps=typical_exchange(exchanges, num_ranks, ep)
    )


def _outside_pool(
    name: str, tokens: NDArray[np.int64], experts: NDArray[np.int64], topk: int, step: int
) -> NDArray[np.bool_]:
    """[T, E] whether an expert is not in the pool of a token."""
    num_experts = len(experts)
    hot_size = _hot_size(num_experts, topk)
    of_hot_pool = tokens % 4 != 0
    hot = experts < hot_size
    if name == "W3":
        hot = np.isin(experts, 2 * np.arange(max(topk, num_experts // 2)) % num_experts)
        if hot.sum() < topk:
            hot[:] = True
    elif name == "W4":
        hot[:] = True
    elif name == "W5":
        hot, of_hot_pool = experts >= num_experts // 2, tokens >= 0
        if hot.sum() < topk:
            raise ValueError(
                f"--routing: got W5, must leave the {topk} experts of a token to choose from; "
                f"the upper half holds {hot.sum()}"
            )
    elif name == "W6":
        first = step // STEPS_OF_A_HOTSPOT * hot_size
        hot = (experts - first) % num_experts < hot_size
    elif name == "W7":
        is_burst = step % STEPS_OF_A_BURST == STEPS_OF_A_BURST - 1
        of_hot_pool = (tokens % 2 == 0) & is_burst
    return of_hot_pool[:, None] & ~hot


def _hot_size(num_experts: int, topk: int) -> int:
    return max(topk, num_experts // 4)
