"""Megatron's permutation of tokens, and back, for `calibration`, which times it.

Notation: T = tokens, E = experts, H = hidden size.
"""

from typing import NamedTuple

import torch
from megatron.core.transformer.moe import moe_utils


class Permuted(NamedTuple):
    """[T * topk, H] permuted tokens in expert order, and the tokens that they come from."""

    rows: torch.Tensor
    indices: torch.Tensor


def permute(tokens: torch.Tensor, routing_map: torch.Tensor, topk: int) -> Permuted:
    """Copy each token for each of its experts: [T, H] by [T, E] bool."""
    rows, _, indices, *_ = moe_utils.permute(tokens, routing_map, num_out_tokens=len(tokens) * topk)
    return Permuted(rows, indices)


def unpermute(permuted: Permuted, shape: torch.Size) -> torch.Tensor:
    """Sum the copies of every token: the way back to [T, H]."""
    tokens: torch.Tensor = moe_utils.unpermute(permuted.rows, permuted.indices, shape)
    return tokens
