"""Bytes and host work of each operation of a pass, by rank, chunk and resource.

Rows, bytes of a row and kinds of operations come from the program, which the executor runs too. For
integer counts the bytes equal those of the executor's monitor.

The host pays for PyTorch's operations on tensors without views (an allocation is one) or for the
launches of fused Triton kernels, whose bytes are those that their files name.
`scripts/launch_budget.py` counts both on the executor, and a test compares the two.

Notation: C = number of chunks, S = the ranks that are priced, P = ranks of a collective's group,
W = most experts of any token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from monta_megatron.chains.chain import COUNT_BYTES
from monta_megatron.chains.program import (
    ID_BYTES,
    SUM_COLUMNS,
    BoundProgram,
    Kind,
    Operation,
    Pass,
    Policy,
    PricedOperation,
    Resource,
    RowFormat,
)
from monta_megatron.chains.stages import RowCounts
from monta_megatron.core import GroupName, Layout

# Work before and after a program; the count exchange is a kind.
Around: TypeAlias = Literal["count", "lists", "permute", "unpermute"]


class HostOperations(NamedTuple):
    """Kernel launches per chunk of one kind.

    Means, rounded; the fields that apply to a pass are added up.

    Attributes:
        rows: launches for the hidden rows.
        probs: launches for probabilities, in a pass that carries them.
        ids: launches for expert ids, in a pass that carries them.
        block: launches per block of columns that is summed at a time.
        once: launches for all chunks together, which allocate what they share.
    """

    rows: int = 0
    probs: int = 0
    ids: int = 0
    block: int = 0
    once: int = 0


HOST_OPERATIONS: Mapping[Kind | Around, HostOperations] = {
    "pack": HostOperations(rows=2, probs=1, ids=1),
    "find_lists": HostOperations(ids=9),
    "find_copies": HostOperations(ids=11),
    "duplicate": HostOperations(rows=1, ids=2),
    "reduce": HostOperations(probs=3, block=4),
    "alltoall": HostOperations(once=1),
    "allgather": HostOperations(once=1),
    "reduce_ranks": HostOperations(rows=5, probs=8, block=4),
    "put": HostOperations(rows=1, probs=1, ids=2),
    "count": HostOperations(ids=12),
    "lists": HostOperations(ids=11),
    "permute": HostOperations(rows=1, ids=5),
    "unpermute": HostOperations(rows=2),
}
# As `HOST_OPERATIONS`: one launch for the rows and their lists, and the allocations of its output.
FUSED_HOST_OPERATIONS: Mapping[Kind | Around, HostOperations] = {
    **HOST_OPERATIONS,
    "find_lists": HostOperations(ids=3),
    "find_copies": HostOperations(ids=3),
    "duplicate": HostOperations(rows=1, once=1),
    "to_experts": HostOperations(rows=1, ids=2),
    "reduce": HostOperations(rows=1),
    "reduce_ranks": HostOperations(rows=1),
    "count": HostOperations(ids=10),
    "lists": HostOperations(ids=3),
}


def num_host_operations(
    kind: Kind | Around,
    pass_: Pass,
    row: RowFormat,
    policy: Policy = "streams",
    num_chunks: int = 1,
) -> float:
    """Number of operations of one kind that the host enqueues for one chunk.

    Args:
        kind: kind of the operation.
        pass_: pass that the operation is part of.
        row: sizes of a row's values.
        policy: way in which the program is executed.
        num_chunks: C, the number of chunks that share allocations.
    """
    table = FUSED_HOST_OPERATIONS if policy == "fused" else HOST_OPERATIONS
    launches = table[kind]
    is_rounded = row.sum_bytes > row.value_bytes
    num_blocks = -(-row.hidden_size // SUM_COLUMNS) if is_rounded else 1
    return (
        launches.rows
        + launches.probs * pass_.probs
        + launches.ids * pass_.ids
        + launches.block * num_blocks
        + launches.once / num_chunks
    )


SUMS = ("reduce", "reduce_ranks")
# About how many times finding copies sorts and scans expert ids, as int64 (exchange/rows.py);
# twice as many if the copies keep their share of them.
FIND_VALUE_BYTES = 8
FIND_PASSES: Mapping[str, int] = {"find_copies": 6, "find_lists": 12}
# Of an index in the lists of copies that kernels write; each copy is in three of them.
INDEX_BYTES = 8
# Work on Megatron's routing map [T, E] before a dispatch, in bytes per token and expert: counting
# passes over its bools about 6 times, listing expert ids over 4-byte scores as often. Kernels read
# it once each.
COUNT_MAP_BYTES = 6
LIST_MAP_BYTES = 6 * 4


class Moved(NamedTuple):
    """Bytes through one resource, and through how many ranks.

    Attributes:
        num_bytes: [2, S, C] bytes that leave a rank for others, and bytes that arrive from them; in
            memory [1, S, C], bytes read and written.
        group_size: number of ranks, see `Cluster.time_us`.
        ranks_on_node: number of ranks per node, see `Cluster.time_us`.
    """

    num_bytes: RowCounts
    group_size: int = 1
    ranks_on_node: int = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTraffic:
    """Traffic of one stage: a series of a program, or the work around it.

    Attributes:
        stage: name of the stage, or of the work before or after the program.
        kind: kind of its operations, which decides the host time.
        operation: operation whose curve gives the price.
        resource: resource that the stage occupies.
        moved: resource -> bytes that go through it. A group on several nodes may use two.
        message_bytes: bytes of a row in each message of a collective; messages start one by one.
        messages_overlap: whether messages are in flight at the same time.
    """

    stage: str
    kind: "Kind | Around"
    operation: PricedOperation
    resource: Resource
    moved: Mapping[Resource, Moved]
    message_bytes: tuple[int, ...] = (1,)
    messages_overlap: bool = False

    def sent_bytes(self, resource: Resource, num_represented: Sequence[int]) -> float:
        """Bytes that leave ranks for others.

        Args:
            resource: "inter" or "intra".
            num_represented: [S] number of ranks that each priced rank stands for.
        """
        if resource not in self.moved:
            return 0.0
        sent: float = (self.moved[resource].num_bytes[0].sum(axis=1) @ num_represented).item()
        return sent


@dataclass(frozen=True, kw_only=True)
class PassTraffic:
    """One pass.

    Attributes:
        counting: stages of a dispatch that bring the counts, for which the host waits.
        before: stages between the counts and the program, in order.
        pipeline: stages of the program, one per series of operations, in order.
        after: stages after the program, in order.
    """

    counting: tuple[StageTraffic, ...]
    before: tuple[StageTraffic, ...]
    pipeline: tuple[StageTraffic, ...]
    after: tuple[StageTraffic, ...]


def pass_traffic(
    programs: Sequence[BoundProgram], num_tokens: float, num_exchanged_counts: int
) -> PassTraffic:
    """Everything that some ranks do in one pass: the program, and what is before and after it.

    Dispatch counts, exchanges the counts, and lists expert ids if rows are tokens. If rows are
    permuted tokens, Megatron permutes tokens before dispatch and sums permuted tokens after
    combine; the backward passes do the transposes.

    Args:
        programs: [S] program with the rows of each rank.
        num_tokens: tokens per rank.
        num_exchanged_counts: number of integers from every rank to every rank; see `chains.chain`.
    """
    layouts = [program.bound.layout for program in programs]
    pass_, row = programs[0].program.pass_, programs[0].program.row
    permutes = programs[0].bound.chain.rows == "permuted tokens"
    rows = np.array([[program.bound.num_source_rows] for program in programs])  # [S, 1]
    tokens = np.full(rows.shape, num_tokens)
    counting, before, after = [], [], []
    if pass_.ids:
        size_of_map = layouts[0].num_experts * tokens
        counted, listed = COUNT_MAP_BYTES * size_of_map, LIST_MAP_BYTES * size_of_map
        if programs[0].program.policy == "fused":
            # Ids are written; probabilities are read and written.
            id_bytes = (ID_BYTES + 2 * row.prob_bytes) * programs[0].max_experts_per_token
            counted, listed = size_of_map, size_of_map + id_bytes * tokens
        counting.append(in_memory("count", "count", counted))
        if len(layouts[0].nodes) > 1:
            counting.append(_count_exchange(layouts, COUNT_BYTES * num_exchanged_counts))
        if not permutes:
            before.append(in_memory("expert ids", "lists", listed))
    hidden_bytes = row.hidden_size * row.value_bytes
    if permutes and pass_.transpose:
        num_bytes = hidden_bytes * (rows + tokens)
        after.append(in_memory("unpermute", "unpermute", num_bytes, "sum"))
    elif permutes:
        before.append(in_memory("permute", "permute", 2 * hidden_bytes * rows))
    pipeline = tuple(_series_traffic(programs, series) for series in programs[0].program.series)
    return PassTraffic(
        counting=tuple(counting), before=tuple(before), pipeline=pipeline, after=tuple(after)
    )


def _count_exchange(layouts: Sequence[Layout], message_bytes: int) -> StageTraffic:
    """A message from every rank to each."""
    resource: Resource = "inter" if "tp_ep" in layouts[0].crossing_groups else "intra"
    messages = np.full((len(layouts), 2, 1, len(layouts[0].nodes)), message_bytes)
    return StageTraffic(
        stage="exchange of counts",
        kind="alltoall",
        operation="alltoall",
        resource=resource,
        moved=moved_by_resource(layouts, "tp_ep", messages, resource),
    )


def _series_traffic(programs: Sequence[BoundProgram], series: Sequence[Operation]) -> StageTraffic:
    """Bytes of a series: a copy reads what it writes, a sum all copies of a row, or terms."""
    first = series[0]
    if first.is_collective:
        return _collective_traffic(programs, series)
    if first.kind in FIND_PASSES:
        return in_memory(first.stage, first.kind, _bytes_to_find(programs, series))
    sums = first.kind in SUMS
    written = _bytes_of(programs, series, first.writes[0])
    read = _bytes_of(programs, series, first.reads[0]) if sums else written
    return in_memory(first.stage, first.kind, read + written, "sum" if sums else "copy")


def _bytes_to_find(programs: Sequence[BoundProgram], series: Sequence[Operation]) -> RowCounts:
    """[S, C] bytes to find copies, from the expert ids alone.

    Kernels read every list of W ids twice; a row begins somewhere in the copies.
    """
    first, width = series[0], programs[0].max_experts_per_token
    rows, copies = (_rows_at(programs, series, first.position + after) for after in (0, 1))
    if programs[0].program.policy == "fused":
        return (2 * ID_BYTES * width + INDEX_BYTES) * rows + 3 * INDEX_BYTES * copies
    return FIND_PASSES[first.kind] * FIND_VALUE_BYTES * width * rows


def _collective_traffic(
    programs: Sequence[BoundProgram], series: Sequence[Operation]
) -> StageTraffic:
    first = series[0]
    assert first.group is not None, f"{first.kind}: no collective"
    chunks = [operation.chunk for operation in series]
    message_bytes = programs[0].message_bytes(programs[0].program.buffers[first.writes[0]])
    rows = np.array([program.sides(first.position) for program in programs])[:, :, chunks]
    layouts = [program.bound.layout for program in programs]
    return StageTraffic(
        stage=first.stage,
        kind=first.kind,
        operation="allgather" if first.kind == "allgather" else "alltoall",
        resource=first.resource,
        moved=moved_by_resource(layouts, first.group, sum(message_bytes) * rows, first.resource),
        message_bytes=message_bytes,
        messages_overlap=first.host == "starts",
    )


def _rows_at(
    programs: Sequence[BoundProgram], series: Sequence[Operation], boundary: int
) -> RowCounts:
    """[S, C] rows of each chunk after so many stages, in the order of issue."""
    chunks = [operation.chunk for operation in series]
    return np.array([program.bound.rows_by_boundary[boundary][chunks] for program in programs])


def _bytes_of(
    programs: Sequence[BoundProgram], series: Sequence[Operation], number: int
) -> RowCounts:
    """[S, C] bytes of each chunk's rows in a buffer like this one."""
    buffer = programs[0].program.buffers[number]
    row_bytes = buffer.repeats * sum(programs[0].message_bytes(buffer))
    return row_bytes * _rows_at(programs, series, buffer.boundary)


