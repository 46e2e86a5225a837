"""Copy rows with their lists directly into a packed message, or for each expert to its place.

    into.rows[m], into.probs[m], into.ids[m] = rows[row[m]], probs[row[m]], ids[row[m]]
    into.probs[m]                            = or probs[row[m], place[m]], for one expert each

Either goes to row index[m] instead of m, if an index is given.

Bytes: each copy is read once and written once; 8 for each of its indices.
Grid: [M / rows of a tile, row / units of a tile]; programs of the first units copy the lists.
"""

import torch
import triton.language as tl

from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.kernels.tiles import (
    COPIED,
    LIST,
    Launch,
    Launches,
    blocks_of,
    kernel,
    stride_of,
    tile_for,
    values_per_unit,
)
from monta_megatron.exchange.rows import Copies


def duplicate(
    columns: Columns,
    copies: Copies,
    into: Columns,
    index_M: torch.Tensor | None = None,
    launches: Launches | None = None,
) -> None:
    """Copy each row, with its lists, once per destination part: [N, H] -> [R, H].

    If both are messages of one layout, whole messages may be given as rows.

    Args:
        columns: rows [N, H]; probabilities and ids [N, W] or None.
        copies: the copies.
        into: rows [R, H]; [R, W] lists, or [R] probabilities if each copy is for one expert. A
            column that is None is not copied.
        index_M: row of each copy in `into`; None if they are in order.
        launches: those that calls with the same layout of arguments share.
    """
    launches = {} if launches is None else launches
    rows_NH = columns.rows
    probs_NW = None if into.probs is None else columns.probs
    ids_NW = None if into.ids is None else columns.ids
    if "duplicate" not in launches:
        unit = values_per_unit(rows_NH, into.rows)
        num_units = rows_NH.shape[1] // unit
        tile = tile_for(num_units, COPIED)
        launches["duplicate"] = Launch(
            _duplicate,
            tile.rows,
            blocks_of(num_units, tile.units),
            num_units,
            0 if probs_NW is None else probs_NW.shape[1],
            rows_NH.stride(0) // unit,
            stride_of(probs_NW),
            stride_of(ids_NW),
            into.rows.stride(0) // unit,
            stride_of(into.probs),
            stride_of(into.ids),
            unit,
            tile.rows,
            tile.units,
        )
    num_copies = copies.row.shape[0]
    launches["duplicate"](
        num_copies,
        rows_NH,
        probs_NW,
        ids_NW,
        copies.row,
        copies.place if into.probs is not None and into.probs.dim() == 1 else None,
        index_M,
        into.rows,
        into.probs,
        into.ids,
        num_copies,
    )


@kernel("rows", "into_rows")
def _duplicate(
    rows: tl.tensor,
    probs: tl.tensor,
    ids: tl.tensor,
    row: tl.tensor,
    place: tl.tensor,
    index: tl.tensor,
    into_rows: tl.tensor,
    into_probs: tl.tensor,
    into_ids: tl.tensor,
    num_copies: tl.int32,
    num_units: tl.int32,
    width: tl.int32,
    stride: tl.int32,
    probs_stride: tl.int32,
    ids_stride: tl.int32,
    into_stride: tl.int32,
    into_probs_stride: tl.int32,
    into_ids_stride: tl.int32,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    copy = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = copy < num_copies
    source = tl.load(row + copy, present, other=0)
    target = copy
    if index is not None:
        target = tl.load(index + copy, present, other=0)
    value = tl.program_id(1) * UNITS * UNIT + tl.arange(0, UNITS * UNIT)[None, :]
    mask = present[:, None] & (value < num_units * UNIT)
    values = tl.load(rows + source[:, None] * (stride * UNIT) + value, mask)
    tl.store(into_rows + target[:, None] * (into_stride * UNIT) + value, values, mask)

    if probs is not None and tl.program_id(1) == 0:
        if place is not None:
            expert = source * probs_stride + tl.load(place + copy, present, other=0)
            prob = tl.load(probs + expert, present)
            tl.store(into_probs + target * into_probs_stride, prob, present)
        else:
            for begin in range(0, width, LIST):
                slot = begin + tl.arange(0, LIST)[None, :]
                is_slot = present[:, None] & (slot < width)
                prob = tl.load(probs + source[:, None] * probs_stride + slot, is_slot)
                tl.store(into_probs + target[:, None] * into_probs_stride + slot, prob, is_slot)
                if ids is not None:
                    expert = tl.load(ids + source[:, None] * ids_stride + slot, is_slot)
                    tl.store(into_ids + target[:, None] * into_ids_stride + slot, expert, is_slot)
