"""Experts of each token and their probabilities as compact lists; differentiable."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def expert_ids_of(
    routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, width: int, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts in ascending order, and their probabilities, without a sync.

    Args:
        routing_map_TE: bool.
        probs_TE: probabilities of the experts.
        width: W, the most experts of any token on any rank.
        fused: use Triton kernels.

    Returns:
        Probabilities [T, W], padded with 0, and experts [T, W] int32, padded with E.
    """
    return _ExpertIds.apply(routing_map_TE, probs_TE, width, fused)


class _ExpertIds(torch.autograd.Function):
    """Saves for backward only the map, which is kept alive anyway, and no indices [T, W]."""

    @staticmethod
    def forward(
        ctx: Any, routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, width: int, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        make_lists, ctx.bring_back = _operations(fused)
        lists_TW, ids_TW = make_lists(routing_map_TE, probs_TE, width)
        ctx.save_for_backward(routing_map_TE)
        ctx.mark_non_differentiable(ids_TW)
        return lists_TW, ids_TW

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_TW: torch.Tensor, _: torch.Tensor
    ) -> tuple[None, torch.Tensor, None, None]:
        (routing_map_TE,) = ctx.saved_tensors
        return None, ctx.bring_back(routing_map_TE, gradient_TW), None, None


@cache
def _operations(fused: bool) -> tuple[Callable[..., Any], Callable[..., torch.Tensor]]:
    """`make_lists` and `bring_back`; Triton may be missing where no kernel runs."""
    if not fused:
        return make_lists, bring_back
    from monta_megatron.exchange.kernels import expert_lists as kernels

    return kernels.make_lists, kernels.bring_back


def make_lists(
    routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of the probabilities and of the experts; see `expert_ids_of`."""
    num_experts = routing_map_TE.shape[1]
    descending_E = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=probs_TE.device)
    scores_TW = (routing_map_TE * descending_E).topk(width, dim=1).values
    ids_TW = num_experts - scores_TW
    experts_TW = ids_TW.clamp(max=num_experts - 1)
    return probs_TE.gather(1, experts_TW.long()).masked_fill_(scores_TW == 0, 0), ids_TW


def bring_back(routing_map_TE: torch.Tensor, gradient_TW: torch.Tensor) -> torch.Tensor:
    """Gradient [T, E] of the probabilities from that of their lists."""
    # Position of each expert among its token's.
    positions_TE = (routing_map_TE.cumsum(dim=1) - 1).clamp_(min=0)
    return gradient_TW.gather(1, positions_TE).masked_fill_(~routing_map_TE, 0)
