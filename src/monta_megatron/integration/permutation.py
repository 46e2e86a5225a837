"""Megatron's permutation of tokens, and back, for a calibration, which times it.

Notation: T = tokens, E = experts, H = hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils

from monta_megatron.chains.calibration_tasks import NUM_EXPERTS, TOPK, Point
from monta_megatron.exchange.calibration.memory_operations import routing_map, rows_of
from monta_megatron.integration.strategies import KNOWS_ORDER


def permute(point: Point, device: torch.device) -> Callable[[], object]:
    """Copies each token for each of its experts: [T, H] by [T, E] bool -> [T * topk, H]."""
    tokens, on_device = _tokens(point, device)
    return lambda: _permute(tokens, on_device)


def unpermute(point: Point, device: torch.device) -> Callable[[], object]:
    """Sums the copies of every token: the way back to [T, H]."""
    tokens, on_device = _tokens(point, device)
    rows, _, indices, *more = _permute(tokens, on_device)
    given: dict[str, Any] = {}
    if _is_batch_invariant_here():
        # Of this map it takes the width alone, which has to be a multiple of the EP ranks.
        wide = on_device.new_empty(0, NUM_EXPERTS * dist.get_world_size())
        given = {"routing_map": wide, "batch_invariant_inverse_map": more[0]}
    return lambda: moe_utils.unpermute(rows, indices, tokens.shape, **given)


PERMUTATION = {"permute": permute, "unpermute": unpermute}


def _tokens(point: Point, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    on_device = routing_map(point.num_rows, NUM_EXPERTS).to(device)
    return rows_of(point.num_rows, device), on_device


def _permute(tokens: torch.Tensor, on_device: torch.Tensor) -> tuple[torch.Tensor, ...]:
    asked = {"return_batch_invariant_inverse_map": True} if _is_batch_invariant_here() else {}
    permuted: tuple[torch.Tensor, ...] = moe_utils.permute(
        tokens, on_device, num_out_tokens=len(tokens) * TOPK, **asked
    )
    return permuted


def _is_batch_invariant_here() -> bool:
    """Whether the process is in the mode, by which `unpermute` goes."""
    return KNOWS_ORDER and moe_utils.is_batch_invariant_mode_enabled()
