"""Operations of every stage of a pass, for one chunk that stands for all.

    stage        forward                              transposed
    Permute      pack first, put last                 likewise, from the other end
    Duplicate    find copies (dispatch), duplicate    reduce
    AllToAll     alltoall                             alltoall
    AllGather    allgather                            alltoall of the terms, reduce_ranks

A stage that moves nothing has no operation: a group of one rank, rows that lie in order. Fused
kernels write the input of the last stage straight to its place and need no `put`; where they copy
rows per expert, the operation is `to_experts`.

`at` is the index of a stage in the order of the pass. The operations and buffers here are those of
one chunk, numbered by series; `chains.lower` makes the program's of them, and has an example.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from monta_megatron.chains.chain import ChainShape
from monta_megatron.chains.program import (
    ID_BYTES,
    INPUT,
    SUM_COLUMNS,
    Column,
    Kind,
    Pass,
    Release,
    Resource,
    RowFormat,
)
from monta_megatron.chains.stages import AllGather, AllToAll, Duplicate, Permute, StageShape
from monta_megatron.core import GroupName


class ChunkOperation(NamedTuple):
    """An operation of every chunk: an `Operation` that names buffers by series, not by number."""

    series: int
    kind: Kind
    stage: str
    position: int
    stream: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    scratch: tuple[int, ...]
    resource: Resource = "memory"
    group: GroupName | None = None
    ranks_per_sum: int = 0
    gather: int | None = None
    unrounded: int | None = None
    indexed_by: int | None = None


class ChunkBuffer(NamedTuple):
    """A `Buffer` of every chunk, or, if `is_whole`, of all; its slot is a series too."""

    series: int
    name: str
    is_whole: bool
    boundary: int
    repeats: int
    columns: tuple[Column, ...]
    packed: bool
    release: Release
    slot: int


def permute(builder: "ChunkBuilder", at: int) -> None:
    """Pack a chunk's rows out of the whole tensor first; put them in place last."""
    addressing = builder.stages[at].addressing
    if at == 0:
        # A `Duplicate` that follows is transposed: a sum, which reads each row once, in place.
        if addressing == "index" and not isinstance(builder.stages[1].stage, Duplicate):
            builder.add_operation("pack", at, [builder.current], [builder.add_message(at)])
    elif addressing == "none":
        # What was received is the output, which belongs to the caller. Of several chunks each
        # would be received into a buffer of its own, and none of them would be the output.
        assert builder.num_chunks == 1, f"{builder.num_chunks} chunks have no place in the output"
        received = builder.buffers[builder.current]
        builder.buffers[builder.current] = received._replace(release=Release.CALLER)
    elif builder.current != builder.output:
        builder.add_operation("put", at, [builder.current], [builder.add_output()])


def duplicate(builder: "ChunkBuilder", at: int) -> None:
    """Copy rows by lists of copies, which dispatch finds for all passes."""
    shape, rows = builder.stages[at], builder.current
    reads = [rows]
    if builder.pass_.ids:
        lists = builder.add_buffer(
            shape.stage.name, builder.boundary(at), columns=(), release=Release.MICRO_BATCH
        )
        kind: Kind = "find_copies" if _is_per_expert(shape) else "find_lists"
        builder.add_operation(kind, at, [rows], [lists])
        reads.append(lists)
    kind = "to_experts" if builder.is_put_at_once(at + 1) else "duplicate"
    builder.add_operation(kind, at, reads, [builder.add_message(at)])


