"""Megatron's permutation as operations of a calibration.

Notation: T = tokens, E = experts, H = hidden size.
"""

from collections.abc import Callable

import torch
from megatron.core.transformer.moe import moe_utils

from monta_megatron.calibration.memory_operations import routing_map, rows_of
from monta_megatron.calibration.tasks import NUM_EXPERTS, TOPK, Point


def permute(point: Point, device: torch.device) -> Callable[[], object]:
    """Copies each token for each of its experts: [T, H] by [T, E] bool -> [T * topk, H]."""
    tokens, on_device = _tokens(point, device)
    return lambda: _permute(tokens, on_device)


def unpermute(point: Point, device: torch.device) -> Callable[[], object]:
    """Sums the copies of every token: the way back to [T, H]."""
    tokens, on_device = _tokens(point, device)
    rows, _, indices, *_ = _permute(tokens, on_device)
    return lambda: moe_utils.unpermute(rows, indices, tokens.shape)


PERMUTATION = {"permute": permute, "unpermute": unpermute}


def _tokens(point: Point, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    on_device = routing_map(point.num_rows, NUM_EXPERTS).to(device)
    return rows_of(point.num_rows, device), on_device


def _permute(tokens: torch.Tensor, on_device: torch.Tensor) -> tuple[torch.Tensor, ...]:
    permuted: tuple[torch.Tensor, ...] = moe_utils.permute(
        tokens, on_device, num_out_tokens=len(tokens) * TOPK
    )
    return permuted
