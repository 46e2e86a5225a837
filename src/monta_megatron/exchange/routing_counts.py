"""The counts of a routing map: all for which an exchange of counts passes over it, as a kernel may.

Notation: T = tokens of this rank, E = experts, B = token blocks, P = parts of the experts.
"""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

T = TypeVar("T", int, NDArray[np.int64])


def block_size(num_tokens: T, num_blocks: int) -> T:
    """Tokens in a full block: the first blocks are full, one takes the rest, others are empty."""
    return -(-num_tokens // num_blocks)


def count_routing(
    routing_map: torch.Tensor, num_blocks: int, part_sizes: dict[str, int], with_most: bool
) -> dict[str, torch.Tensor]:
    """Count by token block: contiguous int32 tensors on the device of the map, with no sync.

    Args:
        routing_map: [T, E] bool.
        num_blocks: B.
        part_sizes: P by name, of equal parts; each part is made of some of the next kind's.
        with_most: whether the most experts of any token are wanted.

    Returns:
        "experts": [B, E] tokens of each expert; for every name of parts, [B, P] tokens with an
        expert in each; "most experts": [1] of any token, 0 without tokens.
    """
    num_tokens = len(routing_map)
    # Of no tokens there is no maximum: then blocks are of one token that has no expert.
    size = max(block_size(num_tokens, num_blocks), 1)
    if missing := num_blocks * size - num_tokens:
        routing_map = torch.nn.functional.pad(routing_map, (0, 0, 0, missing))
    # [T, E] -> [B, T/B, E]
    hits = routing_map.view(num_blocks, size, -1)
    counts = {"experts": hits.sum(dim=1, dtype=torch.int32)}
    if with_most:
        counts["most experts"] = hits.sum(dim=2, dtype=torch.int32).amax().view(1)
    for name, num_parts in reversed(part_sizes.items()):
        # [B, T/B, smaller parts] -> [B, T/B, P, parts of each] -> [B, T/B, P]
        hits = hits.unflatten(2, (num_parts, -1)).any(dim=3)
        counts[name] = hits.sum(dim=1, dtype=torch.int32)
    return counts
