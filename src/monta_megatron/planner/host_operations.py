"""How much a host hands to its device for each operation of a program, one table for all.

Counted are PyTorch's operations on tensors without views, an allocation is one; so is a launch of a
fused kernel (`fused_work`). `scripts/launch_budget.py` counts the same on the executor, and a test
compares the two.
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

from monta_megatron.chains.program import SUM_COLUMNS, Kind, Pass, Policy, RowFormat

# What comes before and after a program, as in `planner.traffic`; the exchange of counts is a kind.
Around: TypeAlias = Literal["count", "lists", "permute", "unpermute"]


class HostOperations(NamedTuple):
    """The operations of a kind, for one chunk: a mean, rounded.

    Attributes:
        rows: for the hidden rows.
        probs: as many more in a pass that carries probabilities.
        ids: as many more in a pass that carries expert ids too.
        block: as many more for each block of columns that is summed at a time.
        once: as many more for all chunks together: what is allocated for all of them.
    """

    rows: int = 0
    probs: int = 0
    ids: int = 0
    block: int = 0
    once: int = 0


HOST_OPERATIONS: Mapping[Kind | Around, HostOperations] = {
    "pack": HostOperations(rows=2, probs=1, ids=1),
    "quantize": HostOperations(probs=1, ids=1, block=16),
    "find_lists": HostOperations(ids=9),
    "find_copies": HostOperations(ids=11),
    "duplicate": HostOperations(rows=1, ids=2),
    "reduce": HostOperations(probs=3, block=4),
    "alltoall": HostOperations(once=1),
    "allgather": HostOperations(once=1),
    "reduce_parts": HostOperations(rows=5, probs=8, block=4),
    "put": HostOperations(rows=1, probs=1, ids=2),
    "dequantize": HostOperations(probs=1, ids=2, block=7),
    "count": HostOperations(ids=12),
    "lists": HostOperations(ids=11),
    "permute": HostOperations(rows=1, ids=5),
    "unpermute": HostOperations(rows=2),
}


def num_host_operations(
    kind: Kind | Around,
    pass_: Pass,
    row: RowFormat,
    policy: Policy = "streams",
    num_chunks: int = 1,
) -> float:
    """How many operations a host hands over for one chunk.

    Args:
        kind: what is done.
        pass_: the pass that it is part of.
        row: the sizes of a row's values.
        policy: how the program is executed.
        num_chunks: C, which share what is made once.
    """
    table = HOST_OPERATIONS
    if policy == "fused":
        from monta_megatron.planner.fused_work import HOST_OPERATIONS as table
    of_kind = table[kind]
    is_rounded = row.sum_bytes > row.value_bytes
    num_blocks = -(-row.hidden_size // SUM_COLUMNS) if is_rounded else 1
    return (
        of_kind.rows
        + of_kind.probs * pass_.probs
        + of_kind.ids * pass_.ids
        + of_kind.block * num_blocks
        + of_kind.once / num_chunks
    )
