"""Rows as PyTorch operations: lists of experts, copies of rows, gathers, scatters and sums.

Copies are derived on the device from the expert ids. The host knows the size of every output from
the counts, so nothing here waits for the device.

A copy carries its token's whole list of experts. Each expert belongs to one part, so later stages
find theirs in the list, and on the way back every other copy adds 0 to a probability.

Terms of a sum are added one after the other from +0.0, by the same operation on every device and
without atomics, so the bits are the same in every run. Low-precision rows are converted first, a
block of columns at a time, which takes `SUM_COLUMNS` values of the sum's dtype per row at any
hidden size.

Bound: a sum of K terms is off by at most K 2^-24 of the sum of their absolute values (in fp32), and
by one rounding, after each hop of partial sums; right before an AllGather's transpose this rank's
own term stays unrounded. Over h such hops the error in bf16 (rms, against fp64) is at most
1.05 sqrt(1 + h) times that of one fp32 sum rounded once.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from monta_megatron.chains.program import SUM_COLUMNS
from monta_megatron.chains.stages import Parts


def expert_ids_of(
    routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, width: int, fused: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts in ascending order, and their probabilities, without a sync.

    Args:
        routing_map_TE: bool.
        probs_TE: probabilities of the experts.
        width: W, the most experts of any token on any rank.
        fused: use Triton kernels.

    Returns:
        Probabilities [T, W], padded with 0, and experts [T, W] int32, padded with E.
    """
    return _ExpertIds.apply(routing_map_TE, probs_TE, width, fused)


class _ExpertIds(torch.autograd.Function):
    """Saves for backward only the map, which is kept alive anyway, and no indices [T, W]."""

    @staticmethod
    def forward(
        ctx: Any, routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, width: int, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        make_lists, ctx.lists_backward = _operations(fused)
        lists_TW, ids_TW = make_lists(routing_map_TE, probs_TE, width)
        ctx.save_for_backward(routing_map_TE)
        ctx.mark_non_differentiable(ids_TW)
        return lists_TW, ids_TW

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, gradient_TW: torch.Tensor, _: torch.Tensor
    ) -> tuple[None, torch.Tensor, None, None]:
        (routing_map_TE,) = ctx.saved_tensors
        return None, ctx.lists_backward(routing_map_TE, gradient_TW), None, None


@cache
def _operations(fused: bool) -> tuple[Callable[..., Any], Callable[..., torch.Tensor]]:
    """`make_lists` and `lists_backward`; Triton may be missing where no kernel runs."""
    if not fused:
        return make_lists, lists_backward
    from monta_megatron.exchange.kernels import routing

    return routing.make_lists, routing.lists_backward


def make_lists(
    routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of the probabilities and of the experts; see `expert_ids_of`."""
    num_experts = routing_map_TE.shape[1]
    descending_E = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=probs_TE.device)
    scores_TW = (routing_map_TE * descending_E).topk(width, dim=1).values
    ids_TW = num_experts - scores_TW
    experts_TW = ids_TW.clamp(max=num_experts - 1)
    return probs_TE.gather(1, experts_TW.long()).masked_fill_(scores_TW == 0, 0), ids_TW


def lists_backward(routing_map_TE: torch.Tensor, gradient_TW: torch.Tensor) -> torch.Tensor:
    """Gradient [T, E] of the probabilities from that of their lists."""
    # Position of each expert among its token's.
    positions_TE = (routing_map_TE.cumsum(dim=1) - 1).clamp_(min=0)
    return gradient_TW.gather(1, positions_TE).masked_fill_(~routing_map_TE, 0)


class Copies(NamedTuple):
    """Copies of one chunk's rows, and the index back to the rows; int64.

    Memory is proportional to the copies, at most one per token-expert pair, and independent of W.

    Attributes:
        row: [M] source row of each copy; copies are ordered by part, then by row.
        by_row: [M] copies, ordered by row, then by part.
        row_starts: [N + 1] start of each row's copies in `by_row`, and the end.
        place: [M] position of each copy's expert in its row's list; None for parts of several
            experts.
    """

    row: torch.Tensor
    by_row: torch.Tensor
    row_starts: torch.Tensor
    place: torch.Tensor | None = None

    @staticmethod
    def sizes(num_rows: int, num_copies: int, parts: Parts) -> list[int]:
        """Lengths of the index tensors."""
        of_experts = [num_copies] if parts.size == 1 else []
        return [num_copies, num_copies, num_rows + 1, *of_experts]

    def sum_by_row(
        self, copies: torch.Tensor, dtype: torch.dtype, index_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the copies of each row in the order of their parts: [M, H] -> [N, H] in `dtype`.

        Args:
            copies: [M, H], or more rows, of which `index_M` names the copies.
            dtype: dtype of the sum.
            index_M: row of each copy in `copies`; None if they are in order.
        """
        order_M = self.by_row
        if copies.dtype != dtype:
            copies = (copies if index_M is None else copies[index_M]).to(dtype)
        elif index_M is not None:
            order_M = index_M[order_M]
        return sum_rows(copies, order_M, self.row_starts)


class PartBounds(NamedTuple):
    """Bounds of the parts of a `Duplicate` on the device, for all chunks.

    Attributes:
        bounds: [most N, P + 1] first expert of each part, and the end of the last part.
        numbers: 0, 1, 2, ... up to the most rows or copies.
    """

    bounds: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, parts: Parts, num_rows: int, num_copies: int, ids: torch.Tensor) -> "PartBounds":
        """For chunks of at most `num_rows` and `num_copies`, in the dtype and device of `ids`."""
        end = parts.first + parts.size * parts.num_parts
        bounds = torch.arange(parts.first, end + 1, parts.size, dtype=ids.dtype, device=ids.device)
        return cls(
            bounds.expand(num_rows, -1).contiguous(),
            torch.arange(max(num_rows, num_copies) + 1, device=ids.device),
        )


