"""Operations of the executor as PyTorch operations on any device.

Each takes the state of its pass, writes the buffers that the program says, and returns what it
started and did not wait for.

Notation: N = rows, M = copies of them, P = ranks of a group, H = hidden size.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from monta_megatron.chains.program import Kind, Operation
from monta_megatron.exchange.collectives import start_all_gather, start_all_to_all
from monta_megatron.exchange.copies import copy_rows, find_copies, put_rows
from monta_megatron.exchange.payload import Columns
from monta_megatron.exchange.state import State, promoted
from monta_megatron.exchange.sums import column_blocks, sum_parts, sum_rows

Works = list[dist.Work]


def pack(state: State, operation: Operation) -> Works:
    """Take a chunk's rows out of the whole tensor, into a message."""
    whole, index = state.read(operation)
    assert index is not None, "rows that lie in order are sent as they lie"
    into = _written(state, operation)
    for target, column in zip(into.tensors(), whole.tensors(), strict=True):
        copy_rows(target, column, index)
    return []


def put(state: State, operation: Operation) -> Works:
    """Put a chunk's rows where they belong in the whole tensor."""
    columns, _ = state.read(operation)
    into, index = _places(state, operation)
    for target, column in zip(into.tensors(), columns.tensors(), strict=True):
        _put(target, column, index)
    return []


def find(state: State, operation: Operation) -> Works:
    """Find the copies of rows, from their expert ids."""
    columns, _ = state.read(operation)
    assert columns.ids is not None, f"{operation.stage} has nothing to find"
    copies = state.indices.copies[operation.position, operation.chunk]
    find_copies(columns.ids, state.parts(operation, columns.ids), copies)
    return []


def duplicate(state: State, operation: Operation) -> Works:
    """Copy each row for every part that it goes to: [N, H] -> [M, H], with its list."""
    columns, _ = state.read(operation)
    copies = state.indices.copies[operation.position, operation.chunk]
    read, written = operation.reads[0], operation.writes[0]
    if state.payloads[read] == state.payloads[written]:
        # Messages of the same layout are copied with all of their columns at once.
        for target, message in zip(state.allocate(written), state.messages(operation), strict=True):
            copy_rows(target, message, copies.row)
        return []
    into = _written(state, operation)
    for target, column in zip(into.tensors(), columns.tensors(), strict=False):
        if target.dim() == column.dim():
            copy_rows(target, column, copies.row)
        else:
            # [N, W] -> [M]: the probability of a copy's expert.
            target.copy_(column[copies.row, copies.place])
    return []


def reduce(state: State, operation: Operation) -> Works:
    """Sum each row's copies: [M, H] -> [N, H], rounded once; its probabilities likewise."""
    columns, index = state.read(operation)
    copies = state.indices.copies[operation.position, operation.chunk]
    into = _written(state, operation)
    targets = [(into.rows, slice(None))]
    if operation.group is not None:
        # Rows on the wire are rounded; this rank's part of the next sum is not.
        gathered = state.exchange.bound.stages[operation.position - 1].receive[operation.chunk]
        end = int(gathered[: state.group(operation).rank + 1].sum())
        (unrounded,) = state.allocate(operation.writes[1])
        targets.append((unrounded, slice(end - unrounded.shape[0], end)))
    for block in column_blocks(columns.rows, state.sum_dtype):
        sums = copies.sum_by_row(columns.rows[:, block], state.sum_dtype, index)
        for target, rows in targets:
            target[:, block] = sums[rows]
        # Its memory is needed for the next block.
        del sums
    if into.probs is not None and columns.probs is not None:
        if columns.probs.dim() > 1:
            into.probs.copy_(sum_rows(columns.probs, copies.by_row, copies.row_starts))
        else:
            # [M] -> [N, W]: every expert of a list has one copy, or none here.
            shares = columns.probs if index is None else columns.probs[index]
            into.probs.zero_()[copies.row, copies.place] = shares
    return []


def reduce_parts(state: State, operation: Operation) -> Works:
    """Sum the parts of each row that came from all ranks: [P * N, H] -> [N, H], rounded once."""
    columns, _ = state.read(operation)
    rank = state.group(operation).rank
    unrounded = state.columns(operation.reads[1]).rows if len(operation.reads) > 1 else None
    for into, parts in zip(_written(state, operation).tensors(), columns.tensors(), strict=True):
        sum_parts(
            into,
            parts,
            promoted(state.exchange.sum_dtype, parts.dtype),
            operation.parts_per_sum,
            unrounded if parts is columns.rows else None,
            rank,
        )
    return []


def alltoall(state: State, operation: Operation) -> Works:
    """Start an exchange of rows with the group."""
    return _start(state, operation, start_all_to_all)


def allgather(state: State, operation: Operation) -> Works:
    """Start to gather the group's rows, in the order of its ranks."""
    return _start(state, operation, start_all_gather)


OPERATIONS: Mapping[Kind, Callable[[State, Operation], Works]] = {
    "pack": pack,
    "find_lists": find,
    "find_copies": find,
    "duplicate": duplicate,
    "reduce": reduce,
    "alltoall": alltoall,
    "allgather": allgather,
    "reduce_parts": reduce_parts,
    "put": put,
}


def _written(state: State, operation: Operation) -> Columns:
    return state.columns_to_write(operation.writes[0])


def _places(state: State, operation: Operation) -> tuple[Columns, torch.Tensor | None]:
    """Places of a chunk's rows in the output: its own rows of it, or all and an index."""
    into = _written(state, operation)
    segments = state.exchange.bound.stages[operation.position].segments
    if segments is None:
        return into, None
    if segments.is_slice:
        return into.of_rows(segments.slice_of(operation.chunk)), None
    return into, state.rows_in_place(operation.position, operation.chunk)


def _put(target: torch.Tensor, column: torch.Tensor, index: torch.Tensor | None) -> None:
    if index is None:
        target.copy_(column)
    else:
        put_rows(target, index, column)


def _start(state: State, operation: Operation, start: Callable[..., dist.Work]) -> Works:
    group, monitor = state.group(operation), state.exchange.monitor
    send, receive = state.bound.splits(operation)
    num_rows = {
        resource: sum(map(send.__getitem__, peers)) for resource, peers in group.peers.items()
    }
    messages = state.messages(operation)
    outputs = state.allocate(operation.writes[0])
    works: Works = []
    monitor.note("start", state.pass_name, operation)
    try:
        for output, message in zip(outputs, messages, strict=True):
            works.append(start(output, message, receive, send, group))
            row_bytes = message.shape[1:].numel() * message.itemsize
            for resource in num_rows:
                monitor.bytes_sent[operation.stage, resource] += num_rows[resource] * row_bytes
    except RuntimeError as error:
        raise state.failure(operation, error) from error
    return monitor.watch(works, state.pass_name, operation)
