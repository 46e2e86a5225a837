"""Which experts each token goes to: made from the seed, the same wherever it is made. No torch.

Notation: T = tokens of a rank, E = experts.
"""

import numpy as np
from numpy.typing import NDArray

ROUTINGS = ("uniform", "skewed", "node-limited")


def make_routing(
    routing: str,
    num_tokens: int,
    topk: int,
    expert_nodes: NDArray[np.int64],
    seed: int,
    rank: int,
) -> NDArray[np.bool_]:
    """The routing map of one rank: [T, E] with exactly `topk` experts for every token.

    Args:
        routing: "uniform" picks experts at random. "skewed" prefers some: the i-th most wanted
            expert is drawn with weight 1/i, the order being random and the same for all ranks.
            "node-limited" picks on half of the nodes (rounded down), drawn anew for every token.
        num_tokens: T.
        topk: experts of a token.
        expert_nodes: [E] node of each expert.
        seed: seed of the benchmark.
        rank: the rank whose tokens these are.

    Raises:
        ValueError: "node-limited" with experts on one node, or with more experts per token than
            half of the nodes hold.
    """
    num_experts = len(expert_nodes)
    generator = np.random.default_rng([seed, rank])
    # The k largest of log-weight + Gumbel noise are a weighted draw without replacement.
    scores = generator.gumbel(size=(num_tokens, num_experts))
    if routing == "skewed":
        order = np.random.default_rng(seed).permutation(num_experts)
        scores -= np.log1p(order)
    if routing == "node-limited":
        scores[~_allowed(generator, num_tokens, topk, expert_nodes)] = -np.inf
    chosen = np.argpartition(scores, num_experts - topk, axis=1)[:, num_experts - topk :]
    routing_map = np.zeros((num_tokens, num_experts), dtype=np.bool_)
    np.put_along_axis(routing_map, chosen, True, axis=1)
    return routing_map


def _allowed(
    generator: np.random.Generator, num_tokens: int, topk: int, expert_nodes: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """[T, E] whether an expert is on one of the nodes that the token may go to."""
    nodes, experts_on_node = np.unique(expert_nodes, return_counts=True)
    limit = len(nodes) // 2
    if limit == 0:
        raise ValueError("--routing: got node-limited, must not be where all experts share a node")
    if topk > limit * experts_on_node.min():
        raise ValueError(
            f"--routing: got node-limited, where {limit} of {len(nodes)} nodes hold "
            f"{limit * experts_on_node.min()} experts: fewer than --top-k ({topk})"
        )
    drawn = generator.random((num_tokens, len(nodes))).argsort(axis=1)[:, :limit]
    # [T, limit, 1] == [E] -> [T, E]
    return (nodes[drawn][:, :, None] == expert_nodes).any(axis=1)
