"""Copy rows for each expert directly into expert order.

    into.rows[places[m]]  = rows[row[m]]
    into.probs[places[m]] = probs[row[m], place[m]]

Bytes: each copy is read once and written once, instead of twice if copied and then ordered; 24 for
its indices.
Grid: [M / rows of a tile, row / units of a tile]; programs of the first units copy the
probabilities.

Notation: N = rows, M = copies, H = hidden size, W = most experts of any row, R = rows of experts.
"""

import torch
import triton.language as tl

from monta_megatron.exchange.copies import Copies
from monta_megatron.exchange.kernels.tiles import (
    Launch,
    Launches,
    blocks_of,
    copy_tile,
    kernel,
    move_rows,
    stride_of,
)
from monta_megatron.exchange.messages import Columns


def to_experts(
    columns: Columns,
    copies: Copies,
    into: Columns,
    places_M: torch.Tensor | None = None,
    launches: Launches | None = None,
) -> None:
    """Copy each row once per expert, into expert order.

    Args:
        columns: rows [N, H], and probabilities [N, W] if `into` has them.
        copies: the copies, each for one expert.
        into: rows [R, H]; probabilities [R] or none.
        places_M: row of each copy in `into`; None if they are in order.
        launches: cache for columns of the same shapes.
    """
    launches = {} if launches is None else launches
    rows_NH, probs_NW = columns.rows, None if into.probs is None else columns.probs
    if "to experts" not in launches:
        unit, num_units, tile = copy_tile(rows_NH, into.rows)
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
