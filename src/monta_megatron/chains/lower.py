"""From a bound chain to the program of one pass: the only place that knows what a stage does.

    stage        forward                              transposed
    Place        pack first, put last                 likewise, from the other end
    Replicate    find copies (dispatch), duplicate    reduce
    AllToAll     alltoall                             alltoall
    AllGather    allgather                            alltoall of parts; reduce parts, before what
                                                      reads them

A stage that moves nothing has no operation: a group of one rank, a `Place` whose rows lie in order.
The columns of a row share a message where a stage copies rows anyway and a collective comes next;
elsewhere they are sent as they lie, column by column.

Order of issue: chunk i + 1's first collective has started before chunk i's second one is waited
for, in every pass. Collectives are issued in the same order on every rank, whatever the data: a
chunk without rows is sent too.

Memory of a chunk is used again by the chunk that comes W turns later ("streams"). W is the least
number with which a single launch queue is not held up earlier: whatever waits for the buffer's
readers anyway is issued before the operation that overwrites it. An operation may start later than
with memory of its own; the planner prices that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from monta_megatron.chains.chain import BoundChain, Order, Rows, order_of_issue
from monta_megatron.chains.program import (
    COLLECTIVES,
    ID_BYTES,
    SUM_COLUMNS,
    BoundProgram,
    Buffer,
    Column,
    Kind,
    Operation,
    Pass,
    Policy,
    Program,
    Release,
    Resource,
    RowFormat,
)
from monta_megatron.chains.stages import AllGather, AllToAll, Place, Replicate, StageShape
from monta_megatron.topology.layout import GroupName


def lower(
    bound: BoundChain,
    walked: Pass,
    row: RowFormat,
    list_width: int,
    policy: Policy = "streams",
    order: Order = order_of_issue,
) -> BoundProgram:
    """The program of one pass; its structure is made once for all counts.

    Args:
        bound: the chain with one rank's rows.
        walked: the pass.
        row: the sizes of a row's values.
        list_width: W; see `BoundProgram`.
        policy: how the program is executed.
        order: (pipeline offsets of the stages, C) -> (stage, chunk) in the order of issue.
    """
    layout = bound.layout
    program = _structure(
        bound.chain.rows,
        order,
        bound.shapes,
        bound.num_chunks,
        layout.etp,
        layout.crossing_groups,
        walked,
        row,
        policy,
    )
    return BoundProgram(program=program, bound=bound, list_width=list_width)


def pipeline_offsets(
    shapes: Sequence[StageShape], crossing: frozenset[GroupName], policy: Policy
) -> list[int]:
    """[N] how many steps each stage of a pass trails the first one.

    One step for every collective before it, so that each collective has two chunks under way. A
    copy needs no step of its own, because it runs together with the stage after it; nor does a
    group of one rank, where nothing moves.

    Where the host itself moves what stays on a node, it can do nothing else meanwhile, so nothing
    trails a collective inside a node: a chunk that waited there would only reach the network, or
    its place, later. If no collective leaves its node, all of them are trailed: ranks that are not
    equally far along then wait less for each other.

    Args:
        shapes: the stages in the order of the pass.
        crossing: the groups that span nodes.
        policy: how the program is executed.
    """
    groups = [
        shape.stage.group
        if isinstance(shape.stage, AllToAll | AllGather) and shape.group_size > 1
        else None
        for shape in shapes
    ]
    trailed = set(groups) - {None}
    if policy == "host":
        trailed = trailed & crossing or trailed
    return [0, *accumulate(int(group in trailed) for group in groups[:-1])]


def parts_per_sum(etp: int, num_parts: int) -> int:
    """How many adjacent parts of a row are summed first, before those sums are added up.

    The ETP parts of each expert's output, as in stock; all parts if there is no such nesting.
    """
    return etp if 1 < etp < num_parts and num_parts % etp == 0 else num_parts


@lru_cache(maxsize=4096)
def _structure(
    rows: Rows,
    order: Order,
    shapes: tuple[StageShape, ...],
    num_chunks: int,
    etp: int,
    crossing: frozenset[GroupName],
    walked: Pass,
    row: RowFormat,
    policy: Policy,
) -> Program:
    in_order = shapes[::-1] if walked.transpose else shapes
    offsets = pipeline_offsets(in_order, crossing, policy)

    # Step 1: what is done for a chunk, stage by stage.
    packs = num_chunks > 1 or rows == "tokens"
    work = _Work(in_order, _columns(rows, shapes, walked, row), etp, crossing, walked, row, packs)
    for at in range(len(shapes)):
        work.add_stage(at)

    # Step 2: the order of issue. Transposed passes take the chunks from the last to the first, the
    # small one first, unless a single collective is followed by a copy alone: that could hide
    # nothing, and after a small first chunk the large ones would be in memory with the output.
    turns_back = walked.transpose and pipeline_offsets(shapes, crossing, "streams")[-1] > 1
    chunks = range(num_chunks)[:: -1 if turns_back else 1]
    issued = [
        (series, turn)
        for at, turn in order(offsets, num_chunks)
        for series, each in enumerate(work.series)
        if each.at == at
    ]
    number_of = {key: number for number, key in enumerate(issued)}

    # Step 3: buffers, and after how many turns their memory is used again.
    def window_of(memory: _Memory) -> int:
        ends = work.ends_of(memory)
        return next(
            window
            for window in range(1, num_chunks + 1)
            if all(
                number_of[end, turn - window] < number_of[memory.writer, turn]
                for turn in range(window, num_chunks)
                for end in ends
            )
        )

    windows = [
        window_of(memory) if memory.release == "join" and policy == "streams" else num_chunks
        for memory in work.memory
    ]
    places = [
        (memory, turn)
        for memory, each in enumerate(work.memory)
        for turn in range(1 if each.is_whole else num_chunks)
    ]
    place_of = {key: number for number, key in enumerate(places)}

    def buffer(number: int, memory: int, turn: int) -> Buffer:
        each, window = work.memory[memory], windows[memory]
        release = each.release
        if release == "join" and policy == "host":
            release = "last read"
        elif release == "join" and window < num_chunks:
            release = "window"
        return Buffer(
            number=number,
            name=each.name,
            chunk=None if each.is_whole else chunks[turn],
            boundary=each.boundary,
            copies=each.copies,
            columns=each.columns,
            packed=each.packed,
            release=release,
            slot=place_of[memory if each.shares is None else each.shares, turn % window],
            last_read=number_of[each.readers[-1], turn] if each.readers else -1,
        )

    # Step 4: operations, and what has to end before each: what writes what it reads, and what reads
    # what it overwrites.
    operations, needs = [], []
    for number, (series, turn) in enumerate(issued):
        each = work.series[series]
        operations.append(
            Operation(
                number=number,
                kind=each.kind,
                stage=each.stage,
                position=len(shapes) - 1 - each.at if walked.transpose else each.at,
                chunk=chunks[turn],
                series=series,
                reads=tuple(place_of[work.key(memory, turn)] for memory in each.reads),
                writes=tuple(place_of[work.key(memory, turn)] for memory in each.writes),
                resource=each.resource,
                group=each.group,
                stream=offsets[each.at],
                waits=(),
                after=(),
                launch_after=(),
                host="enqueues",
                parts_per_sum=each.parts_per_sum,
            )
        )
        writers = {(work.memory[memory].writer, turn) for memory in each.reads}
        readers = {
            (reader, turn - windows[memory])
            for memory in each.writes
            if work.memory[memory].release == "join"
            for reader in work.memory[memory].readers
        }
        needs.append({number_of[key] for key in writers | readers if key in number_of})
    last = number_of.get((work.memory[work.at].writer, num_chunks - 1))
    return Program(
        walked=walked,
        row=row,
        operations=tuple(order_operations(operations, needs, policy)),
        buffers=tuple(buffer(number, *key) for number, key in enumerate(places)),
        output=place_of[work.key(work.at, 0)],
        waits_at_end=() if last is None or not _is_collective(operations[last]) else (last,),
        num_streams=offsets[-1] + 1,
    )


@dataclass(kw_only=True, slots=True)
class _Memory:
    """A buffer for every chunk, or one for all; see `Buffer`.

    Attributes:
        is_whole: it holds the rows of all chunks.
        shares: another one whose memory it uses, at another time; None for memory of its own.
        writer: the series that writes it; -1 for the input.
        readers: the series that read it, in order.
    """

    name: str
    boundary: int
    columns: tuple[Column, ...]
    packed: bool = False
    copies: int = 1
    release: Release = "join"
    is_whole: bool = False
    shares: int | None = None
    writer: int = -1
    readers: list[int] = field(default_factory=list)


class _Series(NamedTuple):
    """An operation for every chunk; see `Operation`.

    Attributes:
        at: the stage that does it, in the order of the pass.
    """

    kind: Kind
    stage: str
    at: int
    reads: list[int]
    writes: list[int]
    resource: Resource
    group: GroupName | None
    parts_per_sum: int


class _Work:
    """What is done for a chunk, and where its rows are meanwhile.

    Attributes:
        series: the operations, in order.
        memory: the buffers; the input comes first.
        at: the buffer in which the rows are.
    """

    def __init__(
        self,
        shapes: tuple[StageShape, ...],
        columns: list[tuple[Column, ...]],
        etp: int,
        crossing: frozenset[GroupName],
        walked: Pass,
        row: RowFormat,
        packs: bool,
    ) -> None:
        self.series: list[_Series] = []
        self.memory: list[_Memory] = []
        self._shapes, self._columns, self._etp, self._crossing = shapes, columns, etp, crossing
        self._walked, self._row, self._packs = walked, row, packs
        self.at = self._buffer("input", self._boundary(-1), release="caller", is_whole=True)
        # This rank's own part of a sum over ranks, before it was rounded for the wire.
        self._own: list[int] = []
        # The transposed AllGather whose parts lie there, not yet summed.
        self._gathered: StageShape | None = None

    def add_stage(self, at: int) -> None:
        """Add what stage `at` of the pass does."""
        shape = self._shapes[at]
        if isinstance(shape.stage, Place):
            self._take(at, shape) if at == 0 else self._put(at, shape)
        elif isinstance(shape.stage, Replicate):
            self._sum_parts(at)
            self._reduce(at) if self._walked.transpose else self._duplicate(at, shape)
        elif shape.group_size > 1:
            self._sum_parts(at)
            self._exchange(at, shape, shape.stage)

    def key(self, memory: int, turn: int) -> tuple[int, int]:
        """A buffer: of the chunk that comes in this turn, or of all."""
        return memory, 0 if self.memory[memory].is_whole else turn

    def ends_of(self, memory: _Memory) -> list[int]:
        """The series once whose operations are issued, a buffer's readers have been waited for."""
        ends = []
        for reader in memory.readers:
            series = self.series[reader]
            is_started = series.kind in COLLECTIVES
            ends += self.memory[series.writes[0]].readers if is_started else [reader]
        return ends

    def _take(self, at: int, shape: StageShape) -> None:
        # A sum reads each row once, so it can read it in place.
        if shape.placement == "index" and not isinstance(self._shapes[1].stage, Replicate):
            self._add("pack", at, [self.at], [self._message(at)])

    def _put(self, at: int, shape: StageShape) -> None:
        self._sum_parts(at)
        if shape.placement == "none":
            self.memory[self.at].release = "caller"
        else:
            output = self._buffer("output", self._boundary(at), release="caller", is_whole=True)
            self._add("put", at, [self.at], [output])

    def _duplicate(self, at: int, shape: StageShape) -> None:
        reads = [self.at]
        if self._walked.ids:
            found = self._buffer(shape.stage.name, at, (), release="exchange")
            kind: Kind = "find_copies" if _is_per_expert(shape) else "find_lists"
            self._add(kind, at, reads, [found], moves=False)
            reads = [self.at, found]
        self._add("duplicate", at, reads, [self._message(at)])

    def _reduce(self, at: int) -> None:
        behind, boundary, reads = self._shapes[at + 1], self._boundary(at), [self.at]
        writes, group = [self._message(at)], None
        if isinstance(behind.stage, AllGather) and behind.group_size > 1 and self._is_rounded:
            group = behind.stage.group
            columns = (Column("rows", self._row.hidden_size, self._row.sum_bytes),)
            name = f"{self._shapes[at].stage.name}, unrounded"
            self._own = [self._buffer(name, boundary - 1, columns)]
        writes += [*self._own, *self._scratch(at, self._boundary(at - 1), 1, boundary)]
        if self._is_rounded and self.at == 0 and self._shapes[0].placement == "index":
            # What is read row by row is there in its own dtype before it is converted.
            writes.append(self._sum_buffer(at, self._boundary(at - 1), self._row.value_bytes))
            self.memory[writes[-1]].shares = writes[-2]
        self._add("reduce", at, reads, writes, group=group)

    def _exchange(self, at: int, shape: StageShape, stage: AllToAll | AllGather) -> None:
        is_gather = isinstance(stage, AllGather)
        is_parts = is_gather and self._walked.transpose
        before = self.memory[self.at]
        message = self._buffer(
            stage.name,
            self._boundary(at),
            before.columns,
            packed=before.packed,
            copies=shape.group_size if is_parts else 1,
        )
        kind: Kind = "allgather" if is_gather and not is_parts else "alltoall"
        resource: Resource = "inter" if stage.group in self._crossing else "intra"
        self._add(kind, at, [self.at], [message], resource=resource, group=stage.group)
        self._gathered = shape if is_parts else None

    def _sum_parts(self, at: int) -> None:
        """Sum the parts of a transposed AllGather, before stage `at` reads them."""
        if self._gathered is None:
            return
        stage, num_parts = self._gathered.stage, self._gathered.group_size
        assert isinstance(stage, AllGather)
        parts, first = self.memory[self.at], parts_per_sum(self._etp, num_parts)
        name, reads = f"sum of {stage.name}", [self.at, *self._own]
        total = self._buffer(name, parts.boundary, parts.columns, packed=parts.packed)
        # The sums of adjacent parts are added up one by one.
        num_sums = 1 if first == num_parts else 2
        scratch = self._scratch(at, parts.boundary, num_parts, parts.boundary, num_sums)
        self._add(
            "reduce_parts",
            at,
            reads,
            [total, *scratch],
            stage=name,
            group=stage.group,
            parts_per_sum=first,
        )
        self._gathered, self._own = None, []

    def _boundary(self, at: int) -> int:
        """The boundary behind stage `at`."""
        return len(self._shapes) - 1 - at if self._walked.transpose else at + 1

    def _message(self, at: int) -> int:
        """What a stage writes that copies rows anyway: packed, if a collective comes next."""
        boundary = self._boundary(at)
        to_collective = isinstance(self._shapes[at + 1].stage, AllToAll | AllGather)
        packed = self._packs and to_collective and len(self._columns[boundary]) > 1
        return self._buffer(self._shapes[at].stage.name, boundary, packed=packed)

    @property
    def _is_rounded(self) -> bool:
        """Whether sums are in another dtype than rows."""
        return self._row.sum_bytes > self._row.value_bytes

    def _scratch(
        self, at: int, boundary: int, copies: int, sum_boundary: int, num_sums: int = 1
    ) -> list[int]:
        """What a sum holds while it is made: its terms, if they are converted, and the sums."""
        sums = self._sum_buffer(at, sum_boundary, self._row.sum_bytes, num_sums)
        if not self._is_rounded:
            return [sums]
        return [self._sum_buffer(at, boundary, self._row.sum_bytes, copies), sums]

    def _sum_buffer(self, at: int, boundary: int, value_bytes: int, copies: int = 1) -> int:
        """As many columns as are summed at a time."""
        width = self._row.hidden_size
        width = min(width, SUM_COLUMNS) if self._is_rounded else width
        columns = (Column("rows", width, value_bytes),)
        name = f"{self._shapes[at].stage.name}, summed"
        return self._buffer(name, boundary, columns, copies=copies, release="last read")

    def _buffer(
        self,
        name: str,
        boundary: int,
        columns: tuple[Column, ...] | None = None,
        packed: bool = False,
        copies: int = 1,
        release: Release = "join",
        is_whole: bool = False,
    ) -> int:
        self.memory.append(
            _Memory(
                name=name,
                boundary=boundary,
                columns=self._columns[boundary] if columns is None else columns,
                packed=packed,
                copies=copies,
                release=release,
                is_whole=is_whole,
            )
        )
        return len(self.memory) - 1

    def _add(
        self,
        kind: Kind,
        at: int,
        reads: list[int],
        writes: list[int],
        stage: str | None = None,
        resource: Resource = "memory",
        group: GroupName | None = None,
        parts_per_sum: int = 0,
        moves: bool = True,
    ) -> None:
        name = self._shapes[at].stage.name if stage is None else stage
        for memory in reads:
            self.memory[memory].readers.append(len(self.series))
        for memory in writes:
            self.memory[memory].writer = len(self.series)
        self.series.append(_Series(kind, name, at, reads, writes, resource, group, parts_per_sum))
        if moves:
            self.at = writes[0]


