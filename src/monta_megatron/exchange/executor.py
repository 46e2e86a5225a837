"""The executor: runs the program of a pass as an autograd function, and decides nothing.

The backward of dispatch is the program of combine, and vice versa. Neither saves its inputs, so a
schedule may free them once the pass returns. See `chains.lower`.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
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
    Policy,
)
from monta_megatron.exchange import errors, operations
from monta_megatron.exchange.buffers import Buffers, Columns
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.monitor import Step
from monta_megatron.exchange.streams import Ready, streams_for


def run(exchange: Exchange, pass_: Pass, columns: Columns) -> Columns:
    """Run a pass: the chain, or its transpose, over all rows.

    Args:
        exchange: this micro-batch's exchange.
        pass_: the pass.
        columns: contiguous; source rows, or for a transpose expert rows.

    Returns:
        The columns on the other side, without ids. They share memory with the input only if no
        stage copies rows (groups of one rank, one chunk, one local expert).

    Raises:
        ExchangeError: a collective failed or timed out.
    """
    execution = Execution(exchange, pass_, columns)
    execution.fork()
    return execution.finish()


class Execution:
    """A pass in flight.

    Args:
        exchange: this micro-batch's exchange.
        pass_: the pass.
        columns: see `run`.
        output: buffers for the result; None allocates them.

    Attributes:
        buffers: its messages.
        bound: the program of the pass with this micro-batch's rows.
        groups: the process group for every group name of the chain.
        num_issued: operations issued so far.
        works: by number of a collective, its torch works; `Streams.ready` empties the list once
            the host has waited.
    """

    def __init__(
        self, exchange: Exchange, pass_: Pass, columns: Columns, output: Columns | None = None
    ) -> None:
        self._streams = streams_for(columns.rows.device)
        policy: Policy = "fused" if exchange.fused else self._streams.policy
        self.buffers = Buffers(exchange, pass_, columns, policy, output)
        if self.buffers.indices.memory is not None:
            self._streams.keep(self.buffers.indices.memory)
        self.bound = self.buffers.bound
        self.groups = exchange.groups
        self.num_issued = 0
        self.works: dict[int, list[torch.distributed.Work]] = {}
        self._monitor = exchange.monitor
        self._ready: dict[int, Ready] = {}
        # Messages of a collective of which not all were started yet.
        self._unstarted: Iterator[torch.distributed.Work] | None = None
        self._is_host = policy == "host"
        self._run = operations.OPERATIONS
        if policy == "fused":
            from monta_megatron.exchange.kernels.operations import FUSED_OPERATIONS

            self._run = FUSED_OPERATIONS
        self._abandoned: weakref.finalize[..., Execution] | None = None
        errors.UNDER_WAY.add(self)

    def fork(self) -> None:
        """Make the side streams wait for all work issued on the caller's stream."""
        self._streams.fork(self.bound.program.num_streams)

    def start(self) -> None:
        """Fork, and issue the operations before the first that trails a collective.

        In one chunk the last of them is its first collective; in several, the second chunk's first
        collective is issued too. Then the caller continues.
        """
        self.fork()
        self._issue_all(self.bound.program.operations[: self.bound.program.num_at_start])
        self._abandon_unless_finished()

    def start_first_message(self) -> Columns:
        """Fork, and issue the operations up to the first message; returns the output, to be filled.

        What the caller launches then is ahead of all other messages, in a launch queue too.
        """
        self.fork()
        program = self.bound.program
        first = next((one.number for one in program.operations if one.is_collective), None)
        self._issue_all(program.operations[:first])
        if first is not None:
            self._issue_all(program.operations[first : first + 1], self._start_first_message_of)
        self._abandon_unless_finished()
        return self.buffers.columns(program.output)

    def go_on(self) -> None:
        """Issue the remaining operations; the caller's stream is current before and after."""
        self._issue_all(self.bound.program.operations[self.num_issued :])

    def finish(self) -> Columns:
        """Issue the remaining operations, join the streams, and return the output as `run` does."""
        self.go_on()
        program = self.bound.program
        try:
            for number in program.waits_at_end:
                self._wait(number)
        except BaseException:
            self._streams.abandon(self.works)
            raise
        self._streams.join()
        if self._abandoned is not None:
            self._abandoned.detach()
        return self.buffers.columns(program.output)

    def _abandon_unless_finished(self) -> None:
        """Abandon the pass if the caller fails before `finish`."""
        self._abandoned = weakref.finalize(self, self._streams.abandon, self.works)
        self._abandoned.atexit = False

    def _issue_all(
        self, issued: Sequence[Operation], issue: Callable[[Operation], None] | None = None
    ) -> None:
        issue = issue or self._issue
        monitor, enter = self._monitor, self._streams.enter
        is_named = monitor.names_operations()
        pass_name, chain = self.buffers.pass_name, self.bound.bound.chain.name
        try:
            for operation in issued:
                enter(operation.stream)
                if is_named:
                    with monitor.range(pass_name, chain, operation):
                        issue(operation)
                else:
                    issue(operation)
        except BaseException:
            self._streams.abandon(self.works)
            raise
        finally:
            self._streams.leave()

    def _issue(self, operation: Operation) -> None:
        number, works = operation.number, list[torch.distributed.Work]()
        if operation.is_collective:
            works = self._start_messages(operation)
        else:
            self._wait_before(operation)
            self._run[operation.kind](self.buffers, operation)
        self.num_issued = number + 1
        if number in self.bound.program.awaited:
            self._ready[number] = self._streams.ready(works)
        if not works and self._is_host:
            self.buffers.memory.release(operation)

    def _start_first_message_of(self, collective: Operation) -> None:
        self._start_messages(collective, num_messages=1)

    def _start_messages(
        self, collective: Operation, num_messages: int | None = None
    ) -> list[torch.distributed.Work]:
        """Start the messages of a collective that were not started yet, or `num_messages` of them.

        Returns:
            The works of all its messages that were started.
        """
        number, recorder = collective.number, self._monitor.recorder
        if self._unstarted is None:
            self._wait_before(collective)
            # Allocated first: running out of memory is no failure of the exchange.
            self.buffers.messages(collective.writes[0])
            self._streams.before_collective()
        try:
            if self._unstarted is None:
                self._unstarted = iter(self._run[collective.kind](self.buffers, collective) or ())
            works = self.works.setdefault(number, [])
            works += islice(self._unstarted, num_messages)
            if num_messages is not None:
                return works
            self._unstarted = None
            if recorder is not None:
                # `watch` may keep what it is given, on a thread of its own.
                works[:] = recorder.watch(tuple(works), self.buffers.pass_name, number)
            if works:
                self._streams.after_collective(self, collective, works)
        except RuntimeError as error:
            raise errors.failure(self, collective, error) from error
        return works

    def _wait_before(self, operation: Operation) -> None:
        """Wait for all operations that this one needs."""
        for awaited in operation.waits:
            self._wait(awaited)

    def _wait(self, number: int) -> None:
        """Make the current stream, or the host, wait for an operation."""
        recorder, operation = self._monitor.recorder, self.bound.program.operations[number]
        if recorder is not None:
            recorder.note(Step("wait", self.buffers.pass_name, operation))
        try:
            self._ready[number]()
        except RuntimeError as error:
            raise errors.failure(self, operation, error) from error
        if recorder is not None:
            recorder.note(Step("ready", self.buffers.pass_name, operation))
        if self._is_host:
            self.buffers.memory.release(operation)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        rows_NH: torch.Tensor,
        probs: torch.Tensor,
        ids: torch.Tensor | None,
        started: list[Execution] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.exchange = exchange
        given = contiguous(rows_NH, probs, ids)
        if started is None:
            columns = run(exchange, DISPATCH, given)
        else:
            started.append(Execution(exchange, DISPATCH, given))
            columns = started[0].start_first_message()
        return columns.rows, columns.probs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_MH: torch.Tensor, gradient_M: torch.Tensor
    ) -> tuple[None, torch.Tensor, torch.Tensor | None, None, None]:
        columns = run(ctx.exchange, DISPATCH_BACKWARD, contiguous(gradient_MH, gradient_M))
        return None, columns.rows, columns.probs, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, rows_MH: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return run(exchange, COMBINE, contiguous(rows_MH)).rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_NH: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, run(ctx.exchange, COMBINE_BACKWARD, contiguous(gradient_NH)).rows


