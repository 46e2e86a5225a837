"""Dispatch and combine as autograd functions: each one's backward is the other's pass.

Neither saves its inputs, so that a schedule may free them once the pass has returned.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from monta_megatron.chains.program import COMBINE, COMBINE_BACKWARD, DISPATCH, DISPATCH_BACKWARD
from monta_megatron.exchange.executor import run
from monta_megatron.exchange.payload import Columns
from monta_megatron.exchange.state import Exchange


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        rows: torch.Tensor,
        probs: torch.Tensor,
        ids: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.exchange = exchange
        columns = run(exchange, DISPATCH, _contiguous(rows, probs, ids))
        return columns.rows, columns.probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, rows_gradient: torch.Tensor, probs_gradient: torch.Tensor
    ) -> tuple[None, torch.Tensor, torch.Tensor | None, None]:
        columns = run(ctx.exchange, DISPATCH_BACKWARD, _contiguous(rows_gradient, probs_gradient))
        return None, columns.rows, columns.probs, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, rows: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return run(exchange, COMBINE, _contiguous(rows)).rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows_gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, run(ctx.exchange, COMBINE_BACKWARD, _contiguous(rows_gradient)).rows


def dispatch(
    exchange: Exchange,
    rows: torch.Tensor,
    probs: torch.Tensor,
    ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move rows and probabilities to their experts; differentiable.

    Args:
        exchange: this micro-batch's exchange.
        rows: [source rows, H]; permuted tokens, in expert order, or tokens.
        probs: [source rows] for permuted tokens, [source rows, W] for tokens.
        ids: [source rows, W] experts of each token, ascending; None for permuted tokens.

    Returns:
        [expert rows, H] and [expert rows], in the order in which the experts take them.
    """
    return _Dispatch.apply(exchange, rows, probs, ids)


def combine(exchange: Exchange, rows: torch.Tensor) -> torch.Tensor:
    """Bring the experts' outputs back: [expert rows, H] -> [source rows, H]; differentiable."""
    return _Combine.apply(exchange, rows)


def _contiguous(
    rows: torch.Tensor, probs: torch.Tensor | None = None, ids: torch.Tensor | None = None
) -> Columns:
    return Columns(
        rows=rows.contiguous(), probs=None if probs is None else probs.contiguous(), ids=ids
    )
