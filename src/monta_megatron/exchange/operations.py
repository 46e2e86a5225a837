"""Operations of the executor as PyTorch operations on any device.

Each reads and writes the buffers named by the program. A collective starts its messages one by one,
as its iterator is advanced, and waits for none of them.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from monta_megatron.chains.program import Kind, Operation
from monta_megatron.exchange.buffers import Buffers, promoted
from monta_megatron.exchange.collectives import start_all_gather, start_all_to_all
from monta_megatron.exchange.monitor import Step
from monta_megatron.exchange.rows import (
    PartBounds,
    column_blocks,
    copy_rows,
    find_copies,
    put_rows,
    sum_ranks,
    sum_rows,
)

Works = Iterator[dist.Work]


def pack(buffers: Buffers, operation: Operation) -> None:
    """Gather a chunk's rows from the whole tensor into a message."""
    whole, index_N = buffers.source(operation), buffers.row_indices(operation)
    assert index_N is not None, "rows that lie in order are sent as they lie"
    into = buffers.target(operation)
    for target, column in zip(into.tensors(), whole.tensors(), strict=True):
        copy_rows(target, column, index_N)


def put(buffers: Buffers, operation: Operation) -> None:
    """Scatter a chunk's rows to their places in the whole tensor."""
    columns, into = buffers.source(operation), buffers.target(operation)
    index_N = buffers.row_indices(operation)
    for target, column in zip(into.tensors(), columns.tensors(), strict=True):
        if index_N is None:
            target.copy_(column)
        else:
            put_rows(target, index_N, column)


def find(buffers: Buffers, operation: Operation) -> None:
    """Derive the copies of rows from their expert ids."""
    columns = buffers.source(operation)
    assert columns.ids is not None, f"{operation.stage} has nothing to find"
    bounds = _part_bounds(buffers, operation, columns.ids)
    find_copies(columns.ids, bounds, buffers.copies(operation))


def duplicate(buffers: Buffers, operation: Operation) -> None:
    """Copy each row, with its list, once per destination part: [N, H] -> [M, H]."""
    copies, (read, *_), (written, *_) = buffers.copies(operation), operation.reads, operation.writes
    if buffers.formats[read] == buffers.formats[written]:
        # Messages of the same format are copied with all of their columns at once.
        pairs = zip(buffers.messages(written), buffers.sent(operation), strict=True)
        for target, message in pairs:
            copy_rows(target, message, copies.row)
        return
    columns, into = buffers.source(operation), buffers.target(operation)
    for target, column in zip(into.tensors(), columns.tensors(), strict=False):
        if target.dim() == column.dim():
            copy_rows(target, column, copies.row)
        else:
            # [N, W] -> [M]: the probability of a copy's expert.
            target.copy_(column[copies.row, copies.place])


def reduce(buffers: Buffers, operation: Operation) -> None:
    """Sum each row's copies and their probabilities, rounded once: [M, H] -> [N, H]."""
    columns, index_M = buffers.source(operation), buffers.row_indices(operation)
    copies, into = buffers.copies(operation), buffers.target(operation)
    targets = [(into.rows, slice(None))]
    if operation.unrounded is not None:
        # Rows on the wire are rounded; this rank's term of the next sum is not.
        unrounded_RH = buffers.columns(operation.unrounded).rows
        first = first_unrounded(buffers, operation)
        targets.append((unrounded_RH, slice(first, first + unrounded_RH.shape[0])))
    for block in column_blocks(columns.rows, buffers.sum_dtype):
        sums_NH = copies.sum_by_row(columns.rows[:, block], buffers.sum_dtype, index_M)
        for target, rows in targets:
            target[:, block] = sums_NH[rows]
        # Free it before the next block.
        del sums_NH
    if into.probs is not None and columns.probs is not None:
        if columns.probs.dim() > 1:
            into.probs.copy_(sum_rows(columns.probs, copies.by_row, copies.row_starts))
        else:
            # [M] -> [N, W]: every expert of a list has one copy, or none here.
            shares_M = columns.probs if index_M is None else columns.probs[index_M]
            into.probs.zero_()[copies.row, copies.place] = shares_M


def first_unrounded(buffers: Buffers, operation: Operation) -> int:
    """First row of a "reduce" that this rank sums next."""
    gather, rank = buffers.gather(operation)
    return int(gather.receive[operation.chunk][:rank].sum())


def reduce_ranks(buffers: Buffers, operation: Operation) -> None:
    """Sum each row's terms from all ranks, rounded once: [P * N, H] -> [N, H]."""
    columns, into = buffers.source(operation), buffers.target(operation)
    kept = operation.unrounded
    unrounded_NH = None if kept is None else buffers.columns(kept).rows
    for target, terms in zip(into.tensors(), columns.tensors(), strict=True):
        sum_ranks(
            target,
            terms,
            promoted(buffers.exchange.sum_dtype, terms.dtype),
            operation.ranks_per_sum,
            unrounded_NH if terms is columns.rows else None,
            buffers.gather(operation)[1],
        )


def alltoall(buffers: Buffers, operation: Operation) -> Works:
    """Start an AllToAll."""
    return _start(buffers, operation, start_all_to_all)


def allgather(buffers: Buffers, operation: Operation) -> Works:
    """Start an AllGather, in the order of the ranks."""
    return _start(buffers, operation, start_all_gather)


OPERATIONS: Mapping[Kind, Callable[[Buffers, Operation], Works | None]] = {
    "pack": pack,
    "find_lists": find,
    "find_copies": find,
    "duplicate": duplicate,
    "reduce": reduce,
    "alltoall": alltoall,
    "allgather": allgather,
    "reduce_ranks": reduce_ranks,
    "put": put,
}


def _part_bounds(buffers: Buffers, operation: Operation, ids_NW: torch.Tensor) -> PartBounds:
    """Bounds of the parts that a stage copies for, cached from its first chunk to its last."""
    position, bound, held = operation.position, buffers.exchange.bound_chain, buffers.part_bounds
    if position not in held:
        parts = bound.stages[position].parts
        assert parts is not None, f"{operation.stage} has nothing to find"
        before, after = bound.rows_at[position : position + 2]
        held[position] = PartBounds.of(parts, int(max(before)), int(max(after)), ids_NW)
    return held.pop(position) if operation.chunk == bound.num_chunks - 1 else held[position]


def _start(buffers: Buffers, operation: Operation, start: Callable[..., dist.Work]) -> Works:
    group, monitor = buffers.group(operation), buffers.exchange.monitor
    send, receive = buffers.bound.splits(operation)
    outputs, messages = buffers.messages(operation.writes[0]), buffers.sent(operation)
    recorder = monitor.recorder
    if recorder is not None:
        recorder.note(Step("start", buffers.pass_name, operation))
    row_bytes = buffers.formats[operation.reads[0]].row_bytes
    for output, message, num_bytes in zip(outputs, messages, row_bytes, strict=True):
        yield start(output, message, receive, send, group)
        monitor.sent(operation.stage, group, send, num_bytes)