def dispatch(
    exchange: Exchange,
    rows_NH: torch.Tensor,
    probs: torch.Tensor,
    ids: torch.Tensor | None = None,
    launch_beside: Callable[[torch.Tensor], object] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send rows and probabilities to their experts; differentiable.

    Args:
        exchange: this micro-batch's exchange.
        rows_NH: permuted tokens, in expert order, or tokens.
        probs: [N] for permuted tokens, [N, W] for tokens.
        ids: [N, W] experts of each token, ascending; None for permuted tokens.
        launch_beside: launches work that overlaps with the pass; called behind the first message,
            with the rows that the pass will fill, whose place in the autograd graph is theirs.

    Returns:
        Rows [M, H] and probabilities [M], in expert order.
    """
    if launch_beside is None:
        return _Dispatch.apply(exchange, rows_NH, probs, ids, None)
    started = list[Execution]()
    rows_MH, probs_M = _Dispatch.apply(exchange, rows_NH, probs, ids, started)
    launch_beside(rows_MH)
    # The pass fills what autograd knows already.
    with torch.no_grad():
        started[0].finish()
    return rows_MH, probs_M


def combine(exchange: Exchange, rows_MH: torch.Tensor) -> torch.Tensor:
    """Return the experts' outputs to their tokens: [M, H] -> [N, H]; differentiable."""
    return _Combine.apply(exchange, rows_MH)


def contiguous(
    rows: torch.Tensor, probs: torch.Tensor | None = None, ids: torch.Tensor | None = None
) -> Columns:
    """Columns for a pass, whose messages have no gaps."""
    return Columns(
        rows=rows.contiguous(), probs=None if probs is None else probs.contiguous(), ids=ids
    )
