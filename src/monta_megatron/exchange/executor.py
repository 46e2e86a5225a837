"""The executor: runs the program of a pass, as an autograd function. It decides nothing.

The backward of dispatch is the program of combine, and the reverse. Neither saves its inputs, so
that a schedule may free them once the pass has returned. See `chains.lower`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from monta_megatron.chains.program import (
    COMBINE,
    COMBINE_BACKWARD,
    DISPATCH,
    DISPATCH_BACKWARD,
    Operation,
    Pass,
)
from monta_megatron.exchange import operations
from monta_megatron.exchange.monitor import NOTHING
from monta_megatron.exchange.payload import Columns
from monta_megatron.exchange.state import Exchange, State


def run(exchange: Exchange, pass_: Pass, columns: Columns) -> Columns:
    """Apply the chain, or its transpose, to all rows.

    Args:
        exchange: what moves.
        pass_: the pass.
        columns: contiguous, on the source side, or on the experts' side for a transpose.

    Returns:
        The columns on the other side, without ids. They share no memory with the input unless no
        stage of the chain moves anything (every group has one rank, one chunk, one local expert).

    Raises:
        ExchangeError: a collective failed or timed out.
    """
    state = State(exchange, pass_, columns)
    program = state.bound.program
    state.streams.fork(program.num_streams)
    issue(state, program.operations)
    return _end(state)


def start(state: State) -> None:
    """Begin a pass, whose caller goes on; its first collective is under way then."""
    state.reserve()
    program = state.bound.program
    state.streams.fork(program.num_streams)
    issue(state, program.operations[: program.num_at_start])


def go_on(state: State) -> None:
    """Issue the rest of a pass that was begun."""
    issue(state, state.bound.program.operations[state.num_issued :])


def finish(state: State) -> Columns:
    """End a pass that was begun, and return its output as `run` does."""
    go_on(state)
    return _end(state)


def issue(state: State, issued: Iterable[Operation]) -> None:
    """Issue operations of a pass; the caller's stream is the current one before and after."""
    streams, monitor = state.streams, state.exchange.monitor
    is_named = monitor.names_operations()
    chain = state.bound.bound.chain.name
    kinds = operations.OPERATIONS
    if state.exchange.fused:
        from monta_megatron.exchange.kernels.operations import FUSED_OPERATIONS as kinds
    try:
        for operation in issued:
            streams.enter(operation.stream)
            with monitor.range(state.pass_name, chain, operation) if is_named else NOTHING:
                state.wait(operation.waits)
                state.issued(operation, kinds[operation.kind](state, operation))
    finally:
        streams.leave()


def _end(state: State) -> Columns:
    program = state.bound.program
    state.wait(program.waits_at_end)
    state.streams.join()
    return state.columns(program.output)


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
    exchange: Exchange, rows: torch.Tensor, probs: torch.Tensor, ids: torch.Tensor | None = None
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