def _columns(
    rows: Rows, shapes: tuple[StageShape, ...], walked: Pass, row: RowFormat
) -> list[tuple[Column, ...]]:
    """[N + 1] what a row consists of at each boundary.

    Before "copy per expert" a token has a list of experts, behind it one probability.
    """
    lists_until = -1
    if rows == "tokens":
        lists_until = max(at for at, shape in enumerate(shapes) if _is_per_expert(shape))
    found = []
    for boundary in range(len(shapes) + 1):
        has_list = boundary <= lists_until
        columns = [Column("rows", row.hidden_size, row.value_bytes)]
        if walked.probs:
            columns.append(Column("probs", None if has_list else 1, row.prob_bytes))
        if walked.ids and has_list:
            columns.append(Column("ids", None, ID_BYTES))
        found.append(tuple(columns))
    return found


def _is_per_expert(shape: StageShape) -> bool:
    return isinstance(shape.stage, Replicate) and shape.stage.part == "expert"


def _is_collective(operation: Operation) -> bool:
    return operation.kind in COLLECTIVES


def _queue(operation: Operation) -> GroupName | int | None:
    """What runs its operations in order: a side stream, or a group's own."""
    return operation.group if operation.kind in COLLECTIVES else operation.stream


def order_operations(
    operations: Sequence[Operation], needs: Sequence[Iterable[int]], policy: Policy
) -> list[Operation]:
    """Say what every operation waits for.

    Args:
        operations: in the order of issue.
        needs: for each, the operations that have to end before it: they have written what it reads,
            or read what it overwrites.
        policy: how the program is executed.
    """
    order = _order_on_host if policy == "host" else _order_on_streams
    return order(operations, [sorted(numbers) for numbers in needs])


