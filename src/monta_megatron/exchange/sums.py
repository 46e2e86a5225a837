"""Sums of rows in a given order, and rows in eight bits, as PyTorch operations.

The terms are added one after the other from +0.0, by the same operation on every device and with no
atomics, so the bits are the same in every run. Low-precision rows are converted first, a block of
columns at a time: that takes `SUM_COLUMNS` values of the sum's dtype for each row, whatever the
hidden size. Rows are scaled to eight bits (`chains.wire_format`) in fp32, block by block likewise.

Bound: a sum of K terms is off by at most K 2^-24 of the sum of their absolute values (in fp32), and
by one rounding. Where partial sums travel over h hops, this rank's part is not rounded for the
way, and the error in bf16 (rms, against fp64) is at most 1.05 sqrt(1 + h) times that of one fp32
sum rounded once.

Notation: N = rows of the result, M = terms of all sums, P = parts of each row, H = columns, B =
bytes of a quantized row, G = groups of a block's columns.
"""

import torch

from monta_megatron.chains.program import SUM_COLUMNS, round_up
from monta_megatron.chains.wire_format import (
    GROUP_SIZE,
    SCALE_BYTES,
    num_groups,
    scales_offset_bytes,
)


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
        parts_per_sum: see `chains.one_chunk.parts_per_sum`.
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


E4M3 = torch.float8_e4m3fn
# An fp32 number x = m 2^e with 1 <= m < 2 has the scale 2^(e-8), as m 2^8 <= 448 for m <= 1.75, or
# else 2^(e-7). Its bits are e + 127, then 23 of m: this carries into e where m > 1.75.
CARRY = 0x1FFFFF
MANTISSA_BITS = 23
LARGEST_EXPONENT = 8
INFINITY_BITS = 0x7F800000
# The bits of an e4m3 value where they stand in one of fp32, as a negative number.
SIGN_AND_VALUE = (0x7F << (MANTISSA_BITS - 3)) - (1 << 31)
BIASES = 127 - 7


def quantize(into: torch.Tensor, rows: torch.Tensor, index: torch.Tensor | None = None) -> None:
    """Write rows as they travel: [N, H] -> [N, B] uint8.

    Args:
        into: [N, B], which may lie in a message.
        rows: [N, H], or more rows, of which `index` names those to take.
        index: [N] int64, or None.
    """
    values, scales = values_and_scales(into, rows.shape[1])
    clear_gaps(into, rows.shape[1])
    for block in column_blocks(rows, torch.float32):
        scaled, groups = _block(values[:, block])
        scaled.copy_(rows[:, block] if index is None else rows[:, block][index])
        scale = _scale(torch.maximum(groups.amax(dim=2), -groups.amin(dim=2)))
        groups.div_(scale[:, :, None])
        values[:, block].copy_(scaled)
        first = block.start // GROUP_SIZE
        scales[:, first : first + scale.shape[1]] = scale


def dequantize(into: torch.Tensor, rows: torch.Tensor, index: torch.Tensor | None = None) -> None:
    """Read rows as they travel: [N, B] uint8 -> [N, H].

    Args:
        into: [N, H], or more rows, among which `index` names the places.
        rows: [N, B], which may lie in a message.
        index: [N] int64, or None.
    """
    values, scales = values_and_scales(rows, into.shape[1])
    for block in column_blocks(into, torch.float32):
        scaled, groups = _block(values[:, block])
        _copy_values(scaled, values[:, block])
        first = block.start // GROUP_SIZE
        groups.mul_(scales[:, first : first + groups.shape[1], None])
        if index is None:
            into[:, block] = scaled
        else:
            into[:, block].index_copy_(0, index, scaled.to(into.dtype))


def values_and_scales(rows: torch.Tensor, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, B] -> [N, H] e4m3, [N, groups] fp32."""
    offset = scales_offset_bytes(hidden_size)
    end = offset + SCALE_BYTES * num_groups(hidden_size)
    return rows[:, :hidden_size].view(E4M3), rows[:, offset:end].view(torch.float32)


def clear_gaps(rows: torch.Tensor, hidden_size: int) -> None:
    """Zero the bytes of [N, B] that hold neither values nor scales."""
    offset = scales_offset_bytes(hidden_size)
    end = offset + SCALE_BYTES * num_groups(hidden_size)
    for first, last in ((hidden_size, offset), (end, rows.shape[1])):
        if first < last:
            rows[:, first:last].zero_()


def _block(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 memory for a block of columns, [N, columns], and the groups in it: [N, G, 128]."""
    num_rows, width = values.shape
    make = torch.empty if width % GROUP_SIZE == 0 else torch.zeros
    memory = make(num_rows, round_up(width, GROUP_SIZE), device=values.device)
    return memory[:, :width], memory.unflatten(1, (-1, GROUP_SIZE))


def _copy_values(into: torch.Tensor, values: torch.Tensor) -> None:
    """e4m3 -> fp32, [N, columns]. By integers: a CPU's own conversion takes 5 times as long.

    With its sign extended, a value's bits become those of an fp32 number whose exponent is too
    small by the difference of the biases; the product is exact. No NaN is made: its group has one.
    """
    bits = into.view(torch.int32)
    bits.copy_(values.view(torch.int8))
    bits.bitwise_left_shift_(MANTISSA_BITS - 3).bitwise_and_(SIGN_AND_VALUE)
    into.mul_(2.0**BIASES)


def _scale(largest: torch.Tensor) -> torch.Tensor:
    """The scale of groups by their largest magnitude: [N, G] fp32; NaN where that is no number."""
    bits = largest.abs().view(torch.int32)
    exponent = ((bits + CARRY) >> MANTISSA_BITS) - LARGEST_EXPONENT
    scale = (exponent.clamp_(min=1) << MANTISSA_BITS).view(torch.float32)
    return scale.masked_fill_(bits >= INFINITY_BITS, torch.nan)
