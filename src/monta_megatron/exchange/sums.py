"""Sums of rows in a given order, as PyTorch operations.

The terms are added one after the other from +0.0, by the same operation on every device and with no
atomics, so the bits are the same in every run. Low-precision rows are converted first, a block of
columns at a time: that takes `SUM_COLUMNS` values of the sum's dtype for each row, whatever the
hidden size.

Bound: a sum of K terms is off by at most K 2^-24 of the sum of their absolute values (in fp32), and
by one rounding. Where partial sums travel over h hops, this rank's part is not rounded for the
way, and the error in bf16 (rms, against fp64) is at most 1.05 sqrt(1 + h) times that of one fp32
sum rounded once.

Notation: N = rows of the result, M = terms of all sums, P = parts of each row, H = columns.
"""

import torch

from monta_megatron.chains.program import SUM_COLUMNS


def column_blocks(rows: torch.Tensor, dtype: torch.dtype) -> list[slice]:
    """The columns of [M, H] rows that are summed in `dtype` at a time; all, if that is theirs."""
    width = rows.shape[1]
    step = width if rows.dtype == dtype else SUM_COLUMNS
    return [slice(start, start + step) for start in range(0, width, step)]


def sum_rows(rows: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Add up rows in their own dtype.

    Args:
        rows: [any number, H].
        order: [M] the row of every term, sum after sum.
        starts: [N + 1] where the terms of each sum begin in `order`.

    Returns:
        [N, H], 0 where a sum has no terms.
    """
    width = rows.shape[1]
    if order.shape[0] == 0:
        return rows.new_zeros(starts.shape[0] - 1, width)
    sums = torch.nn.functional.embedding_bag(
        order, _with_neighbouring_columns(rows), starts, mode="sum", include_last_offset=True
    )
    return sums[:, :width]


def sum_parts(
    into: torch.Tensor,
    parts: torch.Tensor,
    dtype: torch.dtype,
    parts_per_sum: int,
    unrounded: torch.Tensor | None = None,
    rank: int = 0,
) -> None:
    """Add the P parts of each row in `dtype`, in order, and round once: [P * N, H] -> [N, H].

    Args:
        into: [N, H] or [N], the result.
        parts: [P * N, H] or [P * N], part after part.
        dtype: dtype of the sum.
        parts_per_sum: see `chains.stage_operations.parts_per_sum`.
        unrounded: [N, H] this rank's part before it was rounded, in `dtype`; None if it was not.
        rank: the position of that part.
    """
    if into.dim() == 1:
        into, parts = into[:, None], parts[:, None]
    num_rows, first = into.shape[0], rank * into.shape[0]
    num_terms = parts_per_sum * num_rows
    # [P, N] -> [N, P]
    order = torch.arange(num_terms, device=into.device).view(parts_per_sum, num_rows).T.flatten()
    starts = torch.arange(0, num_terms + 1, parts_per_sum, device=into.device)

    def sum_block(columns: slice) -> torch.Tensor:
        terms = parts[:, columns].to(dtype)
        if unrounded is not None:
            terms[first : first + num_rows] = unrounded[:, columns]
        total, *others = (sum_rows(group, order, starts) for group in terms.split(num_terms))
        for sums in others:
            total += sums
        return total

    for columns in column_blocks(parts, dtype):
        into[:, columns] = sum_block(columns)


def _with_neighbouring_columns(rows: torch.Tensor) -> torch.Tensor:
    """Rows of a packed message with its other columns: contiguous, if possible without a copy."""
    num_rows, stride = rows.shape[0], rows.stride(0)
    end_bytes = (rows.storage_offset() + num_rows * stride) * rows.element_size()
    is_wide = rows.stride(1) == 1 and rows.shape[1] <= stride < 2 * rows.shape[1]
    # Columns that come first in their row: behind others, what follows is another chunk's.
    is_first = is_wide and rows.storage_offset() % stride == 0
    if is_first and end_bytes <= rows.untyped_storage().nbytes():
        return rows.as_strided((num_rows, stride), (stride, 1))
    return rows.contiguous()
