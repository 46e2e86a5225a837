"""Lower a bound chain to the program of one pass: a loop over chunks, unrolled and pipelined.

Order of issue: chunk i + 1's first collective has started before chunk i's second one is waited
for, in every pass. Collectives are issued in the same order on every rank, whatever the data: a
chunk without rows is sent too.

Chunk buffers form a ring of W slots; W is the smallest ring that adds no wait to the launch queue:
the readers of a slot are waited for before the operation that overwrites it is issued. On the
device that operation may still start later than with a buffer of its own; the planner prices that.
On CPU ranks there is no ring, and a buffer is released after its last read.

Notation: C = number of chunks, N = stages of the chain, M = buffers of one chunk. Iteration i of
the loop works on the i-th chunk in the order of the pass.
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
    """The program of one pass; its structure is built once and cached for all counts.

    Args:
        bound: the chain with one rank's rows.
        pass_: the pass.
        row: the sizes of a row's values.
        max_experts_per_token: W; see `BoundProgram`.
        policy: how the program is executed.
        order: (pipeline offsets of the stages, C) -> (stage, iteration) in the order of issue.
    """
    # On the host's critical path, four times per layer and micro-batch: one lookup with a key that
    # is cheap to hash.
    program = _structure(bound.shape, pass_, row, policy, order)
    return BoundProgram(program, bound, max_experts_per_token)


def pipeline_offsets(
    shapes: Sequence[StageShape], crossing: frozenset[GroupName], policy: Policy
) -> list[int]:
    """[N] pipeline steps by which each stage of a pass trails the first one.

    One step for every collective before it, so that each collective has two chunks in flight. A
    copy adds no step, because it runs together with the stage after it; nor does a group of one
    rank, which has no operation.

    On CPU ranks the host itself copies the messages inside a node and cannot do anything else
    meanwhile, so only collectives between nodes add a step: a chunk that waited for an intra-node
    one would only be sent, or put in place, later. If no collective crosses nodes, all of them add
    a step, which hides skew between the ranks.

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
    num_chunks, num_stages = shape.num_chunks, len(shape.stages)
    # Step 1: operations and buffers of one chunk, stage by stage.
    stages = shape.stages[::-1] if pass_.transpose else shape.stages
    offsets = pipeline_offsets(stages, shape.crossing_groups, policy)
    chunk = operations_of_chunk(shape, offsets, pass_, row, is_fused=policy == "fused")

    # Step 2: the order of the chunks. Transposed passes go from the last to the first, the small
    # one first, unless a single collective is followed by copies alone: they could hide nothing,
    # and after a small first chunk the large ones would be in memory with the output.
    forward_offsets = pipeline_offsets(shape.stages, shape.crossing_groups, "streams")
    is_reversed = pass_.transpose and forward_offsets[-1] > 1
    chunks = range(num_chunks)[:: -1 if is_reversed else 1]

    # Step 3: the order of issue, and with it the operations of all chunks.
    positions = range(num_stages)[:: -1 if pass_.transpose else 1]
    by_stage = [[one.series for one in chunk.operations if one.position == at] for at in positions]
    loop = _unroll(
        tuple(chunk.operations),
        tuple([one.chunk is None for one in chunk.buffers]),
        tuple([one.release is Release.JOIN and policy != "host" for one in chunk.buffers]),
        tuple([(one, i) for at, i in order(offsets, num_chunks) for one in by_stage[at]]),
        chunks,
        policy,
    )

    # Step 4: the buffers of all chunks.
    buffers: list[Buffer] = []
    for at, buffer in enumerate(chunk.buffers):
        release, ring_size = buffer.release, loop.ring_sizes[at]
        if release is Release.JOIN and policy == "host":
            release = Release.LAST_READ
        elif release is Release.JOIN and ring_size < num_chunks:
            release = Release.WINDOW
        buffers += [
            buffer._replace(
                number=loop.buffers[at][i],
                chunk=None if buffer.chunk is None else chunks[i],
                release=release,
                slot=loop.buffers[buffer.slot][i % ring_size],
                last_read=loop.last_reads[at][i],
            )
            for i in range(1 if buffer.chunk is None else num_chunks)
        ]
    last = loop.writes[chunk.current][-1]
    trailing = (operation.number for operation in loop.operations if operation.stream > 0)
    return Program(
        pass_=pass_,
        row=row,
        policy=policy,
        operations=loop.operations,
        buffers=tuple(buffers),
        output=loop.buffers[chunk.current][0],
        waits_at_end=(last,) if last >= 0 and loop.operations[last].is_collective else (),
        num_streams=offsets[-1] + 1,
        num_at_start=next(trailing, len(loop.operations)),
    )


