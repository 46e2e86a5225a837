"""The most memory that the executor holds at once in a walk, from the bound chain."""

from collections.abc import Sequence

from monta_megatron.chains import BoundChain
from monta_megatron.chains.lanes import RowFormat, WalkLanes, row_bytes_by_stage
from monta_megatron.chains.stages import AllGather, AllToAll, BoundStage, Replicate

SUM_BYTES = 4


def peak_bytes(bound: BoundChain, row: RowFormat, walk: WalkLanes) -> float:
    """Output, messages of the chunks under way, and sums, in the order in which they are issued.

    A chunk holds what its last stage wrote, and what a collective among them still reads; a stage
    lets go of that once its own message is there. The output is there from the first rows that are
    put into it. Sums are made in fp32 before they are rounded into the message. Indices, which
    are 8 bytes a row, are left out.

    Returns:
        bytes on this rank beyond the walk's input.
    """
    stages = bound.walked(walk.transpose)
    row_bytes = row_bytes_by_stage(bound, row, walk)
    depths = bound.depths(walk.transpose, host_moves=False)
    last = len(stages) - 1
    num_rows = bound.num_source_rows if walk.transpose else bound.num_expert_rows
    output = row_bytes[last] * num_rows if stages[last].segments is not None else 0.0
    sum_bytes = row.hidden_size * max(SUM_BYTES, row.value_bytes)
    writes = [_writes(stages, position) for position in range(len(stages))]
    # [stages][C]
    rows_behind = [_rows_behind(stage, walk) for stage in stages]

    peak = live = 0.0
    # What each chunk holds: what its last stage wrote, and what that stage still reads.
    wrote: dict[int, float] = {}
    reads: dict[int, float] = {}
    copies: dict[int, int] = {}
    for step in range(bound.num_chunks + depths[last]):
        for position, stage in enumerate(stages):
            chunk = step - depths[position]
            if not 0 <= chunk < bound.num_chunks:
                continue
            before, read = wrote.get(chunk, 0.0), reads.get(chunk, 0.0)
            if copies.get(chunk, 1) > 1 and (position == last or writes[position]):
                # The sum of what a transposed AllGather brought, made where it is read.
                num_copies = copies.pop(chunk)
                summed = before / num_copies
                rows = summed / row_bytes[position - 1]
                num_sums = 1 if bound.num_added_first(num_copies) == 1 else 2
                peak = max(peak, live + summed + num_sums * rows * sum_bytes)
                live += summed
                before, read = summed, read + before
            if position == last:
                # The output is allocated when its first rows come.
                live += (output if chunk == 0 else 0.0) - read
                peak = max(peak, live)
                live -= before
                continue
            if not writes[position]:
                continue
            new = row_bytes[position] * rows_behind[position][chunk]
            if walk.transpose and isinstance(stage.stage, Replicate):
                rows = rows_behind[position][chunk]
                behind = stages[position + 1]
                sums_over_ranks = isinstance(behind.stage, AllGather) and behind.send.shape[1] > 1
                if sums_over_ranks and row.value_bytes < SUM_BYTES:
                    # A rank keeps its own part of the sum as it is.
                    new += behind.send[chunk, 0].item() * sum_bytes
                peak = max(peak, live + rows * sum_bytes + new)
            peak = max(peak, live + new)
            is_collective = isinstance(stage.stage, AllToAll | AllGather)
            keeps = before if is_collective else 0.0
            live += new - read - (before - keeps)
            wrote[chunk], reads[chunk] = new, keeps
            if walk.transpose and isinstance(stage.stage, AllGather):
                copies[chunk] = stage.send.shape[1]
    return peak


def _writes(stages: Sequence[BoundStage], position: int) -> bool:
    """Whether a stage allocates: not one that hands on views, nor a group of one rank.

    Rows that are to be summed are read where they lie.
    """
    stage = stages[position]
    if isinstance(stage.stage, AllToAll | AllGather):
        return stage.send.shape[1] > 1
    if isinstance(stage.stage, Replicate):
        return True
    return (
        position == 0
        and stage.segments is not None
        and not stage.segments.is_slice
        and not isinstance(stages[1].stage, Replicate)
    )


def _rows_behind(stage: BoundStage, walk: WalkLanes) -> list[float]:
    """[C] rows that a stage of the walk writes."""
    if not walk.transpose:
        rows = stage.receive.sum(axis=1)
    elif isinstance(stage.stage, AllToAll | AllGather):
        rows = stage.send.sum(axis=1)
    else:
        rows = stage.send[:, 0]
    written: list[float] = rows.tolist()
    return written
