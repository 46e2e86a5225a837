"""Lower a bound chain to the program of one pass: a loop over chunks, unrolled and pipelined.

The first collective of a chunk starts before the second one of the chunk before is waited for, in
every pass. Collectives are issued in the same order on every rank, whatever the data: a chunk
without rows is sent too.

Chunk buffers form rings: a buffer's slot is used again by the chunk that comes `ring_size` chunks
later. With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one hardware queue, the launch queue: a
wait that is issued earlier than needed holds up everything behind it, whatever its stream. So each
ring is the smallest that adds no wait for a collective to the launch queue: the readers of a slot
are waited for before the operation that overwrites it is issued. On the device that operation may
still start later than with a buffer of its own; the planner prices that. On CPU ranks there is no
ring, and a buffer is released after its last read.

Indices, in the combine of `alltoall_allgather` with ETP 2, in two chunks, with fused kernels. A
stage has an index in the chain and one in the pass, which are each other's reverse in a transposed
pass. A boundary lies before, between or after stages:

    chain of stages     pack     alltoall     allgather     order
    position             0          1             2           3
    boundary         0         1            2            3         4
    at                   3          2             1           0       (order of the pass)

The operations and buffers of one chunk, made in `chains.stage_operations`, are indexed by *series*,
those of the whole program by *number*. Iteration i works on the i-th chunk of the pass; this pass
goes from the last chunk, 1, to the first:

             one chunk, by series        the program, by number
    series   operation      buffers      iteration 0 (chunk 1)    iteration 1 (chunk 0)
       0     pack           0 -> 1           0:  0 -> 1               2:  0 -> 2
       1     alltoall       1 -> 2           1:  1 -> 3               3:  2 -> 4
       2     reduce_ranks   2 -> 3           4:  3 -> 5               6:  4 -> 6
       3     alltoall       3 -> 4           5:  5 -> 7               7:  6 -> 8
       4     put            4 -> 5           8:  7 -> 9               9:  8 -> 9

Series 0, the input, and 5, the output, are one buffer each, which holds the rows of all chunks. In
three chunks the buffers of series 1 have the numbers 1, 2 and 3 and the slots 1, 2 and 1: a *slot*
is the number of the first buffer that uses that memory, and these form a ring of two.
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
    """Pipeline steps by which each stage of a pass trails the first one, in the order of the pass.

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
    one_chunk = operations_of_chunk(shape, offsets, pass_, row, is_fused=policy == "fused")

    # Step 2: the order of the chunks. Nothing hides the copies and sums before the first collective
    # of a transposed pass, so it goes from the last chunk, the small one, to the first. With a
    # single collective it does not: only copies follow, which leave little to hide, and after a
    # small first chunk the large ones would be in memory together with the output.
    # Collectives are counted as on "streams" under every policy: on CPU ranks ("host") some add no
    # step, and the chunks would go in another order than on GPUs.
    forward_offsets = pipeline_offsets(shape.stages, shape.crossing_groups, "streams")
    is_reversed = pass_.transpose and forward_offsets[-1] > 1
    chunks = range(num_chunks)[:: -1 if is_reversed else 1]

    # Step 3: the order of issue, and with it the operations of all chunks. `order` gives stages by
    # their index in the pass, an operation has that in the chain.
    by_position: list[list[int]] = [[] for _ in stages]
    for operation in one_chunk.operations:
        by_position[operation.position].append(operation.series)
    in_pass = by_position[::-1] if pass_.transpose else by_position
    issued = [(series, i) for at, i in order(offsets, num_chunks) for series in in_pass[at]]
    loop = _unroll(
        tuple(one_chunk.operations),
        tuple([buffer.chunk is None for buffer in one_chunk.buffers]),
        tuple([one.release is Release.JOIN and policy != "host" for one in one_chunk.buffers]),
        tuple(issued),
        chunks,
        policy,
    )

    # Step 4: the buffers of all chunks.
    buffers: list[Buffer] = []
    for buffer in one_chunk.buffers:
        numbers, ring_size = loop.buffer_numbers[buffer.series], loop.ring_sizes[buffer.series]
        release = buffer.release
        if release is Release.JOIN and policy == "host":
            release = Release.LAST_READ
        elif release is Release.JOIN and ring_size < num_chunks:
            release = Release.WINDOW
        buffers += [
            buffer._replace(
                number=numbers[i],
                chunk=None if buffer.chunk is None else chunks[i],
                release=release,
                slot=loop.buffer_numbers[buffer.slot][i % ring_size],
                last_read=loop.last_reads[buffer.series][i],
            )
            for i in range(1 if buffer.chunk is None else num_chunks)
        ]
    last = loop.writes[one_chunk.current][-1]
    trailing = (operation.number for operation in loop.operations if operation.stream > 0)
    return Program(
        pass_=pass_,
        row=row,
        policy=policy,
        operations=loop.operations,
        buffers=tuple(buffers),
        output=loop.buffer_numbers[one_chunk.current][0],
        waits_at_end=(last,) if last >= 0 and loop.operations[last].is_collective else (),
        num_streams=offsets[-1] + 1,
        num_at_start=next(trailing, len(loop.operations)),
    )


