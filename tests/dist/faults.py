"""Faults to plant in the executor: each one must make a test fail, or the tests prove nothing."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import torch

from monta_megatron.chains import BoundChain
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import DISPATCH_BACKWARD, BoundProgram
from monta_megatron.exchange import buffers, exchange, executor, operations
from monta_megatron.exchange import executor as autograd
from monta_megatron.exchange.memory import Columns

T = TypeVar("T")
Fault = Callable[[], AbstractContextManager[Any]]


def two_rows_swapped() -> Any:
    """The first two rows of every copy into place change places."""
    original = exchange._expand_runs

    def swapped(*args: Any) -> tuple[torch.Tensor, ...]:
        rows_of_chunks = original(*args)
        for rows in rows_of_chunks:
            if len(rows) > 1:
                rows[:2] = rows[:2].flip(0)
        return rows_of_chunks

    return mock.patch.object(exchange, "_expand_runs", swapped)


def last_chunk_skipped() -> Any:
    """The rows of the last chunk never reach their place."""
    put = operations.put

    def skip(now: Any, operation: Any) -> Any:
        (output,) = operation.writes
        is_first = output not in now.memory._messages
        for column in now.messages(output):
            if is_first:
                # Fresh memory may still hold the right rows, of the run with stock.
                column.fill_(torch.nan)
        if operation.chunk < now.exchange.bound_chain.num_chunks - 1:
            return put(now, operation)
        return []

    return mock.patch.object(operations, "OPERATIONS", {**operations.OPERATIONS, "put": skip})


def probability_gradients_dropped() -> Any:
    """The backward pass of dispatch forgets one column."""
    original = executor.run

    def run(exchange: Any, way: Any, columns: Columns) -> Columns:
        result = original(exchange, way, columns)
        if way is DISPATCH_BACKWARD:
            return Columns(rows=result.rows, probs=torch.zeros_like(result.probs))
        return result

    return mock.patch.object(autograd, "run", run)


def wrong_split() -> Any:
    """Every rank sends the first peer a row that belongs to the second, and expects no other."""
    original_rows, original_splits = BoundProgram.rows, BoundProgram.splits

    def more(self: BoundProgram) -> int:
        return {0: 1, 1: -1}.get(self.bound.layout.rank, 0)

    def rows(self: BoundProgram, buffer: Any) -> float:
        num_peers = self.bound.layout.ep if buffer.name == "alltoall" else 0
        return original_rows(self, buffer) + num_peers * more(self)

    def splits(self: BoundProgram, operation: Any) -> tuple[list[int], list[int]]:
        (first, second, *others), receive = original_splits(self, operation)
        return [first + 1, second - 1, *others], [count + more(self) for count in receive]

    return mock.patch.multiple(BoundProgram, rows=rows, splits=splits)


def serial_loop() -> Any:
    """No chunk starts before the one before it is done."""

    def order(offsets: Any, num_chunks: int) -> list[tuple[int, int]]:
        return [(stage, chunk) for chunk in range(num_chunks) for stage in range(len(offsets))]

    def in_order(bound: BoundChain, *arguments: Any) -> BoundProgram:
        return lower(replace(bound, chain=replace(bound.chain, order=order)), *arguments)

    return mock.patch.object(buffers, "lower", in_order)


def with_fault(fault: Fault, function: Callable[..., T], *args: Any) -> T:
    """Call a function while the executor of this rank has the fault."""
    with fault():
        return function(*args)
