"""Experts of each token and their probabilities as compact lists, as PyTorch operations.

Notation: T = tokens of this rank, E = experts, W = most experts of any token.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def expert_ids_of(
    routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, max_experts_per_token: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts in ascending order, and their probabilities, without a sync.

    Args:
        routing_map_TE: bool.
        probs_TE: probabilities of the experts.
        max_experts_per_token: W, on any rank.

    Returns:
        Probabilities [T, W], padded with 0, and experts [T, W] int32, padded with E.
    """
    return _ExpertIds.apply(routing_map_TE, probs_TE, max_experts_per_token)


class _ExpertIds(torch.autograd.Function):
    """Saves for backward only the map, which is kept alive anyway, and no indices [T, W]."""

    @staticmethod
    def forward(
        ctx: Any, routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, max_experts_per_token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_experts = routing_map_TE.shape[1]
        descending_E = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=probs_TE.device)
        scores_TW = (routing_map_TE * descending_E).topk(max_experts_per_token, dim=1).values
        ids_TW = num_experts - scores_TW
        experts_TW = ids_TW.clamp(max=num_experts - 1)
        ctx.save_for_backward(routing_map_TE)
        ctx.mark_non_differentiable(ids_TW)
        return probs_TE.gather(1, experts_TW.long()).masked_fill_(scores_TW == 0, 0), ids_TW

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_TW: torch.Tensor, _: torch.Tensor
    ) -> tuple[None, torch.Tensor, None]:
        (routing_map_TE,) = ctx.saved_tensors
        # Position of each expert among its token's.
        positions_TE = (routing_map_TE.cumsum(dim=1) - 1).clamp_(min=0)
        return None, gradient_TW.gather(1, positions_TE).masked_fill_(~routing_map_TE, 0), None