def reduce(builder: "ChunkBuilder", at: int) -> None:
    """Sum the copies of each row; this rank's term of a sum over ranks stays unrounded."""
    name, following = builder.stages[at].stage.name, builder.stages[at + 1]
    gather = unrounded = None
    before, after = builder.boundary(at), builder.boundary(at + 1)
    writes = [builder.add_message(at)]
    if isinstance(following.stage, AllGather) and following.group_size > 1 and builder.is_rounded:
        gather = builder.position(at + 1)
        column = Column("rows", builder.row.hidden_size, builder.row.sum_bytes)
        unrounded = builder.add_buffer(f"{name}, unrounded", builder.boundary(at + 2), (column,))
        writes.append(unrounded)
    scratch = builder.add_scratch(at, before, 1, after)
    reads = [builder.current]
    is_indexed = builder.index_of(reads, writes) is not None
    if is_indexed and builder.is_rounded and not builder.is_fused:
        # Rows are gathered in their own dtype before they are converted. They share the slot of the
        # sums, which torch allocates after it has freed them.
        scratch.append(builder.add_summed(at, before, builder.row.value_bytes, slot=scratch[-1]))
    builder.add_operation(
        "reduce", at, reads, writes, scratch=scratch, gather=gather, unrounded=unrounded
    )


def all_to_all(builder: "ChunkBuilder", at: int) -> None:
    """Send rows to the ranks of the group, and receive theirs."""
    builder.add_collective("alltoall", at)


def all_gather(builder: "ChunkBuilder", at: int) -> None:
    """Gather the rows of the group."""
    builder.add_collective("allgather", at)


def reduce_scatter(builder: "ChunkBuilder", at: int) -> None:
    """Send every rank its terms of each row, and sum them; this rank's own may be unrounded.

    The sum is issued with the next stage that has operations, and not with the collective, so that
    it waits a step later.
    """
    name = f"sum of {builder.stages[at].stage.name}"
    # This rank's term, if the operation before is a `reduce` that rounds terms for the wire.
    before = builder.operations[-1] if builder.operations else None
    unrounded = before.unrounded if before is not None and before.kind == "reduce" else None
    builder.add_collective("alltoall", at, repeats=builder.stages[at].group_size)
    terms = builder.buffers[builder.current]
    reads = [terms.series] if unrounded is None else [terms.series, unrounded]
    first = ranks_per_sum(builder.etp, terms.repeats)
    reader = next(
        after for after in range(at + 1, len(builder.stages)) if not builder.is_idle(after)
    )
    if builder.is_put_at_once(reader):
        total = builder.add_output()
    else:
        total = builder.add_buffer(name, terms.boundary, terms.columns, terms.packed)
    num_sums = 1 if first == terms.repeats else 2
    scratch = builder.add_scratch(reader, terms.boundary, terms.repeats, terms.boundary, num_sums)
    builder.add_operation(
        "reduce_ranks",
        reader,
        reads,
        [total],
        scratch=scratch,
        stage=name,
        gather=builder.position(at),
        ranks_per_sum=first,
        unrounded=unrounded,
    )


# (kind of stage, transposed) -> the function that adds its operations.
OPERATIONS_OF: Mapping[tuple[type, bool], Callable[["ChunkBuilder", int], None]] = {
    (Permute, False): permute,
    (Permute, True): permute,
    (Duplicate, False): duplicate,
    (Duplicate, True): reduce,
    (AllToAll, False): all_to_all,
    (AllToAll, True): all_to_all,
    (AllGather, False): all_gather,
    (AllGather, True): reduce_scatter,
}


def ranks_per_sum(etp: int, num_ranks: int) -> int:
    """Number of adjacent ranks whose terms are summed first, before those sums are added.

    The ETP ranks of each expert, as in stock; all ranks if there is no such nesting.
    """
    return etp if 1 < etp < num_ranks and num_ranks % etp == 0 else num_ranks