class _Unrolled(NamedTuple):
    """Operations of all chunks.

    Attributes:
        operations: in the order of issue.
        buffers: [M][C] number of the buffer in each iteration; one number if it holds all chunks.
        ring_sizes: [M] W; C where each chunk has a buffer of its own.
        writes: [M][C] operation that writes it, or -1.
        last_reads: [M][C] last operation that reads it, or -1.
    """

    operations: tuple[Operation, ...]
    buffers: list[Sequence[int]]
    ring_sizes: list[int]
    writes: list[list[int]]
    last_reads: list[list[int]]


# Shared by passes and row formats with the same operations.
@lru_cache(maxsize=512)
def _unroll(
    series: tuple[Operation, ...],
    is_whole: tuple[bool, ...],
    in_ring: tuple[bool, ...],
    issued: tuple[tuple[int, int], ...],
    chunks: range,
    policy: Policy,
) -> _Unrolled:
    """Repeat the operations of one chunk for all chunks.

    Args:
        series: operations of one chunk.
        is_whole: [M] whether a buffer holds the rows of all chunks.
        in_ring: [M] whether a buffer may be a slot of a ring.
        issued: (series, iteration) in the order of issue.
        chunks: [C] in the order of the pass.
        policy: how the program is executed.
    """
    num_chunks, none = len(chunks), [-1] * len(chunks)
    # Step 1: numbers of operations by series and iteration, and of buffers.
    numbers = [[-1] * num_chunks for _ in series]
    for number, (at, i) in enumerate(issued):
        numbers[at][i] = number
    buffers: list[Sequence[int]] = []
    num_buffers = 0
    for whole in is_whole:
        first, num_buffers = num_buffers, num_buffers + (1 if whole else num_chunks)
        buffers.append([first] * num_chunks if whole else range(first, num_buffers))

    # Step 2: readers and writers of each buffer.
    readers = [[one.series for one in series if at in one.reads] for at in range(len(buffers))]
    writes = [none] * len(buffers)
    for operation in series:
        for at in operation.writes:
            writes[at] = numbers[operation.series]

    # Step 3: the sizes of the rings.
    ring_sizes = [num_chunks] * len(buffers)
    for at in range(len(buffers)):
        if in_ring[at]:
            # The input of a collective is free once the reader of its output is issued.
            ends = [
                numbers[end]
                for reader in readers[at]
                for end in (
                    readers[series[reader].writes[0]] if series[reader].is_collective else [reader]
                )
            ]
            ring_sizes[at] = _smallest_ring(writes[at], ends)

    # Step 4: dependencies: the writers of what an operation reads, and the readers of the slots
    # that it overwrites.
    needs = []
    for at, i in issued:
        need = {writes[buffer][i] for buffer in series[at].reads}
        for buffer in series[at].writes:
            if ring_sizes[buffer] <= i:
                need |= {numbers[reader][i - ring_sizes[buffer]] for reader in readers[buffer]}
        needs.append(need - {-1})
    waits = waits_of([series[at] for at, _ in issued], needs, policy)

    # Step 5: the operations.
    operations = [
        series[at]._replace(
            number=number,
            chunk=chunks[i],
            reads=tuple([buffers[buffer][i] for buffer in series[at].reads]),
            writes=tuple([buffers[buffer][i] for buffer in series[at].writes]),
            **waited._asdict(),
        )
        for number, ((at, i), waited) in enumerate(zip(issued, waits, strict=True))
    ]
    return _Unrolled(
        operations=tuple(operations),
        buffers=buffers,
        ring_sizes=ring_sizes,
        writes=writes,
        last_reads=[numbers[of_buffer[-1]] if of_buffer else none for of_buffer in readers],
    )


def _smallest_ring(write: Sequence[int], ends: Sequence[Sequence[int]]) -> int:
    """The smallest ring that adds no wait: a slot is written after all of its ends were issued.

    Args:
        write: [C] operation that writes the slot.
        ends: for each reader, [C] operation that is issued once the slot has been read.
    """
    return next(
        size
        for size in range(1, len(write) + 1)
        if all(end[i - size] < write[i] for end in ends for i in range(size, len(write)))
    )
