"""The workloads of token imbalance of Megatron-LM's pull request 7488, W0 to W7.

Every rank brings the same rows, which follow from workload, seed and step alone. Each token has k
distinct experts, drawn evenly from a pool; most pools are those of all tokens but every fourth,
which draws from all experts. The hot set is max(k, E / 4) consecutive experts.

    W0  token t has the experts t k to t k + k - 1, modulo E: nothing is drawn
    W1  the hot set is the first experts
    W2  as W1: that one rank holds the hot set is a matter of the layout
    W3  every other expert, and so half of them, is hot
    W4  all experts for every token
    W5  only the upper half of the experts, for every token
    W6  as W1, but the hot set moves on by its size every 3 steps
    W7  all experts, and in every 4th step the first experts for every other token

Only the generator of random numbers is another one than there. "Source ragged", the name of W4, is
not in the rows there either: every rank has as many.

Notation: T = tokens of a rank, E = experts, k = experts of a token.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from monta_megatron.planner.recorded_routing import RecordedRouting, typical_exchange
from monta_megatron.planner.routing_names import IMBALANCE_WORKLOADS

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
    """What the planner expects: the rows of a typical step.

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
