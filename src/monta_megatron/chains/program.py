"""The program of a pass: its operations in the order of issue, their buffers and their waits.

A layer has four passes over a chain: dispatch, combine, and the backward pass of each. `lower`
turns a bound chain into the program of one pass. The executor runs it, the planner prices it,
memory is the liveness of its buffers, the timeline draws it. `chains.lower` shows the indices of
operations and buffers by an example. No torch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from monta_megatron.chains.chain import BoundChain
from monta_megatron.chains.stages import RowCounts
from monta_megatron.core import GroupName

ALIGNMENT_BYTES = 16
ID_BYTES = 4
# Columns of low-precision rows that are summed at a time, which bounds their fp32 scratch memory.
SUM_COLUMNS = 2048
# Number of the buffer that holds the input of a pass.
INPUT = 0

# How a program is executed: "host" on CPU ranks, where the host itself copies and waits; "streams"
# on devices, where it enqueues everything asynchronously; "fused" likewise, with kernels that write
# rows straight to their place, and sum them in registers.
Policy: TypeAlias = Literal["host", "streams", "fused"]
# Resource of an operation: the network between nodes, the link inside a node, memory.
Resource: TypeAlias = Literal["inter", "intra", "memory"]
# Resources of collectives.
LINKS: tuple[Resource, ...] = ("inter", "intra")
Kind: TypeAlias = Literal[
    "pack",
    # One function finds all copies. They are two kinds because their prices differ: copies for
    # nodes or ranks, and copies for experts, which also have a place in their token's list.
    "find_lists",
    "find_copies",
    "duplicate",
    "to_experts",
    "reduce",
    "alltoall",
    "allgather",
    "reduce_ranks",
    "put",
]
# Operations that a calibration times and a curve prices.
PricedOperation: TypeAlias = Literal["alltoall", "allgather", "copy", "sum"]
COLLECTIVES: tuple[Literal["alltoall", "allgather"], ...] = ("alltoall", "allgather")


class Release(Enum):
    """When the memory of a buffer is released."""

    JOIN = "join"
    """At the end of the pass, when the caller's stream waits for the side streams. Until then
    buffers of later chunks may use its slot."""
    LAST_READ = "last read"
    """When the last operation that reads it has ended; scratch memory with its own operation."""
    CALLER = "caller"
    """Never by the pass: its input and its output belong to the caller."""
    MICRO_BATCH = "micro-batch"
    """With the `Exchange` of the micro-batch: lists of copies, which later passes read again."""


class Pass(NamedTuple):
    """One of the four passes over a chain, and the columns it carries besides the hidden rows."""

    name: str
    transpose: bool
    probs: bool = False
    ids: bool = False


DISPATCH = Pass(name="dispatch", transpose=False, probs=True, ids=True)
COMBINE = Pass(name="combine", transpose=True)
DISPATCH_BACKWARD = Pass(name="dispatch_backward", transpose=True, probs=True)
COMBINE_BACKWARD = Pass(name="combine_backward", transpose=False)

FORWARD = (DISPATCH, COMBINE)
BACKWARD = (COMBINE_BACKWARD, DISPATCH_BACKWARD)
FORWARD_BACKWARD = (*FORWARD, *BACKWARD)
Phase: TypeAlias = Literal["forward", "forward_backward", "recomputed"]
PASSES: dict[Phase, tuple[Pass, ...]] = {
    "forward": FORWARD,
    "forward_backward": FORWARD_BACKWARD,
    # Activations that were dropped are computed again before the backward passes.
    "recomputed": (
        *FORWARD,
        *(each._replace(name=f"{each.name}_again") for each in FORWARD),
        *BACKWARD,
    ),
}


class RowFormat(NamedTuple):
    """The values of a row.

    Attributes:
        hidden_size: H.
        value_bytes: bytes of each hidden value.
        prob_bytes: bytes of each probability; 0 in a pass that carries none.
        sum_bytes: bytes of each hidden value in a sum, before it is rounded for the wire.
    """

    hidden_size: int
    value_bytes: int
    prob_bytes: int
    sum_bytes: int


class Column(NamedTuple):
    """Values of one kind in every row.

    Attributes:
        name: "rows" for the hidden values, "probs" or "ids".
        width: number of values; None for one for each of the W experts of a token.
        value_bytes: bytes of each.
    """

    name: Literal["rows", "probs", "ids"]
    width: int | None
    value_bytes: int


class Buffer(NamedTuple):
    """Rows in memory.

    Attributes:
        number: index in `Program.buffers`.
        name: the stage that writes it.
        chunk: the chunk of its rows; None for the rows of all chunks.
        boundary: number of the chain's stages before these rows.
        repeats: how many times the rows of the boundary are held, one block after the other: once
            for each rank where an AllGather is transposed, before the blocks are summed; else 1.
        columns: of a row; none for lists of copies.
        packed: the columns share one message; else one message for each.
        release: when its memory is released.
        slot: buffers with the same slot share memory, one after the other; it is the number of the
            first of them.
        last_read: the last operation that reads it, or -1.
        series: index among the buffers of one chunk, the same for every chunk.
    """

    number: int
    name: str
    chunk: int | None
    boundary: int
    repeats: int
    columns: tuple[Column, ...]
    packed: bool
    release: Release
    slot: int
    last_read: int
    series: int


class Operation(NamedTuple):
    """One kernel launch, copy or collective of one chunk.

    Attributes:
        number: index in the order of issue.
        kind: of the operation.
        stage: name of the chain's stage, or "sum of" it for a "reduce_ranks"; for messages and
            pictures.
        position: index in the chain of the stage with which it is issued; for a "reduce_ranks" the
            stage after the one that it belongs to, see `gather`.
        chunk: the chunk of its rows.
        series: index among the operations of one chunk, the same for every chunk.
        reads: numbers of the buffers that it reads.
        writes: numbers of the buffers that it writes; its message comes first.
        scratch: numbers of the buffers that stand for memory which torch allocates inside the
            operation and frees after it. Only the memory model uses them.
        resource: the resource that it occupies.
        group: of a collective.
        stream: side stream on which it is issued, on a device.
        ranks_per_sum: of "reduce_ranks": number of adjacent ranks whose terms are summed first.
        gather: position of the AllGather to whose transpose a "reduce_ranks" belongs, or a "reduce"
            that writes an unrounded term for it.
        unrounded: buffer of this rank's own term of a sum over ranks, before it is rounded for the
            wire: a "reduce" writes it and its "reduce_ranks" reads it.
        indexed_by: position of the `Permute` by whose row indices it reads the input or writes the
            output. The first such operation of a micro-batch makes these indices, for all chunks:
            the only device work that is no operation of its own (`exchange.Indices.of_rows`).
        waits: operations that its stream, or the host, waits for before it: those it needs that no
            queue keeps in order and no earlier wait covers. Read by: executor; planner, for memory.
        after: operations that end before it starts: its waits, and the operations before it in its
            queues. Empty on CPU ranks. Read by: planner, error texts.
        launch_after: operations that end before the host launches it. Empty on a device. Read by:
            planner.
        host: the host enqueues it, runs it itself, or starts it, at the cost of a copy, and
            continues.
    """

    number: int
    kind: Kind
    stage: str
    position: int
    chunk: int
    series: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    scratch: tuple[int, ...]
    resource: Resource
    group: GroupName | None
    stream: int
    ranks_per_sum: int
    gather: int | None = None
    unrounded: int | None = None
    indexed_by: int | None = None
    waits: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    launch_after: tuple[int, ...] = ()
    host: Literal["enqueues", "runs", "starts"] = "enqueues"

    @property
    def is_collective(self) -> bool:
        """Whether it is a collective."""
        return self.kind in COLLECTIVES


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Structure of a pass: everything that does not depend on counts. Compared by identity.

    Attributes:
        pass_: the pass.
        row: the sizes of a row's values.
        policy: how it is executed.
        operations: in the order of issue, which is the same on every rank.
        buffers: by number; `INPUT` comes first.
        output: the buffer of the result.
        waits_at_end: operations that the output depends on and nothing has waited for.
        num_streams: number of side streams.
        num_at_start: number of operations before the first that trails a collective; a pass that is
            split into start and finish issues them at its start.
    """

    pass_: Pass
    row: RowFormat
    policy: Policy
    operations: tuple[Operation, ...]
    buffers: tuple[Buffer, ...]
    output: int
    waits_at_end: tuple[int, ...]
    num_streams: int
    num_at_start: int

    @cached_property
    def series(self) -> tuple[tuple[Operation, ...], ...]:
        """Operations by series, each in the order of issue."""
        series = sorted(self.operations, key=lambda operation: (operation.series, operation.number))
        return tuple(tuple(same) for _, same in groupby(series, lambda operation: operation.series))

    @cached_property
    def awaited(self) -> frozenset[int]:
        """Operations that something waits for."""
        waits = (operation.waits for operation in self.operations)
        return frozenset(number for numbers in (*waits, self.waits_at_end) for number in numbers)


