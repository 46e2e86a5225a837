"""What a `Replicate` copies: derived on the device from the lists of experts, without a sync.

The host knows the size of every output from the counts, so nothing here waits for the device.

Notation: N = rows, W = width of the lists, M = copies, P = parts.
"""

from dataclasses import dataclass

import torch

from monta_megatron.chains.stages import ExpertRange


@dataclass(frozen=True, kw_only=True)
class Copies:
    """The copies of one chunk's rows, and the way back.

    Attributes:
        row: [M] the row that each copy is made from; copies are ordered by part, then by row.
        pairs: [M, W] the places of each copy's pairs in the flattened lists [N * W], padded with
            N * W. [M] where a copy is for one expert and keeps no list.
        by_row: [M] the copies, ordered by row, then by part.
        row_starts: [N + 1] where each row's copies begin in `by_row`.
        width: W.
    """

    row: torch.Tensor
    pairs: torch.Tensor
    by_row: torch.Tensor
    row_starts: torch.Tensor
    width: int

    def tensors(self) -> list[torch.Tensor]:
        """Everything that lies on the device."""
        return [self.row, self.pairs, self.by_row, self.row_starts]

    def pick(self, lists: torch.Tensor, missing: int) -> torch.Tensor:
        """Each copy's share of the lists: [N, W] -> [M, W], or [M] without lists."""
        return torch.cat([lists.flatten(), lists.new_full((1,), missing)])[self.pairs]

    def put_back(self, shares: torch.Tensor) -> torch.Tensor:
        """The transpose of `pick`: [M, W] or [M] -> [N, W]. Every pair lies in one copy: no sum."""
        num_rows = self.row_starts.shape[0] - 1
        flat = shares.new_zeros(num_rows * self.width + 1)
        flat.scatter_(0, self.pairs.flatten(), shares.flatten())
        return flat[:-1].view(num_rows, self.width)

    def sum_by_row(
        self, copies: torch.Tensor, dtype: torch.dtype, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the copies of each row in the order of their parts: [M, H] -> [N, H] in `dtype`.

        It uses no atomics, so the result has the same bits on every run. On a GPU, low-precision
        copies are added in fp32 and the sum is rounded to their own dtype.

        Args:
            copies: [M, H], or more rows, among which `places` finds the copies.
            dtype: dtype of the sum.
            places: [M] the row of `copies` in which each copy lies; None if they lie in order.
        """
        if self.by_row.shape[0] == 0:
            num_rows = self.row_starts.shape[0] - 1
            return copies.new_zeros(num_rows, copies.shape[1], dtype=dtype)
        by_row = self.by_row
        # On a GPU embedding_bag adds low-precision rows in fp32 by itself; on a CPU it does not.
        if copies.dtype == dtype or (copies.is_cuda and dtype == torch.float32):
            by_row = by_row if places is None else places[by_row]
            rows = _with_what_lies_between(copies)
        else:
            rows = (copies if places is None else copies[places]).to(dtype)
        sums = torch.nn.functional.embedding_bag(
            by_row, rows, self.row_starts, mode="sum", include_last_offset=True
        )
        return sums[:, : copies.shape[1]]


def _with_what_lies_between(rows: torch.Tensor) -> torch.Tensor:
    """Rows of a packed message with its other lanes: contiguous, if possible without a copy."""
    num_rows, stride = rows.shape[0], rows.stride(0)
    end_bytes = (rows.storage_offset() + num_rows * stride) * rows.element_size()
    if rows.stride(1) == 1 and end_bytes <= rows.untyped_storage().nbytes():
        return rows.as_strided((num_rows, stride), (stride, 1))
    return rows.contiguous()


def put_rows(into: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Put rows in their places: into[index[n]] = rows[n], for `rows` [N, H] or [N].

    The kernels work value by value, so the same bytes are passed as fewer, wider values, which
    takes a quarter of the time on a CPU (1,350 rows of 4 KiB).
    """
    _in_wide_values(into).index_copy_(0, index, _in_wide_values(rows))


def _in_wide_values(rows: torch.Tensor) -> torch.Tensor:
    """The rows as 16-byte values, if row size and stride are multiples of 16 bytes."""
    if rows.dim() < 2:
        return rows
    sizes_bytes = [size * rows.element_size() for size in (rows.shape[1], rows.stride(0))]
    return rows if any(size % 16 for size in sizes_bytes) else rows.view(torch.complex128)


def find_copies(ids: torch.Tensor, parts: ExpertRange, num_copies: int, keep_lists: bool) -> Copies:
    """The copies that rows with these lists need.

    Hand-worked: two rows with lists [1 4 5] and [0 5 -], two parts of experts 0-3 and 4-7: the
    copies are row 0, row 1 for the first part, then row 0, row 1 for the second; their lists are
    [1 - -], [0 - -], [4 5 -], [5 - -].

    Args:
        ids: [N, W] ascending experts of each row, padded with a number beyond the last expert.
        parts: the ranges of experts to copy for.
        num_copies: M, known from the counts.
        keep_lists: copies keep their share of the list, because they go on to other ranks.
    """
    num_rows, width = ids.shape
    # [N, W] the part of every pair; the pairs of a part follow each other in a list.
    part = ids.long() - parts.first
    if parts.size > 1:
        part = part.div(parts.size, rounding_mode="floor")
    skipped = (part < 0) | (part >= parts.num_parts)
    part.masked_fill_(skipped, parts.num_parts)
    # Only the first pair of each part stands for a copy.
    skipped[:, 1:] |= part[:, 1:] == part[:, :-1]

    rows = torch.arange(num_rows, device=ids.device)[:, None]
    key = torch.add(rows, part, alpha=num_rows).masked_fill_(skipped, parts.num_parts * num_rows)
    first_pair = key.flatten().argsort(stable=True)[:num_copies]
    row = first_pair // width

    pairs = first_pair
    if keep_lists:
        # [M, W] a copy's pairs: the first one, and those after it that belong to the same part.
        steps = torch.arange(width, device=ids.device)
        flat = first_pair[:, None] + steps
        own = flat.clamp(max=max(num_rows * width - 1, 0))
        part = part.flatten()
        in_list = (flat < (row + 1)[:, None] * width) & (part[own] == part[first_pair][:, None])
        pairs = flat.masked_fill_(~in_list, num_rows * width)

    row_starts = torch.nn.functional.pad((width - skipped.sum(dim=1)).cumsum(dim=0), (1, 0))
    return Copies(
        row=row,
        pairs=pairs,
        by_row=first_pair.argsort(stable=True),
        row_starts=row_starts,
        width=width,
    )
