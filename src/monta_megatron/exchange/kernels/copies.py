"""Find the copies of rows, and copy rows with their lists.

Copies are ordered by part and then by row, in two launches. Part of an expert: (id - first) / size.
A row has one copy for each part in which it has an expert, and the experts of a part follow each
other in its list.

    counts[b, p] = rows of block b with a copy for part p                            (first launch)
    copy of (n, p) = copies for earlier parts + copies for p in earlier blocks, and in earlier rows
                     of this block                                                   (second)
    row_starts[n] = copies of all parts in earlier blocks, and of earlier rows of this block

Blocks are consecutive rows, one program each, processed in tiles: matrices [rows, parts] of first
places, so that each copy gets its number without an atomic.

Bytes: ids are read in both launches; 16 or 24 per copy and 8 per row are written once. Each program
of the second launch reads all counts: 4 B^2 P, with at most `MOST_BLOCKS` blocks.
Grid: [B] in both launches.

Rows are copied directly into a packed message, or for each expert to its place:

    into.rows[m], into.probs[m], into.ids[m] = rows[row[m]], probs[row[m]], ids[row[m]]
    into.probs[m]                            = or probs[row[m], place[m]], for one expert each

Either goes to row index[m] instead of m, if an index is given.

Bytes: each copy is read once and written once; 8 for each of its indices.
Grid: [M / rows of a tile, row / units of a tile]; programs of the first units copy the lists.
"""

import torch
import triton
import triton.language as tl

from monta_megatron.chains.stages import Parts
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

MOST_BLOCKS = 128
# Rows of a tile, and rows times parts: 4 for each thread.
MOST_ROWS, TILE = 128, 512


