"""What Triton kernels move and launch, where it is not what PyTorch's operations do.

Bytes are those that the kernels' files name: what is read once and written once.

Notation: W = most experts of any token.
"""

from collections.abc import Mapping
from typing import TypeVar

from monta_megatron.chains.program import ID_BYTES, Kind
from monta_megatron.chains.stages import RowCounts
from monta_megatron.planner import host_operations
from monta_megatron.planner.host_operations import Around, HostOperations

Number = TypeVar("Number", float, RowCounts)

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


def find_bytes(width: int, rows: Number, copies: Number) -> Number:
    """To find copies: every list of W ids is read twice; a row begins somewhere in the copies."""
    return (2 * ID_BYTES * width + INDEX_BYTES) * rows + 3 * INDEX_BYTES * copies


def list_bytes(width: int, prob_bytes: int, size_of_map: Number, tokens: Number) -> Number:
    """To list the W experts of tokens in a routing map of bools, which counting reads alone.

    Args:
        width: W.
        prob_bytes: of a probability, which is read and written.
        size_of_map: tokens times experts.
        tokens: that are listed.
    """
    return size_of_map + (ID_BYTES + 2 * prob_bytes) * width * tokens