def find_copies(ids_NW: torch.Tensor, parts: PartBounds, copies: Copies) -> None:
    """Derive the copies of rows from their experts.

    Hand-worked: two rows with ids [1 4 5] and [0 5 -], two parts of experts 0-3 and 4-7. The
    places where experts 0, 4 and 8 would stand are [0 1 3] and [0 1 2], so both rows have experts
    in both parts: the copies are row 0, row 1 for the first part, then row 0, row 1 for the second.

    Args:
        ids_NW: ascending experts of each row, padded with a number beyond the last expert.
        parts: the parts of the stage.
        copies: receives the result; its sizes are known from the counts.
    """
    num_rows, num_copies = len(ids_NW), len(copies.row)
    # [N, P + 1] -> [P + 1, N]
    places_P1N = torch.searchsorted(ids_NW.contiguous(), parts.bounds[:num_rows]).T.contiguous()
    is_copy_PN = places_P1N[1:] > places_P1N[:-1]
    copies_so_far = is_copy_PN.flatten().cumsum(dim=0)
    # In [P, N], flattened.
    position_M = torch.searchsorted(copies_so_far, parts.numbers[1 : num_copies + 1])
    torch.remainder(position_M, max(num_rows, 1), out=copies.row)
    if copies.place is not None:
        torch.index_select(places_P1N.flatten(), 0, position_M, out=copies.place)
        # If ids and counts disagree, stay inside the lists.
        copies.place.clamp_(max=ids_NW.shape[1] - 1)
    # Reuse `position_M` for the rows in ascending order.
    torch.sort(copies.row, stable=True, out=(position_M, copies.by_row))
    torch.searchsorted(position_M, parts.numbers[: num_rows + 1], out=copies.row_starts)


def copy_rows(into_NH: torch.Tensor, rows_MH: torch.Tensor, index_N: torch.Tensor) -> None:
    """Gather rows: into[n] = rows[index[n]]; tensors may lack the axis H."""
    into_NH, rows_MH = _in_wide_values(into_NH, rows_MH)
    torch.index_select(rows_MH, 0, index_N, out=into_NH)


def put_rows(into_MH: torch.Tensor, index_N: torch.Tensor, rows_NH: torch.Tensor) -> None:
    """Scatter rows: into[index[n]] = rows[n]; tensors may lack the axis H."""
    into_MH, rows_NH = _in_wide_values(into_MH, rows_NH)
    into_MH.index_copy_(0, index_N, rows_NH)


def _in_wide_values(into: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View both as 16-byte values, if all their rows begin and end at multiples of 16 bytes.

    torch's kernels copy value by value. The same bytes as fewer, wider values take a quarter of the
    time on a CPU (1,350 rows of 4 KiB scattered).
    """
    if rows.dim() < 2:
        return into, rows
    sizes = [rows.shape[1]]
    for tensor in (into, rows):
        sizes += [tensor.stride(0), int(tensor.storage_offset())]
    if any(size * rows.element_size() % 16 for size in sizes):
        return into, rows
    return into.view(torch.complex128), rows.view(torch.complex128)


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