class BoundProgram(NamedTuple):
    """A program with the rows of one rank and one micro-batch.

    Attributes:
        program: the structure.
        bound: the chain with its rows.
        max_experts_per_token: W; no column has that width where rows are permuted tokens.
    """

    program: Program
    bound: BoundChain
    max_experts_per_token: int

    def rows(self, buffer: Buffer) -> float:
        """Rows in a buffer; an integer at run time."""
        if buffer.chunk is None:
            bound = self.bound
            return bound.num_expert_rows if buffer.boundary else bound.num_source_rows
        rows: float = self.bound.rows_at[buffer.boundary][buffer.chunk]
        return buffer.repeats * rows

    def message_bytes(self, buffer: Buffer) -> tuple[int, ...]:
        """Bytes of a row in each of its messages."""
        sizes = [
            (self.max_experts_per_token if width is None else width, value_bytes)
            for _, width, value_bytes in buffer.columns
        ]
        if buffer.packed:
            return (offsets_bytes(sizes)[-1],)
        return tuple(num_values * value_bytes for num_values, value_bytes in sizes)

    def num_bytes(self, buffer: Buffer) -> float:
        """Bytes of a buffer."""
        return sum(self.message_bytes(buffer)) * self.rows(buffer)

    def sides(self, position: int) -> tuple[RowCounts, RowCounts]:
        """[C, P] rows that a stage sends to each peer in this pass, and that it receives."""
        stage = self.bound.stages[position]
        sides = stage.send, stage.receive
        return sides[::-1] if self.program.pass_.transpose else sides

    def splits(self, operation: Operation) -> tuple[list[int], list[int]]:
        """Rows that a collective sends to each peer, and rows that it receives from each."""
        send, receive = self.bound.stages[operation.position].splits
        if self.program.pass_.transpose:
            send, receive = receive, send
        return send[operation.chunk], receive[operation.chunk]


