"""Sum each row's terms from all ranks of a group, in the order of the ranks.

    into.rows[n] = round(+0.0 + rows[n] + rows[N + n] + ... + rows[(P - 1) N + n])

Terms of `ranks_per_sum` adjacent ranks are summed first, from +0.0 each time, then those sums. This
rank's own term is the unrounded one, if given. Probabilities are summed likewise.

Bytes: each term is read once and each row written once.
Grid: [N, row / units of a tile]; programs of the first units sum the probabilities.
"""

import torch
import triton.language as tl

from monta_megatron.exchange.kernels.tiles import (
    LIST,
    Launch,
    Launches,
    blocks_of,
    kernel,
    stride_of,
    sum_type,
    values_per_unit,
)
from monta_megatron.exchange.memory import Columns

# Units of a tile: one per thread, which keeps two sums of it.
UNITS = 128


def reduce_ranks(
    columns: Columns,
    into: Columns,
    dtype: torch.dtype,
    ranks_per_sum: int,
    unrounded_NH: torch.Tensor | None = None,
    rank: int = 0,
    launches: Launches | None = None,
) -> None:
    """Add the P terms of each row in `dtype`, in order, and round once: [P * N, H] -> [N, H].

    Args:
        columns: rows [P * N, H], rank after rank; probabilities likewise, of one or W values.
        into: rows [N, H]; probabilities [N] or [N, W], if `columns` has them.
        dtype: dtype of the rows' sums; those of probabilities are in fp32, or fp64 if they are.
        ranks_per_sum: see `chains.stage_operations.ranks_per_sum`.
        unrounded_NH: this rank's term before rounding, in `dtype`; None if it was not rounded.
        rank: the position of this rank.
        launches: those that calls with the same layout of arguments share.
    """
    launches = {} if launches is None else launches
    rows, probs = columns.rows, columns.probs
    num_rows = into.rows.shape[0]
    if num_rows == 0:
        return
    if "reduce" not in launches:
        unit = values_per_unit(rows, into.rows, unrounded_NH)
        num_units = rows.shape[1] // unit
        launches["reduce"] = Launch(
            _reduce_ranks,
            1,
            blocks_of(num_units, UNITS),
            num_units,
            0 if probs is None else 1 if probs.dim() == 1 else probs.shape[1],
            rows.shape[0] // num_rows,
            ranks_per_sum,
            rank,
            rows.stride(0) // unit,
            stride_of(probs),
            into.rows.stride(0) // unit,
            stride_of(into.probs),
            stride_of(unrounded_NH) // unit,
            sum_type(dtype),
            sum_type(rows.dtype if probs is None else probs.dtype),
            unit,
            UNITS,
        )
    launches["reduce"](num_rows, rows, probs, into.rows, into.probs, unrounded_NH, num_rows)


@kernel("rows", "into_rows", "unrounded")
def _reduce_ranks(
    rows: tl.tensor,
    probs: tl.tensor,
    into_rows: tl.tensor,
    into_probs: tl.tensor,
    unrounded: tl.tensor,
    num_rows: tl.int32,
    num_units: tl.int32,
    width: tl.int32,
    num_ranks: tl.int32,
    ranks_per_sum: tl.int32,
    rank: tl.int32,
    stride: tl.int32,
    probs_stride: tl.int32,
    into_stride: tl.int32,
    into_probs_stride: tl.int32,
    unrounded_stride: tl.int32,
    SUM: tl.constexpr,
    PROB_SUM: tl.constexpr,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    value = tl.program_id(1) * TILE * UNIT + tl.arange(0, TILE * UNIT)
    is_value = value < num_units * UNIT
    total = tl.zeros([TILE * UNIT], SUM)
    for first in range(0, num_ranks, ranks_per_sum):
        group = tl.zeros([TILE * UNIT], SUM)
        for source in range(first, first + ranks_per_sum):
            if unrounded is not None and source == rank:
                group += tl.load(unrounded + row * (unrounded_stride * UNIT) + value, is_value)
            else:
                of_source = (row + source * num_rows.to(tl.int64)) * (stride * UNIT)
                group += tl.load(rows + of_source + value, is_value).to(SUM)
        total += group
    rounded = total.to(into_rows.dtype.element_ty)
    tl.store(into_rows + row * (into_stride * UNIT) + value, rounded, is_value)

    if probs is not None and tl.program_id(1) == 0:
        for begin in range(0, width, LIST):
            slot = begin + tl.arange(0, LIST)
            shares = tl.zeros([LIST], PROB_SUM)
            for first in range(0, num_ranks, ranks_per_sum):
                group_shares = tl.zeros([LIST], PROB_SUM)
                for source in range(first, first + ranks_per_sum):
                    of_source = (row + source * num_rows.to(tl.int64)) * probs_stride
                    group_shares += tl.load(probs + of_source + slot, slot < width).to(PROB_SUM)
                shares += group_shares
            narrowed = shares.to(into_probs.dtype.element_ty)
            tl.store(into_probs + row * into_probs_stride + slot, narrowed, slot < width)
