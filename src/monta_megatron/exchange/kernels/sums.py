"""Sums of rows, added one after the other and rounded once: of copies, and of terms by rank.

Copies of each row, in the order of their parts:

    copies of n      = by_row[row_starts[n]], ..., by_row[row_starts[n + 1] - 1]
    into.rows[n]     = round(+0.0 + rows[first copy] + ... + rows[last copy])
    unrounded[n]     = the sum before rounding, for a range of rows
    into.probs[n]    = sum of the copies' lists, likewise
    into.probs[n, w] = or, if copies have one each, that of the copy at place w; 0 without one

Terms of each row from all ranks of a group, in the order of the ranks:

    into.rows[n] = round(+0.0 + rows[n] + rows[N + n] + ... + rows[(P - 1) N + n])

Terms of `ranks_per_sum` adjacent ranks are summed first, from +0.0 each time, then those sums. This
rank's own term is the unrounded one, if given. Probabilities are summed likewise.

Bytes: each copy or term is read once and each row written once; 8 or 16 for a copy's index per
block of its units.
Grid: [N, row / units of a tile]; programs of the first units sum the lists or probabilities.
"""

import torch
import triton.language as tl

from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.kernels.tiles import (
    LIST,
    SUMMED,
    Launch,
    Launches,
    blocks_of,
    kernel,
    stride_of,
    sum_type,
    tile_for,
    values_per_unit,
)
from monta_megatron.exchange.rows import Copies

# Units of a tile of terms: one per thread, which keeps two sums of it.
TERM_UNITS = 128


def reduce(
    columns: Columns,
    copies: Copies,
    into: Columns,
    dtype: torch.dtype,
    index_M: torch.Tensor | None = None,
    unrounded_RH: torch.Tensor | None = None,
    first_unrounded: int = 0,
    launches: Launches | None = None,
) -> None:
    """Sum each row's copies and their lists, rounded once: [M, H] -> [N, H].

    Args:
        columns: rows [M, H], or more, of which `index_M` names the copies; probabilities likewise,
            [M, W] lists, or [M] if each copy is for one expert.
        copies: the copies.
        into: rows [N, H]; probabilities [N, W] or none.
        dtype: dtype of the sums.
        index_M: row of each copy in `columns`; None if they are in order.
        unrounded_RH: receives the sums of some rows before rounding, in `dtype`.
        first_unrounded: the first of these rows.
        launches: those that calls with the same layout of arguments share.
    """
    launches = {} if launches is None else launches
    rows, probs = columns.rows, None if into.probs is None else columns.probs
    if "reduce" not in launches:
        unit = values_per_unit(rows, into.rows, unrounded_RH)
        num_units = rows.shape[1] // unit
        units = tile_for(num_units, SUMMED).units
        launches["reduce"] = Launch(
            _reduce,
            1,
            blocks_of(num_units, units),
            num_units,
            0 if into.probs is None else into.probs.shape[1],
            rows.stride(0) // unit,
            stride_of(probs),
            into.rows.stride(0) // unit,
            stride_of(into.probs),
            stride_of(unrounded_RH) // unit,
            sum_type(dtype),
            sum_type(rows.dtype if columns.probs is None else columns.probs.dtype),
            unit,
            units,
        )
    launches["reduce"](
        into.rows.shape[0],
        rows,
        probs,
        index_M,
        copies.by_row,
        copies.row_starts,
        copies.place if probs is not None and probs.dim() == 1 else None,
        into.rows,
        into.probs,
        unrounded_RH,
        first_unrounded,
        first_unrounded + (0 if unrounded_RH is None else unrounded_RH.shape[0]),
    )


@kernel("rows", "into_rows", "unrounded")
def _reduce(
    rows: tl.tensor,
    probs: tl.tensor,
    index: tl.tensor,
    by_row: tl.tensor,
    row_starts: tl.tensor,
    place: tl.tensor,
    into_rows: tl.tensor,
    into_probs: tl.tensor,
    unrounded: tl.tensor,
    first_unrounded: tl.int32,
    end_unrounded: tl.int32,
    num_units: tl.int32,
    width: tl.int32,
    stride: tl.int32,
    probs_stride: tl.int32,
    into_stride: tl.int32,
    into_probs_stride: tl.int32,
    unrounded_stride: tl.int32,
    SUM: tl.constexpr,
    PROB_SUM: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(row_starts + row), tl.load(row_starts + row + 1)
    value = tl.program_id(1) * UNITS * UNIT + tl.arange(0, UNITS * UNIT)
    is_value = value < num_units * UNIT
    total = tl.zeros([UNITS * UNIT], SUM)
    for position in range(start, end):
        copy = tl.load(by_row + position)
        if index is not None:
            copy = tl.load(index + copy)
        total += tl.load(rows + copy * (stride * UNIT) + value, is_value).to(SUM)
    rounded = total.to(into_rows.dtype.element_ty)
    tl.store(into_rows + row * (into_stride * UNIT) + value, rounded, is_value)
    if unrounded is not None and row >= first_unrounded and row < end_unrounded:
        kept = (row - first_unrounded) * (unrounded_stride * UNIT)
        tl.store(unrounded + kept + value, total, is_value)

    if probs is not None and tl.program_id(1) == 0:
        for begin in range(0, width, LIST):
            slot = begin + tl.arange(0, LIST)
            shares = tl.zeros([LIST], PROB_SUM)
            for position in range(start, end):
                copy = tl.load(by_row + position)
                # A copy's only share belongs at the place of its expert.
                share_of = slot
                is_share = slot < width
                if place is not None:
                    is_share = slot == tl.load(place + copy)
                    share_of = tl.zeros([LIST], tl.int32)
                if index is not None:
                    copy = tl.load(index + copy)
                share = tl.load(probs + copy * probs_stride + share_of, is_share, other=0)
                if place is None:
                    shares += share.to(PROB_SUM)
                else:
                    shares = tl.where(is_share, share.to(PROB_SUM), shares)
            narrowed = shares.to(into_probs.dtype.element_ty)
            tl.store(into_probs + row * into_probs_stride + slot, narrowed, slot < width)


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
            blocks_of(num_units, TERM_UNITS),
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
            TERM_UNITS,
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
