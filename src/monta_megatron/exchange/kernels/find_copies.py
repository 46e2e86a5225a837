"""Derive the copies of rows, ordered by part and then by row, in two launches.

Part of an expert: (id - first) / size. A row has one copy for each part in which it has an expert,
and the experts of a part follow each other in its list.

    counts[b, p] = rows of block b with a copy for part p                            (first launch)
    copy of (n, p) = copies for earlier parts + copies for p in earlier blocks, and in earlier rows
                     of this block                                                   (second)
    row_starts[n] = copies of all parts in earlier blocks, and of earlier rows of this block

Blocks are consecutive rows, one program each, processed in tiles: matrices [rows, parts] of first
places, so that each copy gets its number without an atomic.

Bytes: ids are read in both launches; 16 or 24 per copy and 8 per row are written once. Each program
of the second launch reads all counts: 4 B^2 P, with at most `MOST_BLOCKS` blocks.
Grid: [B] in both launches.
"""

import torch
import triton
import triton.language as tl

from monta_megatron.chains.stages import Parts
from monta_megatron.exchange.kernels.tiles import Launch, Launches, blocks_of, kernel
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
