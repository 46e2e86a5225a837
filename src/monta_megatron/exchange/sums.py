"""Sums of rows in a fixed order, as PyTorch operations.

Terms are added one after the other from +0.0, by the same operation on every device and without
atomics, so the bits are the same in every run. Low-precision rows are converted first, a block of
columns at a time, which takes `SUM_COLUMNS` values of the sum's dtype per row at any hidden size.

Bound: a sum of K terms is off by at most K 2^-24 of the sum of their absolute values (in fp32), and
by one rounding, after each hop of partial sums; right before an AllGather's transpose this rank's
own term stays unrounded. Over h such hops the error in bf16 (rms, against fp64) is at most
1.05 sqrt(1 + h) times that of one fp32 sum rounded once.
"""

import torch

from monta_megatron.chains.program import SUM_COLUMNS


def column_blocks(rows_RH: torch.Tensor, dtype: torch.dtype) -> list[slice]:
    """The columns that are summed in `dtype` at a time; all, if that is the rows' own dtype."""
    width = rows_RH.shape[1]
    step = width if rows_RH.dtype == dtype else SUM_COLUMNS
    return [slice(start, start + step) for start in range(0, width, step)]


def sum_rows(rows_RH: torch.Tensor, order_M: torch.Tensor, starts_N1: torch.Tensor) -> torch.Tensor:
    """Add up rows in their own dtype.

    Args:
        rows_RH: the rows.
        order_M: row of each term, sum after sum.
        starts_N1: start of each sum's terms in `order_M`, and the end.

    Returns:
        [N, H], 0 where a sum has no terms.
    """
    width = rows_RH.shape[1]
    if order_M.shape[0] == 0:
        return rows_RH.new_zeros(starts_N1.shape[0] - 1, width)
    # It adds the terms of a bag one after the other, in the order given, which torch does not
    # promise: tests/unit/test_sums.py compares the bits with a loop.
    sums_NH = torch.nn.functional.embedding_bag(
        order_M, _whole_rows(rows_RH), starts_N1, mode="sum", include_last_offset=True
    )
    return sums_NH[:, :width]


def sum_ranks(
    into: torch.Tensor,
    terms: torch.Tensor,
    dtype: torch.dtype,
    ranks_per_sum: int,
    unrounded_NH: torch.Tensor | None = None,
    rank: int = 0,
) -> None:
    """Add the P terms of each row in `dtype`, by rank, and round once: [P * N, H] -> [N, H].

    Args:
        into: [N, H] or [N], the result.
        terms: [P * N, H] or [P * N], rank after rank.
        dtype: dtype of the sum.
        ranks_per_sum: see `chains.stage_operations.ranks_per_sum`.
        unrounded_NH: this rank's term before rounding, in `dtype`; None if it was not rounded.
        rank: the position of this rank.
    """
    if into.dim() == 1:
        into, terms = into[:, None], terms[:, None]
    num_rows, first = into.shape[0], rank * into.shape[0]
    num_terms = ranks_per_sum * num_rows
    # [P, N] -> [N, P]
    order_M = torch.arange(num_terms, device=into.device).view(ranks_per_sum, num_rows).T.flatten()
    starts_N1 = torch.arange(0, num_terms + 1, ranks_per_sum, device=into.device)

    def sum_block(columns: slice) -> torch.Tensor:
        wide = terms[:, columns].to(dtype)
        if unrounded_NH is not None:
            wide[first : first + num_rows] = unrounded_NH[:, columns]
        total, *others = (sum_rows(group, order_M, starts_N1) for group in wide.split(num_terms))
        for sums in others:
            total += sums
        return total

    for columns in column_blocks(terms, dtype):
        into[:, columns] = sum_block(columns)


def _whole_rows(rows_RH: torch.Tensor) -> torch.Tensor:
    """Contiguous rows, without a copy if those of a packed message with all its columns will do."""
    num_rows, stride = rows_RH.shape[0], rows_RH.stride(0)
    end_bytes = (rows_RH.storage_offset() + num_rows * stride) * rows_RH.element_size()
    is_wide = rows_RH.stride(1) == 1 and rows_RH.shape[1] <= stride < 2 * rows_RH.shape[1]
    # Only the first columns of a row: after others, the next bytes belong to another chunk.
    is_first = is_wide and rows_RH.storage_offset() % stride == 0
    if is_first and end_bytes <= rows_RH.untyped_storage().nbytes():
        return rows_RH.as_strided((num_rows, stride), (stride, 1))
    return rows_RH.contiguous()
