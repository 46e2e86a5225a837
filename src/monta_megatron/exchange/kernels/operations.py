"""Operations of the executor as Triton kernels, mostly one launch each.

Operations without a kernel are those of `operations`: collectives, and "pack" and "put" of permuted
tokens, which move every row once already, one launch for each column.

Notation: N = rows, M = copies of them, P = ranks of a group, H = hidden size.
"""

from collections.abc import Callable, Mapping

from monta_megatron.chains.program import Kind, Operation
from monta_megatron.exchange.kernels import duplicate as duplicates
from monta_megatron.exchange.kernels import find_copies, reduce_parts
from monta_megatron.exchange.kernels import reduce as sums
from monta_megatron.exchange.kernels import to_experts as experts
from monta_megatron.exchange.operations import OPERATIONS, Works
from monta_megatron.exchange.payload import Columns
from monta_megatron.exchange.state import State, promoted


def find(state: State, operation: Operation) -> Works:
    """Find the copies of rows, from their expert ids; two launches."""
    columns, _ = state.read(operation)
    parts = state.exchange.bound.stages[operation.position].parts
    assert columns.ids is not None and parts is not None, f"{operation.stage} has nothing to find"
    copies = state.indices.copies[operation.position, operation.chunk]
    find_copies.find_copies(columns.ids, parts, copies)
    return []


def duplicate(state: State, operation: Operation) -> Works:
    """Copy each row for every part that it goes to: [N, H] -> [M, H], with its list."""
    read, written = operation.reads[0], operation.writes[0]
    if state.payloads[read].packed and state.payloads[read] == state.payloads[written]:
        # Messages of the same layout are copied with all of their columns at once.
        (message,), (target,) = state.messages(operation), state.allocate(written)
        columns, into = Columns(rows=message), Columns(rows=target)
    else:
        columns, into = state.read(operation)[0], _written(state, operation)
    copies = state.indices.copies[operation.position, operation.chunk]
    duplicates.duplicate(columns, copies, into)
    return []


def to_experts(state: State, operation: Operation) -> Works:
    """Copy each row for every expert that it goes to, to its place in expert order."""
    columns, _ = state.read(operation)
    last = operation.position + 1
    segments = state.exchange.bound.stages[last].segments
    assert segments is not None, "rows that lie in order are duplicated"
    places = None if segments.is_slice else state.rows_in_place(last, operation.chunk)
    copies = state.indices.copies[operation.position, operation.chunk]
    experts.to_experts(columns, copies, _written(state, operation), places)
    return []


def reduce(state: State, operation: Operation) -> Works:
    """Sum each row's copies: [M, H] -> [N, H], rounded once; its probabilities likewise."""
    columns, index = state.read(operation)
    copies = state.indices.copies[operation.position, operation.chunk]
    unrounded, first = None, 0
    if operation.group is not None:
        # Rows on the wire are rounded; this rank's part of the next sum is not.
        (unrounded,) = state.allocate(operation.writes[1])
        gathered = state.exchange.bound.stages[operation.position - 1].receive[operation.chunk]
        first = int(gathered[: state.group(operation).rank].sum())
    into = _written(state, operation)
    sums.reduce(columns, copies, into, state.sum_dtype, index, unrounded, first)
    return []


def sum_parts(state: State, operation: Operation) -> Works:
    """Sum the parts of each row that came from all ranks: [P * N, H] -> [N, H], rounded once."""
    columns, _ = state.read(operation)
    reduce_parts.reduce_parts(
        columns,
        _written(state, operation),
        promoted(state.exchange.sum_dtype, columns.rows.dtype),
        operation.parts_per_sum,
        state.columns(operation.reads[1]).rows if len(operation.reads) > 1 else None,
        state.group(operation).rank,
    )
    return []


FUSED_OPERATIONS: Mapping[Kind, Callable[[State, Operation], Works]] = {
    **OPERATIONS,
    "find_lists": find,
    "find_copies": find,
    "duplicate": duplicate,
    "to_experts": to_experts,
    "reduce": reduce,
    "reduce_parts": sum_parts,
}


def _written(state: State, operation: Operation) -> Columns:
    """Output of an operation: its chunk's rows of the whole, where they lie in order there."""
    number = operation.writes[0]
    columns = state.columns_to_write(number)
    program, stages = state.bound.program, state.exchange.bound.stages
    if program.buffers[number].chunk is not None:
        return columns
    segments = stages[0 if program.pass_.transpose else -1].segments
    assert segments is not None, "rows that lie in order are no chunk's alone"
    if not segments.is_slice:
        return columns
    return columns.of_rows(segments.slice_of(operation.chunk))