def _order_on_streams(
    operations: Sequence[Operation], needs: Sequence[Sequence[int]]
) -> list[Operation]:
    """On a device: streams wait for each other, the host for nothing."""
    # What each stream has already waited for: by queue, the latest operation.
    waited: dict[tuple[int, GroupName | int | None], int] = {}
    latest: dict[GroupName | int | None, int] = {}
    found = []
    for operation, numbers in zip(operations, needs, strict=True):
        waits = []
        # A wait for the latest operation of a queue is one for all before it.
        for number in reversed(numbers):
            queue = _queue(operations[number])
            if queue != operation.stream and number > waited.get((operation.stream, queue), -1):
                waited[operation.stream, queue] = number
                waits.append(number)
        before = {latest[each] for each in (_queue(operation), operation.stream) if each in latest}
        found.append(operation._replace(waits=tuple(waits), after=tuple(sorted({*waits, *before}))))
        latest[_queue(operation)] = operation.number
    return found


def _order_on_host(
    operations: Sequence[Operation], needs: Sequence[Sequence[int]]
) -> list[Operation]:
    """On CPU ranks: the host waits for collectives, and for each copy that it makes itself."""
    waited: set[int] = set()
    copied: int | None = None
    found = []
    for operation, numbers in zip(operations, needs, strict=True):
        waits = [
            number
            for number in numbers
            if _is_collective(operations[number]) and number not in waited
        ]
        waited.update(waits)
        before = waits if copied is None else [copied, *waits]
        is_collective = _is_collective(operation)
        found.append(
            operation._replace(
                waits=tuple(waits),
                launch_after=tuple(before),
                host="starts" if is_collective else "runs",
            )
        )
        copied = copied if is_collective else operation.number
    return found
