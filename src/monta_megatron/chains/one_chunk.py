"""Operations and buffers of one chunk of a pass, which `lower` stamps out.

    stage        forward                              transposed
    Permute      pack first, put last                 likewise, from the other end
    Duplicate    find copies (dispatch), duplicate    reduce
    AllToAll     alltoall                             alltoall
    AllGather    allgather                            alltoall of parts; reduce parts, before what
                                                      reads them

A stage that moves nothing has no operation: a group of one rank, rows that lie in order. A fused
kernel that copies or sums rows last writes them where `put` would: "to_experts", for each expert.
The columns of a row share a message where a stage copies rows anyway and a collective comes next;
elsewhere they are sent as they lie, column by column.
"""

from typing import NamedTuple

from monta_megatron.chains.chain import Rows
from monta_megatron.chains.program import (
    ID_BYTES,
    SUM_COLUMNS,
    Buffer,
    Column,
    Kind,
    Operation,
    Pass,
    Release,
    Resource,
    RowFormat,
)
from monta_megatron.chains.stages import AllGather, AllToAll, Duplicate, StageShape
from monta_megatron.core import GroupName


def parts_per_sum(etp: int, num_parts: int) -> int:
    """Number of adjacent parts of a row that are summed first, before those sums are added up.

    The ETP parts of each expert's output, as in stock; all parts if there is no such nesting.
    """
    return etp if 1 < etp < num_parts and num_parts % etp == 0 else num_parts


class OneChunk(NamedTuple):
    """Operations of one chunk, which stands for all.

    Attributes:
        operations: in order. `series` is their place here, as of buffers; `reads` and `writes` are
            places in `buffers`. Fields that depend on the chunk, or on the others, are
            left open.
        buffers: the input comes first. `chunk` is None for those that hold the rows of all chunks;
            `slot` is the place here of the buffer whose memory is used.
        output: the buffer in which the rows are at the end.
    """

    operations: list[Operation]
    buffers: list[Buffer]
    output: int


