"""Operations of the executor as Triton kernels, mostly one launch each.

Operations without a kernel are those of `operations`: collectives, and "pack" and "put" of permuted
tokens, which already copy each row once, in one launch per column.
"""

from collections.abc import Callable, Mapping

from monta_megatron.chains.program import Kind, Operation
from monta_megatron.exchange.buffers import Buffers, Columns, promoted
from monta_megatron.exchange.kernels.copies import duplicate as duplicate_rows
from monta_megatron.exchange.kernels.copies import find_copies
from monta_megatron.exchange.kernels.sums import reduce as reduce_copies
from monta_megatron.exchange.kernels.sums import reduce_ranks as reduce_terms
from monta_megatron.exchange.operations import OPERATIONS, Works, first_unrounded


def find(buffers: Buffers, operation: Operation) -> None:
    """Derive the copies of rows from their expert ids; two launches."""
    columns = buffers.source(operation)
    parts = buffers.exchange.bound_chain.stages[operation.position].parts
    assert columns.ids is not None and parts is not None, f"{operation.stage} has nothing to find"
    copies, launches = buffers.copies(operation), buffers.launches(operation)
    find_copies(columns.ids, parts, copies, launches)


def duplicate(buffers: Buffers, operation: Operation) -> None:
    """Copy each row, with its list, once per destination part, or per expert to its place."""
    index_M = None
    read, written = operation.reads[0], operation.writes[0]
    if buffers.formats[read].packed and buffers.formats[read] == buffers.formats[written]:
        # Messages of the same format are copied with all of their columns at once.
        columns, into = Columns(*buffers.sent(operation)), Columns(*buffers.messages(written))
    else:
        columns, into = buffers.source(operation), buffers.target(operation)
        index_M = buffers.row_indices(operation)
    copies, launches = buffers.copies(operation), buffers.launches(operation)
    duplicate_rows(columns, copies, into, index_M, launches)


def reduce(buffers: Buffers, operation: Operation) -> None:
    """Sum each row's copies and their probabilities, rounded once: [M, H] -> [N, H]."""
    columns, into = buffers.source(operation), buffers.target(operation)
    index_M = buffers.row_indices(operation)
    unrounded_RH, first = None, 0
    if operation.unrounded is not None:
        # Rows on the wire are rounded; this rank's term of the next sum is not.
        unrounded_RH = buffers.columns(operation.unrounded).rows
        first = first_unrounded(buffers, operation)
    copies, launches = buffers.copies(operation), buffers.launches(operation)
    reduce_copies(columns, copies, into, buffers.sum_dtype, index_M, unrounded_RH, first, launches)


def reduce_ranks(buffers: Buffers, operation: Operation) -> None:
    """Sum each row's terms from all ranks, rounded once: [P * N, H] -> [N, H]."""
    columns, into = buffers.source(operation), buffers.target(operation)
    kept = operation.unrounded
    reduce_terms(
        columns,
        into,
        promoted(buffers.exchange.sum_dtype, columns.rows.dtype),
        operation.ranks_per_sum,
        None if kept is None else buffers.columns(kept).rows,
        buffers.gather(operation)[1],
        buffers.launches(operation),
    )


FUSED_OPERATIONS: Mapping[Kind, Callable[[Buffers, Operation], Works | None]] = {
    **OPERATIONS,
    "find_lists": find,
    "find_copies": find,
    "duplicate": duplicate,
    "to_experts": duplicate,
    "reduce": reduce,
    "reduce_ranks": reduce_ranks,
}