class _Unrolled(NamedTuple):
    """Operations of all chunks. Its lists are indexed by the series of a buffer, then by iteration.

    Attributes:
        operations: by number, which is the order of issue.
        buffer_numbers: of the buffer; the same in every iteration if it holds all chunks.
        ring_sizes: by series alone: slots of the ring; C where each chunk has its own buffer.
        writes: number of the operation that writes the buffer, or -1.
        last_reads: number of the last operation that reads it, or -1.
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

    Args:
        body: operations of one chunk; their buffers are series.
        is_whole: by series of a buffer, whether it holds the rows of all chunks.
        in_ring: by series of a buffer, whether it may be a slot of a ring.
        issued: (series of an operation, iteration) in the order of issue.
        chunks: chunk of each iteration.
        policy: how the program is executed.
    """
    num_chunks, num_buffers, none = len(chunks), len(is_whole), [-1] * len(chunks)
    # Step 1: numbers of operations and of buffers, by series and iteration.
    numbers = [[-1] * num_chunks for _ in body]
    for number, (series, i) in enumerate(issued):
        numbers[series][i] = number
    buffer_numbers: list[Sequence[int]] = []
    end = 0
    for whole in is_whole:
        first, end = end, end + (1 if whole else num_chunks)
        buffer_numbers.append([first] * num_chunks if whole else range(first, end))

    # Step 2: the operations that read and write each buffer: series of the readers, and numbers.
    readers = [[one.series for one in body if buffer in one.reads] for buffer in range(num_buffers)]
    writes = [none] * num_buffers
    for operation in body:
        for buffer in operation.writes:
            writes[buffer] = numbers[operation.series]

    # Step 3: the sizes of the rings. A copy that reads a slot frees it. The input of a collective
    # is free once the reader of its output is issued: its stream has waited for the collective.
    ring_sizes = [num_chunks] * num_buffers
    for buffer in range(num_buffers):
        if in_ring[buffer]:
            freed_by = [
                numbers[freeing]
                for reader in readers[buffer]
                for freeing in (
                    readers[body[reader].writes[0]] if body[reader].is_collective else [reader]
                )
            ]
            ring_sizes[buffer] = _smallest_ring(writes[buffer], freed_by)

    # Step 4: dependencies: the writers of what an operation reads, and the readers of the slots
    # that it overwrites.
    dependencies = []
    for series, i in issued:
        earlier = {writes[buffer][i] for buffer in body[series].reads}
        for buffer in body[series].writes:
            if ring_sizes[buffer] <= i:
                overwritten = i - ring_sizes[buffer]
                earlier |= {numbers[reader][overwritten] for reader in readers[buffer]}
        dependencies.append(earlier - {-1})
    waits = waits_of([body[series] for series, _ in issued], dependencies, policy)

    # Step 5: the operations.
    operations = []
    for number, ((series, i), waited) in enumerate(zip(issued, waits, strict=True)):
        one = body[series]
        operation = one._replace(
            number=number,
            chunk=chunks[i],
            reads=tuple([buffer_numbers[buffer][i] for buffer in one.reads]),
            writes=tuple([buffer_numbers[buffer][i] for buffer in one.writes]),
            scratch=tuple([buffer_numbers[buffer][i] for buffer in one.scratch]),
            unrounded=None if one.unrounded is None else buffer_numbers[one.unrounded][i],
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
        write: by iteration, the operation that writes the slot.
        freed_by: for each reader, by iteration, the operation that is issued once the slot has been
            read.
    """
    return next(
        size
        for size in range(1, len(write) + 1)
        if all(freed[i - size] < write[i] for freed in freed_by for i in range(size, len(write)))
    )