class ChunkBuilder:
    """Builds the operations and buffers of one chunk, by the table above.

    Args:
        shape: of the bound chain.
        offsets: steps by which each stage of the pass trails the first one.
        pass_: the pass.
        row: the sizes of a row's values.
        is_fused: kernels put rows in place, and sum them without memory of their own.

    Attributes:
        stages: shapes of the stages in the order of the pass.
        num_chunks: C of the chain.
        pass_, row, is_fused: as given.
        etp: expert tensor parallel size.
        is_rounded: sums are wider than rows, so they are rounded for the wire.
        operations: by series.
        buffers: by series; the input comes first.
        current: buffer of the rows that the next operation reads; at the end the output.
        output: buffer of the output, once an operation puts rows in place.
    """

    def __init__(
        self,
        shape: ChainShape,
        offsets: Sequence[int],
        pass_: Pass,
        row: RowFormat,
        is_fused: bool,
    ) -> None:
        self.stages = shape.stages[::-1] if pass_.transpose else shape.stages
        self.pass_, self.row, self.etp = pass_, row, shape.etp
        self.num_chunks = shape.num_chunks
        self.is_rounded = row.sum_bytes > row.value_bytes
        self.is_fused = is_fused
        self._offsets = offsets
        self._crossing_groups = shape.crossing_groups
        # The last boundary at which a row is a token with all of its experts.
        per_expert = [
            position for position, stage in enumerate(shape.stages) if _is_per_expert(stage)
        ]
        self._last_token_boundary = max(per_expert, default=-1)
        self.operations: list[ChunkOperation] = []
        self.buffers: list[ChunkBuffer] = []
        self.output: int | None = None
        self.current = self._add_whole("input", self.boundary(0))
        assert self.current == INPUT, "the first buffer is the input"
        for at, stage in enumerate(self.stages):
            if not self.is_idle(at):
                OPERATIONS_OF[type(stage.stage), pass_.transpose](self, at)

    def is_idle(self, at: int) -> bool:
        """Whether a stage is a collective of one rank."""
        shape = self.stages[at]
        return isinstance(shape.stage, AllToAll | AllGather) and shape.group_size == 1

    def position(self, at: int) -> int:
        """Position in the chain of a stage of the pass."""
        return len(self.stages) - 1 - at if self.pass_.transpose else at

    def boundary(self, at: int) -> int:
        """Boundary before a stage of the pass: how many stages of the chain lie to its left."""
        return len(self.stages) - at if self.pass_.transpose else at

    def columns(self, boundary: int) -> tuple[Column, ...]:
        """Columns of a row: a token has values for all of its experts, a copy for one."""
        is_token = boundary <= self._last_token_boundary
        columns = [Column("rows", self.row.hidden_size, self.row.value_bytes)]
        if self.pass_.probs:
            columns.append(Column("probs", None if is_token else 1, self.row.prob_bytes))
        if self.pass_.ids and is_token:
            columns.append(Column("ids", None, ID_BYTES))
        return tuple(columns)

    def columns_share_message(self, at: int) -> bool:
        """Whether the columns of a row that stage `at` writes are packed into one message.

        One message instead of three saves latency, and costs a copy into it and one out of it. So
        columns are packed where both copies happen anyway: a stage copies rows before a collective,
        and the last stage puts them in place. Elsewhere each column is sent as it lies.
        """
        is_sent = isinstance(self.stages[at + 1].stage, AllToAll | AllGather)
        is_put = self.stages[-1].addressing != "none"
        return is_sent and is_put and len(self.columns(self.boundary(at + 1))) > 1

    def is_put_at_once(self, reader: int) -> bool:
        """Whether a fused kernel writes what stage `reader` reads straight to the output."""
        addressings = ("slice",) if self.pass_.transpose else ("slice", "index")
        is_last = reader == len(self.stages) - 1
        return self.is_fused and is_last and self.stages[reader].addressing in addressings

    def add_buffer(
        self,
        name: str,
        boundary: int,
        columns: tuple[Column, ...] | None = None,
        packed: bool = False,
        repeats: int = 1,
        release: Release = Release.JOIN,
        is_whole: bool = False,
        slot: int | None = None,
    ) -> int:
        """Add a buffer, with the columns of the boundary if none are given; returns its series."""
        series = len(self.buffers)
        buffer = ChunkBuffer(
            series=series,
            name=name,
            is_whole=is_whole,
            boundary=boundary,
            repeats=repeats,
            columns=self.columns(boundary) if columns is None else columns,
            packed=packed,
            release=release,
            slot=series if slot is None else slot,
        )
        self.buffers.append(buffer)
        return series

    def _add_whole(self, name: str, boundary: int) -> int:
        """The rows of all chunks, which belong to the caller."""
        return self.add_buffer(name, boundary, release=Release.CALLER, is_whole=True)

    def add_output(self) -> int:
        """The output of the pass, in which every chunk puts its rows."""
        self.output = self._add_whole("output", self.boundary(len(self.stages)))
        return self.output

    def add_message(self, at: int) -> int:
        """Rows that a stage copies or sums: a message for the next stage, or the output."""
        if self.is_put_at_once(at + 1):
            return self.add_output()
        name, packed = self.stages[at].stage.name, self.columns_share_message(at)
        return self.add_buffer(name, self.boundary(at + 1), packed=packed)

    def add_summed(
        self, at: int, boundary: int, value_bytes: int, repeats: int = 1, slot: int | None = None
    ) -> int:
        """Scratch memory of the columns summed at a time: all, or a block if they are converted."""
        width = self.row.hidden_size
        if self.is_rounded:
            width = min(width, SUM_COLUMNS)
        return self.add_buffer(
            f"{self.stages[at].stage.name}, summed",
            boundary,
            (Column("rows", width, value_bytes),),
            repeats=repeats,
            release=Release.LAST_READ,
            slot=slot,
        )

    def add_scratch(
        self, at: int, of_terms: int, num_terms: int, of_sums: int, num_sums: int = 1
    ) -> list[int]:
        """Scratch memory of a sum: its terms, if they are converted, and the sums.

        Args:
            at: the stage.
            of_terms: boundary of the rows that are summed.
            num_terms: how many times they are held.
            of_sums: boundary of the sums.
            num_sums: how many times they are held.
        """
        if self.is_fused:
            return []
        sums = self.add_summed(at, of_sums, self.row.sum_bytes, num_sums)
        if not self.is_rounded:
            return [sums]
        return [self.add_summed(at, of_terms, self.row.sum_bytes, num_terms), sums]

    def add_operation(
        self,
        kind: Kind,
        at: int,
        reads: Sequence[int],
        writes: Sequence[int],
        scratch: Sequence[int] = (),
        stage: str | None = None,
        **fields: Any,
    ) -> None:
        """Add an operation of a stage; the next one reads the first buffer that it writes."""
        operation = ChunkOperation(
            series=len(self.operations),
            kind=kind,
            stage=self.stages[at].stage.name if stage is None else stage,
            position=self.position(at),
            stream=self._offsets[at],
            reads=tuple(reads),
            writes=tuple(writes),
            scratch=tuple(scratch),
            indexed_by=self.index_of(reads, writes),
            **fields,
        )
        self.operations.append(operation)
        self.current = writes[0]

    def index_of(self, reads: Sequence[int], writes: Sequence[int]) -> int | None:
        """The `Permute` by whose row indices an operation reads the input or writes the output."""
        ends = [0] * (reads[0] == INPUT) + [len(self.stages) - 1] * (writes[0] == self.output)
        indexed = [self.position(at) for at in ends if self.stages[at].addressing == "index"]
        return indexed[0] if indexed else None

    def add_collective(self, kind: Kind, at: int, repeats: int = 1) -> None:
        """Add a collective, whose messages arrive as they were sent."""
        stage, sent = self.stages[at].stage, self.buffers[self.current]
        assert isinstance(stage, AllToAll | AllGather), f"{stage.name} is no collective"
        arrived = self.add_buffer(
            stage.name, self.boundary(at + 1), sent.columns, sent.packed, repeats
        )
        resource: Resource = "inter" if stage.group in self._crossing_groups else "intra"
        self.add_operation(
            kind, at, [self.current], [arrived], resource=resource, group=stage.group
        )


def _is_per_expert(shape: StageShape) -> bool:
    return isinstance(shape.stage, Duplicate) and shape.stage.per == "expert"