def one_chunk(
    shapes: tuple[StageShape, ...],
    offsets: list[int],
    rows: Rows,
    etp: int,
    crossing: frozenset[GroupName],
    pass_: Pass,
    row: RowFormat,
    packs: bool,
    is_fused: bool,
) -> OneChunk:
    """Go through the stages of a pass.

    Args:
        shapes: the stages in the order of the pass.
        offsets: how many steps each of them trails the first.
        rows: what a row of the chain is.
        etp: expert tensor parallel size.
        crossing: the groups that span nodes.
        pass_: the pass.
        row: the sizes of a row's values.
        packs: columns may share a message.
        is_fused: kernels put rows into place, and sum them without memory of their own.
    """
    num_stages, back = len(shapes), pass_.transpose
    hidden = Column("rows", row.hidden_size, row.value_bytes)
    columns = _columns(rows, shapes[::-1] if back else shapes, pass_, row, hidden)
    # Sums are in another dtype than rows: so many columns at a time.
    is_rounded = row.sum_bytes > row.value_bytes
    sum_width = min(row.hidden_size, SUM_COLUMNS) if is_rounded else row.hidden_size
    operations: list[Operation] = []
    buffers: list[Buffer] = []

    def boundary_after(at: int) -> int:
        return num_stages - 1 - at if back else at + 1

    def buffer(
        name: str,
        boundary: int,
        of: tuple[Column, ...] | None = None,
        packed: bool = False,
        copies: int = 1,
        release: Release = "join",
        chunk: int | None = 0,
        slot: int | None = None,
    ) -> int:
        number, of = len(buffers), columns[boundary] if of is None else of
        slot = number if slot is None else slot
        made = Buffer(
            number, name, chunk, boundary, copies, of, packed, release, slot, -1, series=number
        )
        buffers.append(made)
        return number

    def add(
        kind: Kind,
        at: int,
        reads: list[int],
        writes: list[int],
        stage: str,
        resource: Resource = "memory",
        group: GroupName | None = None,
        parts_per_sum: int = 0,
    ) -> int:
        operation = Operation(
            number=-1,
            kind=kind,
            stage=stage,
            position=num_stages - 1 - at if back else at,
            chunk=0,
            series=len(operations),
            reads=tuple(reads),
            writes=tuple(writes),
            resource=resource,
            group=group,
            stream=offsets[at],
            waits=(),
            after=(),
            launch_after=(),
            host="enqueues",
            parts_per_sum=parts_per_sum,
        )
        operations.append(operation)
        return writes[0]

    def puts(at: int) -> bool:
        """Whether what this stage writes is put into place at once."""
        placements = ("slice",) if back else ("slice", "index")
        return is_fused and at + 2 == num_stages and shapes[-1].placement in placements

    def whole(name: str, boundary: int) -> int:
        """The rows of all chunks, which are the caller's."""
        return buffer(name, boundary, release="caller", chunk=None)

    def output() -> int:
        return whole("output", boundary_after(num_stages - 1))

    def message(at: int) -> int:
        """Message of a stage that copies rows anyway: packed before a collective."""
        if puts(at):
            return output()
        boundary = boundary_after(at)
        is_sent = isinstance(shapes[at + 1].stage, AllToAll | AllGather)
        packed = packs and is_sent and len(columns[boundary]) > 1
        return buffer(shapes[at].stage.name, boundary, packed=packed)

    def is_narrow(number: int) -> bool:
        """Whether the rows of a buffer have another dtype than sums."""
        return buffers[number].columns[0].value_bytes < row.sum_bytes

    def summed(
        at: int, boundary: int, value_bytes: int, copies: int = 1, slot: int | None = None
    ) -> int:
        """As many columns as are summed at a time."""
        width = sum_width if is_narrow(current) else row.hidden_size
        name, of = f"{shapes[at].stage.name}, summed", (Column("rows", width, value_bytes),)
        return buffer(name, boundary, of, copies=copies, release="last read", slot=slot)

    def scratch(at: int, boundary: int, copies: int, of_sums: int, num_sums: int = 1) -> list[int]:
        """Buffers held while a sum is made: its terms, if they are converted, and the sums."""
        if is_fused:
            return []
        sums = summed(at, of_sums, row.sum_bytes, num_sums)
        if not is_narrow(current):
            return [sums]
        return [summed(at, boundary, row.sum_bytes, copies), sums]

    # The buffer in which the rows are.
    current = whole("input", boundary_after(-1))
    # This rank's own part of a sum over ranks, before it was rounded for the wire.
    unrounded: list[int] = []
    # The transposed AllGather whose parts lie there, not yet summed.
    transposed: AllGather | None = None
    for at, shape in enumerate(shapes):
        stage, name, boundary = shape.stage, shape.stage.name, boundary_after(at)
        if isinstance(stage, AllToAll | AllGather) and shape.group_size == 1:
            continue
        if transposed is not None:
            # Step 1: sum the parts that lie there. The sums of adjacent ones are added one by one.
            parts, num_parts = buffers[current], buffers[current].copies
            first = parts_per_sum(etp, num_parts)
            sum_name = f"sum of {transposed.name}"
            of, packed = columns[parts.boundary], parts.packed
            total = output() if puts(at - 1) else buffer(sum_name, parts.boundary, of, packed)
            num_sums = 1 if first == num_parts else 2
            held = scratch(at, parts.boundary, num_parts, parts.boundary, num_sums)
            reads, writes = [current, *unrounded], [total, *held]
            current = add(
                "reduce_parts", at, reads, writes, sum_name, "memory", transposed.group, first
            )
            unrounded, transposed = [], None

        # Step 2: what the stage does.
        if isinstance(stage, AllToAll | AllGather):
            transposed = stage if back and isinstance(stage, AllGather) else None
            is_gather = isinstance(stage, AllGather) and not back
            copies, before = 1 if transposed is None else shape.group_size, buffers[current]
            arrived = buffer(name, boundary, before.columns, before.packed, copies)
            resource: Resource = "inter" if stage.group in crossing else "intra"
            kind: Kind = "allgather" if is_gather else "alltoall"
            current = add(kind, at, [current], [arrived], name, resource, stage.group)
        elif isinstance(stage, Duplicate) and back:
            following, group, writes = shapes[at + 1], None, [message(at)]
            rounds = is_narrow(writes[0])
            if isinstance(following.stage, AllGather) and following.group_size > 1 and rounds:
                group = following.stage.group
                sums = Column("rows", row.hidden_size, row.sum_bytes)
                unrounded = [buffer(f"{name}, unrounded", boundary - 1, (sums,))]
            before_it = boundary_after(at - 1)
            writes += [*unrounded, *scratch(at, before_it, 1, boundary)]
            if is_rounded and not is_fused and current == 0 and shapes[0].placement == "index":
                # Rows read one by one are there in their own dtype before they are converted.
                writes.append(summed(at, before_it, row.value_bytes, slot=writes[-1]))
            current = add("reduce", at, [current], writes, name, group=group)
        elif isinstance(stage, Duplicate):
            reads = [current]
            if pass_.ids:
                reads.append(buffer(name, at, (), release="exchange"))
                kind = "find_copies" if _is_per_expert(shape) else "find_lists"
                add(kind, at, [current], reads[1:], name)
            kind = "to_experts" if puts(at) else "duplicate"
            current = add(kind, at, reads, [message(at)], name)
        elif at == 0:
            # A sum reads each row once, so it can read it in place.
            if shape.placement == "index" and not isinstance(shapes[1].stage, Duplicate):
                current = add("pack", at, [current], [message(at)], name)
        elif shape.placement == "none":
            buffers[current] = buffers[current]._replace(release="caller")
        elif buffers[current].name != "output":
            current = add("put", at, [current], [output()], name)
    return OneChunk(operations, buffers, current)


def _columns(
    rows: Rows, shapes: tuple[StageShape, ...], pass_: Pass, row: RowFormat, hidden: Column
) -> list[tuple[Column, ...]]:
    """[N + 1] columns of a row at each boundary, with its hidden values as they travel.

    Before "copy per expert" a token has its experts' ids and probabilities, after it one of them.
    """
    last = -1
    if rows == "tokens":
        last = max(at for at, shape in enumerate(shapes) if _is_per_expert(shape))
    ids = (Column("ids", None, ID_BYTES),) if pass_.ids else ()
    of_token, of_copy = (
        (hidden, *((Column("probs", width, row.prob_bytes),) if pass_.probs else ()))
        for width in (None, 1)
    )
    return [of_token + ids] * (last + 1) + [of_copy] * (len(shapes) - last)


def _is_per_expert(shape: StageShape) -> bool:
    return isinstance(shape.stage, Duplicate) and shape.stage.part == "expert"
