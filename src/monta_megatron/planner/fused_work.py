"""What Triton kernels move and launch, where it is not what PyTorch's operations do.

Bytes are those that the kernels' files name: what is read once and written once. The curves of a
cluster file for these operations were measured with PyTorch's operations.
"""

from collections.abc import Mapping

from monta_megatron.chains.program import ID_BYTES, BoundProgram, Kind
from monta_megatron.chains.stages import RowCounts
from monta_megatron.planner import host_operations
from monta_megatron.planner.host_operations import Around, HostOperations

# Of a number in the lists that say where copies lie, of which a copy is in three.
INDEX_BYTES = 8

# As `host_operations.HOST_OPERATIONS`: a launch for the rows and their lists, and what it writes.
HOST_OPERATIONS: Mapping[Kind | Around, HostOperations] = {
    **host_operations.HOST_OPERATIONS,
    "quantize": HostOperations(rows=1, probs=1, ids=1),
    "find_lists": HostOperations(ids=3),
    "find_copies": HostOperations(ids=3),
    "duplicate": HostOperations(rows=1, once=1),
    "to_experts": HostOperations(rows=1, ids=2),
    "reduce": HostOperations(rows=1),
    "reduce_parts": HostOperations(rows=1),
    "dequantize": HostOperations(rows=1, probs=1, ids=2),
    "count": HostOperations(ids=10),
    "lists": HostOperations(ids=3),
}


def find_bytes(bound: BoundProgram, rows: RowCounts, copies: RowCounts) -> RowCounts:
    """To find copies: every list of ids is read twice; a row begins somewhere in the copies."""
    row_bytes = 2 * ID_BYTES * bound.max_experts_per_token + INDEX_BYTES
    found: RowCounts = row_bytes * rows + 3 * INDEX_BYTES * copies
    return found


def around_bytes(
    bound: BoundProgram, size_of_map: RowCounts, tokens: RowCounts
) -> tuple[RowCounts, RowCounts]:
    """To count a routing map of bools, and to list its experts: a probability is read and written.

    Args:
        bound: the program that comes next.
        size_of_map: tokens times experts, of each rank.
        tokens: of each rank.
    """
    list_bytes = (ID_BYTES + 2 * bound.program.row.prob_bytes) * bound.max_experts_per_token
    return size_of_map, size_of_map + list_bytes * tokens
