"""Faults on a rank of a pool: the check of a first use and the comparison with stock find them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from monta_megatron.chains.chain import HEADER_SIZE
from monta_megatron.chains.program import Kind, Operation
from monta_megatron.exchange import count_messages, operations, rows
from monta_megatron.exchange.buffers import Buffers
from monta_megatron.exchange.collectives import PeerGroup

# Given the stage that has the fault, where it is in one.
Fault = Callable[[str], AbstractContextManager[Any]]


def after(
    kind: Kind,
    change: Callable[[Buffers, Operation], None],
    pass_name: str = "",
    fused: bool = False,
) -> Fault:
    """A fault that changes what an operation has written."""

    def plant(stage: str) -> AbstractContextManager[Any]:
        table: Any = operations.OPERATIONS
        if fused:
            from monta_megatron.exchange.kernels.operations import FUSED_OPERATIONS as table
        original = table[kind]

        def changed(buffers: Buffers, operation: Operation) -> Any:
            works = original(buffers, operation)
            if pass_name in (buffers.pass_name, ""):
                change(buffers, operation)
            return works

        return mock.patch.dict(table, {kind: changed})

    return plant


def swap_experts(buffers: Buffers, operation: Operation) -> None:
    """The first rows of the first two experts change places."""
    bound = buffers.exchange.bound_chain
    into, second = buffers.target(operation).rows, int(bound.rows_per_local_expert[0])
    if operation.chunk == bound.num_chunks - 1:
        into[[0, second]] = into[[second, 0]]


def write_twice(buffers: Buffers, operation: Operation) -> None:
    """A row of the second chunk lies where the next one should."""
    into, index = buffers.target(operation).rows, buffers.row_indices(operation)
    if operation.chunk == 1:
        into[index[3]] = into[index[2]]


def take_neighbour(buffers: Buffers, operation: Operation) -> None:
    """A probability is that of the next row."""
    into, index = buffers.target(operation).probs, buffers.row_indices(operation)
    into[index[2]] = into[index[2] + 1]


def forget(column: str, chunk: int | None) -> Callable[[Buffers, Operation], None]:
    """The rows or probabilities of a chunk, or of all, stay 0."""

    def change(buffers: Buffers, operation: Operation) -> None:
        into, index = getattr(buffers.target(operation), column), buffers.row_indices(operation)
        if chunk in (operation.chunk, None):
            into[slice(None) if index is None else index] = 0

    return change


def add_one(buffers: Buffers, operation: Operation) -> None:
    """The last value of a row is too large."""
    buffers.columns(operation.writes[0]).rows[-1, -1] += 1


def miscount(stage: str) -> AbstractContextManager[Any]:
    """A rank has one token more for an expert than it has said."""
    read = count_messages.CountMessages.read

    def wrong(table: count_messages.CountMessages, joined: Any) -> count_messages.MicroBatchCounts:
        joined[HEADER_SIZE] += 1
        return read(table, joined)

    return mock.patch.object(count_messages.CountMessages, "read", wrong)


def rotate_peers(stage: str) -> AbstractContextManager[Any]:
    """What the peers of an exchange have sent lies in the order of other peers."""
    start = operations.start_all_to_all

    def rotated(
        output: torch.Tensor,
        message: torch.Tensor,
        receive: list[int],
        send: list[int],
        group: PeerGroup,
    ) -> dist.Work:
        work = start(output, message, receive, send, group)
        work.wait()
        first, *others = output.clone().split(receive)
        torch.cat([*others, first], out=output)
        return work

    return mock.patch.object(operations, "start_all_to_all", rotated)


def sum_backwards(stage: str) -> AbstractContextManager[Any]:
    """Sums of one stage are made in descending order."""
    original, table = rows.sum_rows, operations.OPERATIONS

    def descending(terms: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return original(terms, order.flip(0), len(order) - starts.flip(0)).flip(0)

    def changed(run: Any) -> Callable[[Buffers, Operation], Any]:
        def with_stage(buffers: Buffers, operation: Operation) -> Any:
            sums = descending if operation.stage == stage else original
            with mock.patch.object(rows, "sum_rows", sums):
                return run(buffers, operation)

        return with_stage

    return mock.patch.dict(table, {kind: changed(run) for kind, run in table.items()})


FAULTS: dict[str, Fault] = {
    "count wrong": miscount,
    "experts swapped": after("put", swap_experts, "dispatch"),
    "peers rotated": rotate_peers,
    "row written twice": after("put", write_twice, "dispatch"),
    "neighbour's probability": after("put", take_neighbour, "dispatch"),
    "sum backwards": sum_backwards,
    "chunk of combine backward missing": after("put", forget("rows", 1), "combine_backward"),
    "chunk of dispatch backward missing": after("put", forget("rows", 1), "dispatch_backward"),
    "chunk of dispatch missing": after("put", forget("rows", 1), "dispatch"),
    "probabilities of dispatch backward missing": after(
        "put", forget("probs", None), "dispatch_backward"
    ),
    "wrong kernel": after("reduce", add_one, fused=True),
}