def find_copies(
    ids_NW: torch.Tensor, parts: Parts, copies: Copies, launches: Launches | None = None
) -> None:
    """Derive the copies of rows from their experts; see `rows.find_copies`.

    Args:
        ids_NW: int32, ascending experts of each row, padded with a number beyond the last one.
        parts: expert ranges of the parts.
        copies: receives the result; its sizes are known from the counts.
        launches: those that calls with the same layout of arguments share.
    """
    num_rows, width = ids_NW.shape
    if num_rows == 0:
        copies.row_starts.zero_()
        return
    launches = {} if launches is None else launches
    if "count" not in launches:
        all_parts = triton.next_power_of_2(parts.num_parts)
        rows = max(1, min(MOST_ROWS, TILE // all_parts))
        of_parts = parts.first, parts.size, parts.num_parts
        shared = width, ids_NW.stride(0), *of_parts, rows, all_parts
        launches["count"] = Launch(_count_parts, 1, 1, *shared)
        launches["find"] = Launch(_find_copies, 1, 1, *shared)
    count, find = launches["count"], launches["find"]
    *_, rows, _ = count.shared
    num_tiles = blocks_of(num_rows, rows)
    tiles_per_block = blocks_of(num_tiles, MOST_BLOCKS)
    num_blocks = blocks_of(num_tiles, tiles_per_block)
    counts_BP = torch.empty(num_blocks, parts.num_parts, dtype=torch.int32, device=ids_NW.device)
    count(num_blocks, ids_NW, counts_BP, num_rows, tiles_per_block)
    find(
        num_blocks,
        ids_NW,
        counts_BP,
        copies.row,
        copies.by_row,
        copies.row_starts,
        copies.place,
        copies.row.shape[0],
        num_blocks,
        num_rows,
        tiles_per_block,
    )


@kernel()
def _count_parts(
    ids: tl.tensor,
    counts: tl.tensor,
    num_rows: tl.int32,
    tiles_per_block: tl.int32,
    width: tl.int32,
    stride: tl.int32,
    first: tl.int32,
    size: tl.int32,
    num_parts: tl.int32,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    total = tl.zeros([PARTS], tl.int32)
    for tile in range(tiles_per_block):
        row = (block * tiles_per_block + tile) * ROWS + tl.arange(0, ROWS)
        first_place = _first_places(
            ids, row, num_rows, width, stride, first, size, num_parts, ROWS, PARTS
        )
        total += tl.sum((first_place < width).to(tl.int32), 0)
    part = tl.arange(0, PARTS)
    tl.store(counts + block * num_parts + part, total, part < num_parts)


@kernel()
def _find_copies(
    ids: tl.tensor,
    counts: tl.tensor,
    row_of_copy: tl.tensor,
    by_row: tl.tensor,
    row_starts: tl.tensor,
    place: tl.tensor,
    num_copies: tl.int32,
    num_blocks: tl.int32,
    num_rows: tl.int32,
    tiles_per_block: tl.int32,
    width: tl.int32,
    stride: tl.int32,
    first: tl.int32,
    size: tl.int32,
    num_parts: tl.int32,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    # Step 1: the first copy of this block for each part, and in the order of rows.
    block = tl.program_id(0)
    part = tl.arange(0, PARTS)
    total = tl.zeros([PARTS], tl.int32)
    earlier = tl.zeros([PARTS], tl.int32)
    for begin in range(0, num_blocks, ROWS):
        other = begin + tl.arange(0, ROWS)[:, None]
        is_count = (other < num_blocks) & (part < num_parts)[None, :]
        of_blocks = tl.load(counts + other * num_parts + part[None, :], is_count, other=0)
        total += tl.sum(of_blocks, 0)
        earlier += tl.sum(tl.where(other < block, of_blocks, 0), 0)
    assert tl.sum(total, 0) == num_copies, "ids and counts of copies disagree"
    next_copy = tl.cumsum(total, 0) - total + earlier
    next_by_row = tl.sum(earlier, 0)

    for tile in range(tiles_per_block):
        # Step 2: [ROWS, PARTS] the copies of a tile, numbered by part and by row.
        row = (block * tiles_per_block + tile) * ROWS + tl.arange(0, ROWS)
        first_place = _first_places(
            ids, row, num_rows, width, stride, first, size, num_parts, ROWS, PARTS
        )
        is_copy = (first_place < width).to(tl.int32)
        copy = next_copy[None, :] + tl.cumsum(is_copy, 0) - is_copy
        copies_of_row = tl.sum(is_copy, 1)
        start = next_by_row + tl.cumsum(copies_of_row, 0) - copies_of_row
        position = start[:, None] + tl.cumsum(is_copy, 1) - is_copy

        # Step 3: write them, at most as many as the host counted.
        present = (first_place < width) & (copy < num_copies) & (position < num_copies)
        row_of_each = tl.broadcast_to(row.to(tl.int64)[:, None], [ROWS, PARTS])
        tl.store(row_of_copy + copy, row_of_each, present)
        if place is not None:
            tl.store(place + copy, first_place.to(tl.int64), present)
        tl.store(by_row + position, copy.to(tl.int64), present)
        tl.store(row_starts + row, start.to(tl.int64), row < num_rows)
        end = (start + copies_of_row).to(tl.int64)
        tl.store(row_starts + row + 1, end, row == num_rows - 1)
        next_copy += tl.sum(is_copy, 0)
        next_by_row += tl.sum(copies_of_row, 0)


@triton.jit
def _first_places(
    ids: tl.tensor,
    row: tl.tensor,
    num_rows: tl.int32,
    width: tl.int32,
    stride: tl.int32,
    first: tl.int32,
    size: tl.int32,
    num_parts: tl.int32,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tensor:
    """[ROWS, PARTS] position of a row's first expert of a part in its list; `width` for none."""
    first_place = tl.zeros([ROWS, PARTS], tl.int32) + width
    for place in range(width):
        expert = tl.load(ids + row.to(tl.int64) * stride + place, row < num_rows, other=0) - first
        is_inside = (row < num_rows) & (expert >= 0) & (expert < size * num_parts)
        part = tl.where(is_inside, expert // size, -1)
        is_here = part[:, None] == tl.arange(0, PARTS)[None, :]
        first_place = tl.where(is_here, tl.minimum(first_place, place), first_place)
    return first_place


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
