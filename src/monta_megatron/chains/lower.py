"""Lower a bound chain to the program of one pass: one chunk's operations, stamped out for all.

Order of issue: chunk i + 1's first collective has started before chunk i's second one is waited
for, in every pass. Collectives are issued in the same order on every rank, whatever the data: a
chunk without rows is sent too.

Memory of a chunk is used again by the chunk that comes W turns later (on devices). W is the least
number with which a single launch queue is not held up earlier: whatever waits for the buffer's
readers anyway is issued before the operation that overwrites it. An operation may start later than
with memory of its own; the planner prices that.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from monta_megatron.chains.chain import BoundChain, ChainShape, Order, order_of_issue
from monta_megatron.chains.program import (
    BoundProgram,
    Buffer,
    Operation,
    Pass,
    Policy,
    Program,
    Release,
    RowFormat,
    waits_of,
)
from monta_megatron.chains.stage_operations import operations_of_chunk
from monta_megatron.chains.stages import AllGather, AllToAll, StageShape
from monta_megatron.core import GroupName


def lower(
    bound: BoundChain,
    pass_: Pass,
    row: RowFormat,
    max_experts_per_token: int,
    policy: Policy = "streams",
    order: Order = order_of_issue,
) -> BoundProgram:
    """The program of one pass; its structure is made once for all counts.

    Args:
        bound: the chain with one rank's rows.
        pass_: the pass.
        row: the sizes of a row's values.
        max_experts_per_token: W; see `BoundProgram`.
        policy: how the program is executed.
        order: (pipeline offsets of the stages, C) -> (stage, chunk) in the order of issue.
    """
    # On the host's critical path, four times per layer and micro-batch: one look-up by a short key.
    program = _structure(bound.shape, pass_, row, policy, order)
    return BoundProgram(program, bound, max_experts_per_token)


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


@lru_cache(maxsize=512)
def _structure(
    shape: ChainShape, pass_: Pass, row: RowFormat, policy: Policy, order: Order
) -> Program:
    # Step 1: what is done for a chunk, stage by stage.
    shapes, num_chunks, crossing = shape.stages, shape.num_chunks, shape.crossing_groups
    in_order = shapes[::-1] if pass_.transpose else shapes
    offsets = pipeline_offsets(in_order, crossing, policy)
    work = operations_of_chunk(shape, offsets, pass_, row, is_fused=policy == "fused")

    # Step 2: the order of the chunks. Transposed passes take them from the last to the first, the
    # small one first, unless a single collective is followed by a copy alone: that could hide
    # nothing, and after a small first chunk the large ones would be in memory with the output.
    turns_back = pass_.transpose and pipeline_offsets(shapes, crossing, "streams")[-1] > 1
    chunks = range(num_chunks)[:: -1 if turns_back else 1]

    # Step 3: the order of issue, and the operations of all chunks.
    positions = range(len(shapes))[:: -1 if pass_.transpose else 1]
    by_stage = [[one.series for one in work.operations if one.position == at] for at in positions]
    issued = [(series, turn) for at, turn in order(offsets, num_chunks) for series in by_stage[at]]
    stamped = _stamp(
        tuple(work.operations),
        tuple((one.release is Release.JOIN, one.chunk is None) for one in work.buffers),
        tuple(issued),
        chunks,
        policy,
    )

    # Step 4: the buffers of all chunks.
    buffers: list[Buffer] = []
    for at, buffer in enumerate(work.buffers):
        release, window = buffer.release, stamped.windows[at]
        if release is Release.JOIN and policy == "host":
            release = Release.LAST_READ
        elif release is Release.JOIN and window < num_chunks:
            release = Release.WINDOW
        buffers += [
            buffer._replace(
                number=stamped.buffers[at][turn],
                chunk=None if buffer.chunk is None else chunks[turn],
                release=release,
                slot=stamped.buffers[buffer.slot][turn % window],
                last_read=stamped.last_reads[at][turn],
            )
            for turn in range(1 if buffer.chunk is None else num_chunks)
        ]
    last = stamped.writes[work.current][-1]
    trailing = (operation.number for operation in stamped.operations if operation.stream > 0)
    return Program(
        pass_=pass_,
        row=row,
        policy=policy,
        operations=stamped.operations,
        buffers=tuple(buffers),
        output=stamped.buffers[work.current][0],
        waits_at_end=(last,) if last >= 0 and stamped.operations[last].is_collective else (),
        num_streams=offsets[-1] + 1,
        num_at_start=next(trailing, len(stamped.operations)),
    )


class _Stamped(NamedTuple):
    """The operations of all chunks, and the numbers of their buffers.

    Notation: M = buffers of a chunk.

    Attributes:
        operations: in the order of issue.
        buffers: [M][turn] number of the buffer, the same in every turn if it holds all chunks.
        windows: [M] after how many turns its memory is used again.
        writes: [M][turn] the operation that writes it, or -1.
        last_reads: [M][turn] the last operation that reads it, or -1.
    """

    operations: tuple[Operation, ...]
    buffers: list[Sequence[int]]
    windows: list[int]
    writes: list[list[int]]
    last_reads: list[list[int]]


# Passes that do the same share it, whatever their rows consist of.
@lru_cache(maxsize=512)
def _stamp(
    series: tuple[Operation, ...],
    buffers: tuple[tuple[bool, bool], ...],
    issued: tuple[tuple[int, int], ...],
    chunks: range,
    policy: Policy,
) -> _Stamped:
    """Stamp out the operations of one chunk.

    Args:
        series: the operations of a chunk.
        buffers: [M] whether its memory is kept until the join, and whether it holds all chunks.
        issued: (series, turn) in the order of issue.
        chunks: the chunk that comes in each turn.
        policy: how the program is executed.
    """
    num_chunks = len(chunks)
    # Step 1: numbers of operations by series and turn, and of buffers; who reads and writes them.
    numbers = [[-1] * num_chunks for _ in series]
    for number, (at, turn) in enumerate(issued):
        numbers[at][turn] = number
    numbers_of: list[Sequence[int]] = []
    num_buffers = 0
    for _, is_whole in buffers:
        last = num_buffers + (1 if is_whole else num_chunks)
        numbers_of.append([num_buffers] * num_chunks if is_whole else range(num_buffers, last))
        num_buffers = last
    readers: list[list[int]] = [[] for _ in buffers]
    writes = [[-1] * num_chunks for _ in buffers]
    for operation in series:
        for buffer in operation.reads:
            readers[buffer].append(operation.series)
        for buffer in operation.writes:
            writes[buffer] = numbers[operation.series]

    # Step 2: after how many turns memory is used again.
    def window_of(buffer: int) -> int:
        if policy == "host" or not buffers[buffer][0]:
            return num_chunks
        # The input of a collective is free once the reader of its message is issued.
        ends = [
            numbers[end]
            for reader in readers[buffer]
            for end in (
                readers[series[reader].writes[0]] if series[reader].is_collective else [reader]
            )
        ]
        return next(
            window
            for window in range(1, num_chunks + 1)
            if all(
                end[turn - window] < writes[buffer][turn]
                for end in ends
                for turn in range(window, num_chunks)
            )
        )

    windows = [window_of(buffer) for buffer in range(len(buffers))]

    # Step 3: what has to end before each operation: what writes what it reads, and what reads what
    # it overwrites.
    needs = []
    for at, turn in issued:
        ends = {writes[buffer][turn] for buffer in series[at].reads}
        for buffer in series[at].writes:
            if windows[buffer] <= turn:
                ends |= {numbers[reader][turn - windows[buffer]] for reader in readers[buffer]}
        needs.append(ends - {-1})
    waits = waits_of([series[at] for at, _ in issued], needs, policy)

    # Step 4: the operations.
    operations: list[Operation] = []
    for (at, turn), waited in zip(issued, waits, strict=True):
        operation = series[at]._replace(
            number=len(operations),
            chunk=chunks[turn],
            reads=tuple([numbers_of[buffer][turn] for buffer in series[at].reads]),
            writes=tuple([numbers_of[buffer][turn] for buffer in series[at].writes]),
            **waited._asdict(),
        )
        operations.append(operation)
    return _Stamped(
        operations=tuple(operations),
        buffers=numbers_of,
        windows=windows,
        writes=writes,
        last_reads=[numbers[of[-1]] if of else [-1] * num_chunks for of in readers],
    )
