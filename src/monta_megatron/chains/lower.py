"""Lower a bound chain to the program of one pass: a loop over chunks, unrolled and pipelined.

Order of issue: chunk i + 1's first collective has started before chunk i's second one is waited
for, in every pass. Collectives are issued in the same order on every rank, whatever the data: a
chunk without rows is sent too.

Chunk buffers form a ring of W slots. With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one
hardware queue, the launch queue: a wait that is issued earlier than needed holds up everything
behind it, whatever its stream. So W is the smallest ring that adds no wait for a collective to the
launch queue: the readers of a slot are waited for before the operation that overwrites it is
issued. On the device that operation may still start later than with a buffer of its own; the
planner prices that. On CPU ranks there is no ring, and a buffer is released after its last read.

Notation: C = number of chunks, N = stages of the chain; K = operations and M = buffers of one
chunk, counted by k and m. Iteration i of the loop works on the i-th chunk in the order of the pass.
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
        order: the order of issue; not the default only in benchmarks/ablation.py.
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
    num_chunks = shape.num_chunks
    # Step 1: operations and buffers of one chunk, stage by stage.
    stages = shape.stages[::-1] if pass_.transpose else shape.stages
    offsets = pipeline_offsets(stages, shape.crossing_groups, policy)
    builder = operations_of_chunk(shape, offsets, pass_, row, is_fused=policy == "fused")

    # Step 2: the order of the chunks. Nothing hides the copies and sums before the first collective
    # of a transposed pass, so it goes from the last chunk, the small one, to the first. With a
    # single collective it does not: only copies follow, which leave little to hide, and after a
    # small first chunk the large ones would be in memory together with the output.
    # Collectives are counted as on "streams" under every policy: on CPU ranks ("host") some add no
    # step, and the chunks would go in another order than on GPUs.
    forward_offsets = pipeline_offsets(shape.stages, shape.crossing_groups, "streams")
    is_reversed = pass_.transpose and forward_offsets[-1] > 1
    chunks = range(num_chunks)[:: -1 if is_reversed else 1]

    # Step 3: the order of issue, and with it the operations of all chunks.
    by_position: list[list[int]] = [[] for _ in stages]
    for operation in builder.operations:
        by_position[operation.position].append(operation.series)
    by_stage = by_position[::-1] if pass_.transpose else by_position
    loop = _unroll(
        tuple(builder.operations),
        tuple([buffer.chunk is None for buffer in builder.buffers]),
        tuple([buffer.release is Release.JOIN and policy != "host" for buffer in builder.buffers]),
        tuple([(k, i) for stage, i in order(offsets, num_chunks) for k in by_stage[stage]]),
        chunks,
        policy,
    )

    # Step 4: the buffers of all chunks.
    buffers: list[Buffer] = []
    for m, buffer in enumerate(builder.buffers):
        release, ring_size = buffer.release, loop.ring_sizes[m]
        if release is Release.JOIN and policy == "host":
            release = Release.LAST_READ
        elif release is Release.JOIN and ring_size < num_chunks:
            release = Release.WINDOW
        buffers += [
            buffer._replace(
                number=loop.buffer_numbers[m][i],
                chunk=None if buffer.chunk is None else chunks[i],
                release=release,
                slot=loop.buffer_numbers[buffer.slot][i % ring_size],
                last_read=loop.last_reads[m][i],
            )
            for i in range(1 if buffer.chunk is None else num_chunks)
        ]
    last = loop.writes[builder.current][-1]
    trailing = (operation.number for operation in loop.operations if operation.stream > 0)
    return Program(
        pass_=pass_,
        row=row,
        policy=policy,
        operations=loop.operations,
        buffers=tuple(buffers),
        output=loop.buffer_numbers[builder.current][0],
        waits_at_end=(last,) if last >= 0 and loop.operations[last].is_collective else (),
        num_streams=offsets[-1] + 1,
        num_at_start=next(trailing, len(loop.operations)),
    )


class _Unrolled(NamedTuple):
    """Operations of all chunks.

    Attributes:
        operations: in the order of issue.
        buffer_numbers: [M][C] of the buffer in each iteration; one number if it holds all chunks.
        ring_sizes: [M] W; C where each chunk has a buffer of its own.
        writes: [M][C] operation that writes it, or -1.
        last_reads: [M][C] last operation that reads it, or -1.
    """

    operations: tuple[Operation, ...]
    buffer_numbers: list[Sequence[int]]
    ring_sizes: list[int]
    writes: list[list[int]]
    last_reads: list[list[int]]


# Shared by passes and row formats with the same operations.
@lru_cache(maxsize=512)
def _unroll(
    body: tuple[Operation, ...],
    is_whole: tuple[bool, ...],
    in_ring: tuple[bool, ...],
    issued: tuple[tuple[int, int], ...],
    chunks: range,
    policy: Policy,
) -> _Unrolled:
    """Repeat the operations of one chunk for all chunks.

    Worked example: pack (buffer 0 -> 1), alltoall (1 -> 2), put (2 -> 3), where put trails by one
    step. Two chunks are issued as pack 0, alltoall 0, pack 1, alltoall 1, put 0, put 1: `numbers`
    is [[0, 2], [1, 3], [4, 5]], `buffer_numbers` is [[0, 0], [1, 2], [3, 4], [5, 5]], put 0 waits
    for operation 1. Of three chunks pack 2 is operation 5, after put 0, so that two slots are
    enough for buffer 1: pack 2 overwrites the slot of pack 0, and waits for alltoall 0, its reader.

    Args:
        body: K operations of one chunk; `series` is the index here.
        is_whole: [M] whether a buffer holds the rows of all chunks.
        in_ring: [M] whether a buffer may be a slot of a ring.
        issued: (k, iteration) in the order of issue.
        chunks: [C] in the order of the pass.
        policy: how the program is executed.
    """
    num_chunks, num_buffers, none = len(chunks), len(is_whole), [-1] * len(chunks)
    # Step 1: numbers of operations, [K][C], and of buffers.
    numbers = [[-1] * num_chunks for _ in body]
    for number, (k, i) in enumerate(issued):
        numbers[k][i] = number
    buffer_numbers: list[Sequence[int]] = []
    end = 0
    for whole in is_whole:
        first, end = end, end + (1 if whole else num_chunks)
        buffer_numbers.append([first] * num_chunks if whole else range(first, end))

    # Step 2: readers (k) of each buffer, and the operations that write it.
    readers = [[k for k, one in enumerate(body) if m in one.reads] for m in range(num_buffers)]
    writes = [none] * num_buffers
    for operation in body:
        for m in operation.writes:
            writes[m] = numbers[operation.series]

    # Step 3: the sizes of the rings. A copy that reads a slot frees it. The input of a collective
    # is free once the reader of its output is issued: its stream has waited for the collective.
    ring_sizes = [num_chunks] * num_buffers
    for m in range(num_buffers):
        if in_ring[m]:
            freed_by = [
                numbers[freeing]
                for k in readers[m]
                for freeing in (readers[body[k].writes[0]] if body[k].is_collective else [k])
            ]
            ring_sizes[m] = _smallest_ring(writes[m], freed_by)

    # Step 4: dependencies: the writers of what an operation reads, and the readers of the slots
    # that it overwrites.
    dependencies = []
    for k, i in issued:
        earlier = {writes[m][i] for m in body[k].reads}
        for m in body[k].writes:
            if ring_sizes[m] <= i:
                earlier |= {numbers[reader][i - ring_sizes[m]] for reader in readers[m]}
        dependencies.append(earlier - {-1})
    waits = waits_of([body[k] for k, _ in issued], dependencies, policy)

    # Step 5: the operations.
    operations = []
    for number, ((k, i), waited) in enumerate(zip(issued, waits, strict=True)):
        kept = body[k].unrounded
        operation = body[k]._replace(
            number=number,
            chunk=chunks[i],
            reads=tuple([buffer_numbers[m][i] for m in body[k].reads]),
            writes=tuple([buffer_numbers[m][i] for m in body[k].writes]),
            unrounded=None if kept is None else buffer_numbers[kept][i],
            **waited._asdict(),
        )
        operations.append(operation)
    return _Unrolled(
        operations=tuple(operations),
        buffer_numbers=buffer_numbers,
        ring_sizes=ring_sizes,
        writes=writes,
        last_reads=[numbers[read_by[-1]] if read_by else none for read_by in readers],
    )


def _smallest_ring(write: Sequence[int], freed_by: Sequence[Sequence[int]]) -> int:
    """The smallest ring that adds no wait for a collective to the launch queue.

    A slot is written after all operations that free it were issued, so what they wait for is ahead
    in the queue already.

    Args:
        write: [C] operation that writes the slot.
        freed_by: for each reader, [C] operation that is issued once the slot has been read.
    """
    return next(
        size
        for size in range(1, len(write) + 1)
        if all(freed[i - size] < write[i] for freed in freed_by for i in range(size, len(write)))
    )
