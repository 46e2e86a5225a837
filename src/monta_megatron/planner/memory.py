"""The most memory that the executor holds at once in a walk, from the bound chain."""

from collections.abc import Sequence

from monta_megatron.chains import BoundChain
from monta_megatron.chains.chain import order_of_issue
from monta_megatron.chains.lanes import RowFormat, Walk, message_bytes_by_stage
from monta_megatron.chains.stages import (
    AllGather,
    AllToAll,
    BoundStage,
    Replicate,
    first_place_copies,
)

SUM_BYTES = 4


def peak_bytes(bound: BoundChain, row: RowFormat, walk: Walk) -> float:
    """The peak of a walk's output, messages and sums, following the order of issue.

    On a GPU everything lives until the walk has been issued; see `exchange.streams.Streams.hold`.
    Sums are counted in fp32, as they are before they are rounded into a message; on a GPU the peak
    is lower in low precision, see `Copies.sum_by_row`. Indices are left out: in a chain of tokens
    they take 8 bytes for each expert in the list of a row, kept until backward.

    Returns:
        Bytes on this rank beyond the walk's input.
    """
    stages = bound.walked(walk.transpose)
    row_bytes = [sum(messages) for messages in message_bytes_by_stage(bound, row, walk)]
    last = len(stages) - 1
    num_rows = bound.num_source_rows if walk.transpose else bound.num_expert_rows
    output = row_bytes[last] * num_rows if stages[last].segments is not None else 0.0
    sum_bytes = row.hidden_size * max(SUM_BYTES, row.value_bytes)
    writes = [_writes(stages, position) for position in range(last)]
    # [stages][C]
    rows_behind = [_rows_behind(stage, walk) for stage in stages]

    peak = live = 0.0
    # chunk -> position of the transposed AllGather whose copies have not been summed yet.
    gathered: dict[int, int] = {}
    for position, chunk in order_of_issue(bound.depths(walk.transpose, False), bound.num_chunks):
        stage = stages[position]
        reads = position == last or writes[position]
        if reads and chunk in gathered:
            gather = gathered.pop(chunk)
            num_copies = stages[gather].send.shape[1]
            rows = rows_behind[gather][chunk] / num_copies
            num_sums = 1 if bound.copies_per_sum(num_copies) == num_copies else 2
            live += row_bytes[gather] * rows
            peak = max(peak, live + num_sums * rows * sum_bytes)
        if position == last:
            # The output is allocated when its first rows arrive.
            live += output if chunk == 0 else 0.0
        elif writes[position]:
            rows = rows_behind[position][chunk]
            live += row_bytes[position] * rows
            if isinstance(stage.stage, AllGather) and walk.transpose:
                gathered[chunk] = position
            if isinstance(stage.stage, Replicate) and walk.transpose:
                behind = stages[position + 1]
                sums_over_ranks = isinstance(behind.stage, AllGather) and behind.send.shape[1] > 1
                if sums_over_ranks and row.value_bytes < SUM_BYTES:
                    # A rank keeps its own part of the sum unrounded.
                    live += behind.send[chunk, 0].item() * sum_bytes
                peak = max(peak, live + rows * sum_bytes)
        peak = max(peak, live)
    return peak


def _writes(stages: Sequence[BoundStage], position: int) -> bool:
    """Whether a stage allocates: not if it passes on views, nor in a group of one rank."""
    stage = stages[position]
    if isinstance(stage.stage, AllToAll | AllGather):
        return stage.send.shape[1] > 1
    if isinstance(stage.stage, Replicate):
        return True
    return position == 0 and first_place_copies(stages)


def _rows_behind(stage: BoundStage, walk: Walk) -> list[float]:
    """[C] rows that a stage of the walk writes."""
    if not walk.transpose:
        rows = stage.receive.sum(axis=1)
    elif isinstance(stage.stage, AllToAll | AllGather):
        rows = stage.send.sum(axis=1)
    else:
        rows = stage.send[:, 0]
    written: list[float] = rows.tolist()
    return written