def offsets_bytes(columns: Sequence[tuple[int, int]]) -> list[int]:
    """Offsets of the columns in a packed row, followed by the size of the row.

    Args:
        columns: (number of values, bytes of a value) of each column.
    """
    offsets, end = [], 0
    for num_values, value_bytes in columns:
        # Rounded up to a multiple.
        end += -end % value_bytes
        offsets.append(end)
        end += num_values * value_bytes
    return [*offsets, end + -end % ALIGNMENT_BYTES]


def with_waits(
    operations: Sequence[Operation], needs: Sequence[Collection[int]], policy: Policy
) -> list[Operation]:
    """The operations with what they wait for.

    Args:
        operations: in the order of issue.
        needs: for each, the operations that have written its inputs, or that have read the slots it
            overwrites.
        policy: how the program is executed.
    """
    return (_on_host if policy == "host" else _on_streams)(operations, needs)


def _on_streams(
    operations: Sequence[Operation], needs: Sequence[Collection[int]]
) -> list[Operation]:
    """On a device: streams wait for each other's events, the host for nothing."""
    # In-order queues: the side streams, and one of each group.
    queues = [one.group if one.is_collective else one.stream for one in operations]
    # (stream, queue) -> the latest operation of the queue for which the stream has waited.
    waited: dict[tuple[int, object], int] = {}
    latest: dict[object, int] = {}
    result = []
    for number, (operation, numbers) in enumerate(zip(operations, needs, strict=True)):
        stream, waits = operation.stream, []
        # A wait for an operation covers the earlier ones of its queue.
        for need in sorted(numbers, reverse=True):
            queue = queues[need]
            if queue != stream and need > waited.get((stream, queue), -1):
                waited[stream, queue] = need
                waits.append(need)
        before = {latest[queue] for queue in (queues[number], stream) if queue in latest}
        after = tuple(sorted(before.union(waits)))
        result.append(operation._replace(waits=tuple(waits), after=after, host="enqueues"))
        latest[queues[number]] = number
    return result


def _on_host(operations: Sequence[Operation], needs: Sequence[Collection[int]]) -> list[Operation]:
    """On CPU ranks: the host waits for collectives, and runs each copy itself."""
    waited: set[int] = set()
    copied: tuple[int, ...] = ()
    result = []
    for number, (operation, numbers) in enumerate(zip(operations, needs, strict=True)):
        waits = tuple(
            need
            for need in sorted(numbers)
            if operations[need].is_collective and need not in waited
        )
        waited.update(waits)
        host: Literal["starts", "runs"] = "starts" if operation.is_collective else "runs"
        result.append(operation._replace(waits=waits, launch_after=copied + waits, host=host))
        copied = copied if operation.is_collective else (number,)
    return result
