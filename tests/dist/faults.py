"""Faults to plant in the executor: each one must make a test fail, or the tests prove nothing."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import self_checks

from monta_megatron.chains import BoundChain
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import BoundProgram
from monta_megatron.exchange import buffers

T = TypeVar("T")
Fault = Callable[[], AbstractContextManager[Any]]


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


FAULTS: dict[str, Fault] = {
    **{name: partial(plant, "") for name, plant in self_checks.FAULTS.items()},
    "wrong split": wrong_split,
    "serial loop": serial_loop,
}


def with_fault(fault: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function while the executor of this rank has the fault."""
    with FAULTS[fault]():
        return function(*args)