def in_memory(
    stage: str, kind: Kind | Around, num_bytes: RowCounts, operation: PricedOperation = "copy"
) -> StageTraffic:
    """A stage that reads and writes [S, C] bytes."""
    return StageTraffic(
        stage=stage,
        kind=kind,
        operation=operation,
        resource="memory",
        moved={"memory": Moved(num_bytes[None])},
    )


def moved_by_resource(
    layouts: Sequence[Layout], group: GroupName, num_bytes: RowCounts, resource: Resource
) -> dict[Resource, Moved]:
    """Bytes to and from each peer, by resource.

    Args:
        layouts: [S] exchange, as each rank sees it.
        group: group of the collective.
        num_bytes: [S, 2, C, P] bytes that leave for each peer, and bytes that arrive from it.
        resource: resource that the collective occupies.
    """
    here, elsewhere = zip(*(peers_of(layout, group) for layout in layouts), strict=True)

    def moved(peers: Sequence[RowCounts]) -> RowCounts:
        """[S, 2, C, P] -> [2, S, C]."""
        return np.einsum("skcp,sp->ksc", num_bytes, np.array(peers))

    # The groups of the exchange may lie on the nodes in different ways.
    on_node = [1 + int(peers.sum()) for peers in here]
    by_resource: dict[Resource, Moved] = {}
    if max(on_node) > 1:
        by_resource["intra"] = Moved(moved(here), max(on_node), max(on_node))
    if resource == "inter":
        by_resource["inter"] = Moved(moved(elsewhere), num_bytes.shape[-1], min(on_node))
    return by_resource


@lru_cache(maxsize=4096)
def peers_of(layout: Layout, group: GroupName) -> tuple[RowCounts, RowCounts]:
    """[P] 1 for every other rank of this rank's group on its node, and for every rank elsewhere."""
    ranks, nodes = np.array(layout.members(group, layout.rank)), np.array(layout.nodes)
    on_node = nodes[ranks] == nodes[layout.rank]
    return on_node & (ranks != layout.rank), ~on_node
