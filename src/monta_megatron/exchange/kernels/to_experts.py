"""Copy rows for each expert straight to their places in the order of the experts.

    into.rows[places[m]]  = rows[row[m]]
    into.probs[places[m]] = probs[row[m], place[m]]

Bytes: what a copy consists of, read once and written once; 24 to know where it lies. Copied first
and put into order then, it would be read and written twice.
Grid: [M / rows of a tile, row / units of a tile]; the programs of the first units do the
probabilities.

Notation: N = rows, M = copies, H = hidden size, W = most experts of any row, R = rows of experts.
"""

import torch
import triton.language as tl

from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.copies import Copies
from monta_megatron.exchange.kernels.tiles import (
    MOVED,
    Launch,
    Launches,
    blocks_of,
    kernel,
    move_rows,
    stride_of,
    tile_for,
    values_per_unit,
)


def to_experts(
    columns: Columns,
    copies: Copies,
    into: Columns,
    places_M: torch.Tensor | None = None,
    launches: Launches | None = None,
) -> None:
    """Copy each row for every expert that it goes to, and put it where that expert takes it.

    Args:
        columns: rows [N, H], and probabilities [N, W] if `into` has them.
        copies: what is copied, each for one expert.
        into: rows [R, H]; probabilities [R] or none.
        places_M: row of each copy in `into`; None if they lie there in order.
        launches: kept for the next columns of the same shapes.
    """
    launches = {} if launches is None else launches
    rows_NH, probs_NW = columns.rows, None if into.probs is None else columns.probs
    if "to experts" not in launches:
        unit = values_per_unit(rows_NH, into.rows)
        num_units = rows_NH.shape[1] // unit
        tile = tile_for(num_units, MOVED)
        launches["to experts"] = Launch(
            _to_experts,
            tile.rows,
            blocks_of(num_units, tile.units),
            num_units,
            rows_NH.stride(0) // unit,
            stride_of(probs_NW),
            into.rows.stride(0) // unit,
            stride_of(into.probs),
            unit,
            tile.rows,
            tile.units,
        )
    num_copies = copies.row.shape[0]
    launches["to experts"](
        num_copies,
        rows_NH,
        probs_NW,
        copies.row,
        copies.place,
        places_M,
        into.rows,
        into.probs,
        num_copies,
    )


@kernel("rows", "into_rows")
def _to_experts(
    rows: tl.tensor,
    probs: tl.tensor,
    row: tl.tensor,
    place: tl.tensor,
    places: tl.tensor,
    into_rows: tl.tensor,
    into_probs: tl.tensor,
    num_copies: tl.int32,
    num_units: tl.int32,
    stride: tl.int32,
    probs_stride: tl.int32,
    into_stride: tl.int32,
    into_probs_stride: tl.int32,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    copy = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = copy < num_copies
    source = tl.load(row + copy, present, other=0)
    target = copy
    if places is not None:
        target = tl.load(places + copy, present, other=0)
    move_rows(rows, stride, source, into_rows, into_stride, target, present, num_units, UNIT, UNITS)
    if probs is not None and tl.program_id(1) == 0:
        expert = source * probs_stride + tl.load(place + copy, present, other=0)
        prob = tl.load(probs + expert, present)
        tl.store(into_probs + target * into_probs_stride, prob, present)
