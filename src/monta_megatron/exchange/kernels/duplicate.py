"""Copy rows with their lists directly into a packed message.

    into.rows[m], into.probs[m], into.ids[m] = rows[row[m]], probs[row[m]], ids[row[m]]

Bytes: each copy is read once and written once; 8 for its index.
Grid: [M / rows of a tile, row / units of a tile]; programs of the first units copy the lists.

Notation: N = rows, M = copies, H = hidden size, W = most experts of any row.
"""

import triton.language as tl

from monta_megatron.exchange.copies import Copies
from monta_megatron.exchange.kernels.tiles import (
    LIST,
    Launch,
    Launches,
    blocks_of,
    copy_tile,
    kernel,
    move_rows,
    stride_of,
)
from monta_megatron.exchange.kernels.to_experts import to_experts
from monta_megatron.exchange.messages import Columns


def duplicate(
    columns: Columns, copies: Copies, into: Columns, launches: Launches | None = None
) -> None:
    """Copy each row, with its lists, once per destination part: [N, H] -> [M, H].

    If both are messages of one layout, whole messages may be given as rows.

    Args:
        columns: rows [N, H]; probabilities and ids [N, W] or None.
        copies: the copies.
        into: rows [M, H]; [M, W] lists, or [M] probabilities if each copy is for one expert. A
            column that is None is not copied.
        launches: cache for columns of the same shapes.
    """
    launches = {} if launches is None else launches
    if into.probs is not None and into.probs.dim() == 1:
        to_experts(columns, copies, into, launches=launches)
        return
    rows_NH = columns.rows
    probs_NW = None if into.probs is None else columns.probs
    ids_NW = None if into.ids is None else columns.ids
    if "duplicate" not in launches:
        unit, num_units, tile = copy_tile(rows_NH, into.rows)
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
    move_rows(rows, stride, source, into_rows, into_stride, copy, present, num_units, UNIT, UNITS)
    if probs is not None and tl.program_id(1) == 0:
        for begin in range(0, width, LIST):
            place = begin + tl.arange(0, LIST)[None, :]
            mask = present[:, None] & (place < width)
            prob = tl.load(probs + source[:, None] * probs_stride + place, mask)
            tl.store(into_probs + copy[:, None] * into_probs_stride + place, prob, mask)
            if ids is not None:
                expert = tl.load(ids + source[:, None] * ids_stride + place, mask)
                tl.store(into_ids + copy[:, None] * into_ids_stride + place, expert, mask)
