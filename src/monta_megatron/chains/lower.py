"""Lower a bound chain to the program of one pass: a loop over chunks, unrolled and pipelined.

The first collective of a chunk starts before the second one of the chunk before is waited for, in
every pass. Collectives are issued in the same order on every rank, whatever the data: a chunk
without rows is sent too.

Chunk buffers form rings: a buffer's slot is used again by the chunk that comes `ring_size` chunks
later. Each ring is the smallest that adds no wait for a collective to the launch queue, which
`exchange.streams` explains with everything else that waits: the readers of a slot are waited for
before the operation that overwrites it is issued. On the device that operation may still start
later than with a buffer of its own; the planner prices that. On CPU ranks there is no ring.

Indices, in the combine of `alltoall_allgather` with ETP 2, in three chunks, with fused kernels. A
stage has an index in the chain and one in the pass, which are each other's reverse in a transposed
pass. A boundary lies before, between or after stages:

    chain of stages     pack     alltoall     allgather     order
    position             0          1             2           3
    boundary         0         1            2            3         4
    at                   3          2             1           0       (order of the pass)

The operations and buffers of one chunk, made in `chains.stage_operations`, are indexed by *series*,
those of the whole program by *number*. Iteration i works on the i-th chunk of the pass; this pass
goes from the last chunk, 2, to the first. Behind each operation stand those that it waits for:

          one chunk, by series    the program, by number; waits
    series  operation     buffers   iteration 0 (chunk 2)  1 (chunk 1)          2 (chunk 0)
       0    pack          0 -> 1     0:  0 -> 1             2:  0 -> 2           6:  0 -> 3   1
       1    alltoall      1 -> 2     1:  1 -> 4             3:  2 -> 5           7:  3 -> 6   4
       2    reduce_ranks  2 -> 3     4:  4 -> 7   1         8:  5 -> 8   3      11:  6 -> 9   7, 5
       3    alltoall      3 -> 4     5:  7 -> 10            9:  8 -> 11         12:  9 -> 12  10
       4    put           4 -> 5    10: 10 -> 13  5        13: 11 -> 13  9      14: 12 -> 13  12

Series 0, the input, and 5, the output, are one buffer each, which holds the rows of all chunks. The
buffers of series 1 have the numbers 1, 2 and 3 and the slots 1, 2 and 1: a *slot* is the number of
the first buffer that uses that memory, and these form a ring of two. So operation 6 waits for 1,
which reads slot 1. That adds no wait to the launch queue: 4, issued before, waits for 1 too.
11 waits for 7, which writes what it reads, and for 5, which reads the slot that it overwrites. What
a queue keeps in order needs no wait: 5 comes after 4 on its stream.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate

from monta_megatron.chains.chain import BoundChain, ChainShape, order_of_issue
from monta_megatron.chains.program import (
    COLLECTIVES,
    BoundProgram,
    Buffer,
    Operation,
    Pass,
    Policy,
    Program,
    Release,
    RowFormat,
    with_waits,
)
from monta_megatron.chains.stage_operations import ChunkBuilder, ChunkOperation
from monta_megatron.chains.stages import AllGather, AllToAll, StageShape
from monta_megatron.core import GroupName


def lower(
    bound: BoundChain,
    pass_: Pass,
    row: RowFormat,
    max_experts_per_token: int,
    policy: Policy = "streams",
) -> BoundProgram:
    """The program of one pass; its structure is built once and cached for all counts.

    Args:
        bound: the chain with one rank's rows.
        pass_: the pass.
        row: the sizes of a row's values.
        max_experts_per_token: W; see `BoundProgram`.
        policy: how the program is executed.
    """
    # On the host's critical path, four times per layer and micro-batch: one lookup with a key that
    # is cheap to hash.
    program = _structure(bound.shape, pass_, row, policy)
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
def _structure(shape: ChainShape, pass_: Pass, row: RowFormat, policy: Policy) -> Program:
    num_chunks = shape.num_chunks
    # Step 1: operations and buffers of one chunk, stage by stage.
    stages = shape.stages[::-1] if pass_.transpose else shape.stages
    offsets = pipeline_offsets(stages, shape.crossing_groups, policy)
    one_chunk = ChunkBuilder(shape, offsets, pass_, row, is_fused=policy == "fused")
    body = one_chunk.operations

    # Step 2: the order of the chunks. Nothing hides the copies and sums before the first collective
    # of a transposed pass, so it goes from the last chunk, the small one, to the first. With a
    # single collective it does not: only copies follow, which leave little to hide, and after a
    # small first chunk the large ones would be in memory together with the output.
    # Collectives are counted as on "streams" under every policy: on CPU ranks ("host") some add no
    # step, and the chunks would go in another order than on GPUs.
    num_collectives = pipeline_offsets(shape.stages, shape.crossing_groups, "streams")[-1]
    is_reversed = pass_.transpose and num_collectives > 1
    chunks = range(num_chunks)[:: -1 if is_reversed else 1]

    # Step 3: the order of issue: (series of an operation, iteration). It is given for stages by
    # their index in the pass, an operation has that in the chain.
    by_position: list[list[int]] = [[] for _ in stages]
    for operation in body:
        by_position[operation.position].append(operation.series)
    in_pass = by_position[::-1] if pass_.transpose else by_position
    order = order_of_issue(offsets, num_chunks)
    issued = [(series, i) for at, i in order for series in in_pass[at]]

    # Step 4: numbers of operations and of buffers, by series and iteration.
    numbers = [[-1] * num_chunks for _ in body]
    for number, (series, i) in enumerate(issued):
        numbers[series][i] = number
    buffer_numbers: list[Sequence[int]] = []
    end = 0
    for buffer in one_chunk.buffers:
        first, end = end, end + (1 if buffer.is_whole else num_chunks)
        buffer_numbers.append(range(first, end) if end > first + 1 else [first] * num_chunks)

    # Step 5: series of the operations that read and write each buffer, and the sizes of the rings.
    readers = [
        [one.series for one in body if buffer.series in one.reads] for buffer in one_chunk.buffers
    ]
    writers = {written: one.series for one in body for written in one.writes}
    ring_sizes = [
        _ring_size(buffer.series, body, readers, writers, numbers)
        if buffer.release is Release.JOIN and policy != "host"
        else num_chunks
        for buffer in one_chunk.buffers
    ]

    # Step 6: the operations of all chunks, and what each needs: the writers of what it reads, and
    # the readers of the slots that it overwrites.
    operations, needs = [], []
    for number, (series, i) in enumerate(issued):
        one = body[series]
        numbered = {
            "reads": tuple([buffer_numbers[read][i] for read in one.reads]),
            "writes": tuple([buffer_numbers[written][i] for written in one.writes]),
            "scratch": tuple([buffer_numbers[scratch][i] for scratch in one.scratch]),
            "unrounded": None if one.unrounded is None else buffer_numbers[one.unrounded][i],
        }
        fields = one._asdict() | numbered
        operations.append(Operation(**fields, number=number, chunk=chunks[i]))
        earlier = {numbers[writers[read]][i] for read in one.reads if read in writers}
        for written in one.writes:
            overwritten = i - ring_sizes[written]
            if overwritten >= 0:
                earlier |= {numbers[reader][overwritten] for reader in readers[written]}
        needs.append(earlier)
    operations = with_waits(operations, needs, policy)

    # Step 7: the buffers of all chunks.
    buffers: list[Buffer] = []
    for buffer in one_chunk.buffers:
        frees_early = buffer.release is Release.JOIN and policy == "host"
        read_by, fields = readers[buffer.series], buffer._asdict()
        del fields["is_whole"], fields["slot"]
        if frees_early:
            fields["release"] = Release.LAST_READ
        buffers += [
            Buffer(
                **fields,
                number=buffer_numbers[buffer.series][i],
                chunk=None if buffer.is_whole else chunks[i],
                slot=buffer_numbers[buffer.slot][i % ring_sizes[buffer.series]],
                last_read=numbers[read_by[-1]][i] if read_by else -1,
            )
            for i in range(1 if buffer.is_whole else num_chunks)
        ]
    output = one_chunk.current
    last = operations[numbers[writers[output]][-1]] if output in writers else None
    trailing = (operation.number for operation in operations if operation.stream > 0)
    return Program(
        pass_=pass_,
        row=row,
        policy=policy,
        operations=tuple(operations),
        buffers=tuple(buffers),
        output=buffer_numbers[output][0],
        waits_at_end=(last.number,) if last is not None and last.is_collective else (),
        num_streams=offsets[-1] + 1,
        num_at_start=next(trailing, len(operations)),
    )


def _ring_size(
    buffer: int,
    body: Sequence[ChunkOperation],
    readers: Sequence[Sequence[int]],
    writers: Mapping[int, int],
    numbers: Sequence[Sequence[int]],
) -> int:
    """Slots of the smallest ring that adds no wait for a collective to the launch queue.

    A slot is written after all operations that free it were issued, so what they wait for is ahead
    in the queue already. A copy that reads a slot frees it. The input of a collective is free once
    the reader of its output is issued, since its stream has waited for the collective.

    Args:
        buffer: series of the buffer.
        body: operations of one chunk.
        readers: by series of a buffer, the series of the operations that read it.
        writers: by series of a buffer, the series of the operation that writes it.
        numbers: by series of an operation and iteration, its number.
    """
    write = numbers[writers[buffer]]
    freed_by = [
        numbers[series]
        for reader in readers[buffer]
        for series in (
            readers[body[reader].writes[0]] if body[reader].kind in COLLECTIVES else [reader]
        )
    ]
    return next(
        size
        for size in range(1, len(write) + 1)
        if all(freed[i - size] < write[i] for freed in freed_by for i in range(size, len(write)))
    )
