"""What the executor does for each kind of operation, as PyTorch operations on any device.

Each takes the state of its pass, writes the buffers that the program says, and returns what it
started and did not wait for.

Notation: N = rows, M = copies of them, P = ranks of a group, H = hidden size.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from monta_megatron.chains.program import Kind, Operation
from monta_megatron.exchange.collectives import PeerGroup, start_all_gather, start_all_to_all
from monta_megatron.exchange.copies import Copies, put_rows
from monta_megatron.exchange.copies import find_copies as copies_of_rows
from monta_megatron.exchange.payload import Lanes, OwnPart
from monta_megatron.exchange.state import State

Works = list[dist.Work]


def pack(state: State, operation: Operation) -> Works:
    """Take a chunk's rows out of the whole tensor, into a message."""
    whole, index = state.read(operation)
    assert index is not None, "rows that lie in order are sent as they lie"
    into = _written(state, operation)
    for target, lane in zip(into.tensors(), whole.tensors(), strict=True):
        torch.index_select(lane, 0, index, out=target)
    return []


def put(state: State, operation: Operation) -> Works:
    """Put a chunk's rows into their places in the whole tensor."""
    lanes, _ = state.read(operation)
    segments = state.exchange.bound.stages[operation.position].segments
    assert segments is not None, "rows that lie in order are the output"
    into = _written(state, operation)
    for target, lane in zip(into.tensors(), lanes.tensors(), strict=True):
        if segments.is_slice:
            target[segments.slice_of(operation.chunk)].copy_(lane)
        else:
            put_rows(target, state.rows_in_place(operation.position, operation.chunk), lane)
    return []


def find_lists(state: State, operation: Operation) -> Works:
    """Find the copies for other ranks, which keep their share of a row's list of experts."""
    return _find(state, operation, keep_lists=True)


def find_copies(state: State, operation: Operation) -> Works:
    """Find the copies for this rank's experts, one expert each."""
    return _find(state, operation, keep_lists=False)


def duplicate(state: State, operation: Operation) -> Works:
    """Copy each row for every part that it goes to: [N, H] -> [M, H], with its share of lists."""
    lanes, _ = state.read(operation)
    copies = _copies(state, operation)
    into = _written(state, operation)
    torch.index_select(lanes.rows, 0, copies.row, out=into.rows)
    if into.probs is not None and lanes.probs is not None:
        into.probs.copy_(copies.pick(lanes.probs, missing=0))
    if into.ids is not None and lanes.ids is not None:
        into.ids.copy_(copies.pick(lanes.ids, missing=state.exchange.bound.layout.num_experts))
    return []


def reduce(state: State, operation: Operation) -> Works:
    """Sum each row's copies: [M, H] -> [N, H], rounded once; probabilities go back into lists."""
    lanes, index = state.read(operation)
    copies = _copies(state, operation)
    rows = copies.sum_by_row(lanes.rows, state.sum_dtype, index)
    into = _written(state, operation)
    into.rows.copy_(rows)
    if into.probs is not None and lanes.probs is not None:
        shares = lanes.probs if index is None else lanes.probs[index]
        into.probs.copy_(copies.put_back(shares))
    if operation.group is not None:
        # What goes over the wire is rounded; this rank's own part of the next sum is not.
        gather = state.exchange.bound.stages[operation.position - 1]
        parts = rows.split(gather.receive[operation.chunk].tolist())
        (own,) = state.allocate(operation.writes[1])
        own.copy_(parts[state.group(operation).rank])
    return []


def reduce_parts(state: State, operation: Operation) -> Works:
    """Sum the parts of each row that came from all ranks: [P * N, H] -> [N, H], rounded once."""
    own = None
    if len(operation.reads) > 1:
        rows = state.lanes(operation.reads[1]).rows
        own = OwnPart(rows=rows, copy=state.group(operation).rank)
    state.payload(operation.writes[0]).sum_of_copies(
        state.allocate(operation.writes[0]),
        state.messages(operation),
        state.group(operation).size,
        state.exchange.sum_dtype,
        own,
        operation.parts_per_sum,
    )
    return []


def alltoall(state: State, operation: Operation) -> Works:
    """Start an exchange of rows with the group."""
    return _start(state, operation, start_all_to_all)


def allgather(state: State, operation: Operation) -> Works:
    """Start to gather the group's rows, in the order of its ranks."""

    def start(
        output: torch.Tensor,
        message: torch.Tensor,
        receive: list[int],
        send: list[int],
        group: PeerGroup,
    ) -> dist.Work:
        return start_all_gather(output, message, receive, group)

    return _start(state, operation, start)


OPERATIONS: Mapping[Kind, Callable[[State, Operation], Works]] = {
    "pack": pack,
    "find_lists": find_lists,
    "find_copies": find_copies,
    "duplicate": duplicate,
    "reduce": reduce,
    "alltoall": alltoall,
    "allgather": allgather,
    "reduce_parts": reduce_parts,
    "put": put,
}


def _written(state: State, operation: Operation) -> Lanes:
    state.allocate(operation.writes[0])
    return state.lanes(operation.writes[0])


def _find(state: State, operation: Operation, keep_lists: bool) -> Works:
    lanes, _ = state.read(operation)
    bound, chunk = state.exchange.bound, operation.chunk
    parts = bound.stages[operation.position].parts
    assert lanes.ids is not None and parts is not None, f"{operation.stage} has nothing to find"
    num_copies = int(bound.rows_at[operation.position + 1][chunk])
    state.exchange.copies[operation.position, chunk] = copies_of_rows(
        lanes.ids, parts, num_copies, keep_lists
    )
    return []


def _copies(state: State, operation: Operation) -> Copies:
    copies = state.exchange.copies[operation.position, operation.chunk]
    state.streams.keep(copies.tensors())
    return copies


def _start(state: State, operation: Operation, start: Callable[..., dist.Work]) -> Works:
    group, monitor = state.group(operation), state.exchange.monitor
    send, receive = state.bound.splits(operation)
    messages = state.messages(operation)
    outputs = state.allocate(operation.writes[0])
    works: Works = []
    monitor.note("start", state.walk, operation)
    try:
        for output, message in zip(outputs, messages, strict=True):
            works.append(start(output, message, receive, send, group))
            row_bytes = message.shape[1:].numel() * message.itemsize
            for tier, peers in group.peers.items():
                num_rows = sum(send[peer] for peer in peers)
                monitor.bytes_sent[operation.stage, tier] += num_rows * row_bytes
    except RuntimeError as error:
        raise state.failure(operation, error) from error
    return monitor.watch(works, state.walk, operation)
