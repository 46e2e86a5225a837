"""What a `Duplicate` copies: derived on the device from the lists of experts, without a sync.

The host knows the size of every output from the counts, so nothing here waits for the device.

Notation: N = rows, W = width of the lists, M = copies, P = parts.
"""

from dataclasses import dataclass

import torch

from monta_megatron.chains.stages import ExpertRange
from monta_megatron.exchange.sums import sum_rows


@dataclass(frozen=True, kw_only=True)
class Copies:
    """The copies of one chunk's rows, and the way back.

    What is kept grows with the copies, of which there are no more than (row, expert) pairs, and not
    with the longest list.

    Attributes:
        row: [M] the row that each copy is made from; copies are ordered by part, then by row.
        first_pair: [M] where each copy's pairs begin in the flattened lists [N * W].
        num_pairs: [M] how many pairs it has; they follow each other.
        by_row: [M] the copies, ordered by row, then by part.
        row_starts: [N + 1] where each row's copies begin in `by_row`.
        width: W.
    """

    row: torch.Tensor
    first_pair: torch.Tensor
    num_pairs: torch.Tensor
    by_row: torch.Tensor
    row_starts: torch.Tensor
    width: int

    def tensors(self) -> list[torch.Tensor]:
        """Everything that lies on the device."""
        return [self.row, self.first_pair, self.num_pairs, self.by_row, self.row_starts]

    def pairs(self, in_lists: bool) -> torch.Tensor:
        """The places of each copy's pairs in the flattened lists.

        Args:
            in_lists: copies keep their share of the list; else each is for one expert.

        Returns:
            [M, W], padded with N * W; or [M].
        """
        if not in_lists:
            return self.first_pair
        steps = torch.arange(self.width, device=self.first_pair.device)
        places = self.first_pair[:, None] + steps
        return places.masked_fill_(steps >= self.num_pairs[:, None], self._num_pairs_of_rows)

    def put_back(self, shares: torch.Tensor) -> torch.Tensor:
        """The transpose of `pick`: [M, W] or [M] -> [N, W]. Every pair lies in one copy: no sum."""
        flat = shares.new_zeros(self._num_pairs_of_rows + 1)
        pairs = self.pairs(in_lists=shares.dim() > 1)
        flat.scatter_(0, pairs.flatten(), shares.flatten())
        return flat[:-1].view(-1, self.width)

    def sum_by_row(
        self, copies: torch.Tensor, dtype: torch.dtype, places: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the copies of each row in the order of their parts: [M, H] -> [N, H] in `dtype`.

        Args:
            copies: [M, H], or more rows, among which `places` finds the copies.
            dtype: dtype of the sum.
            places: [M] the row of `copies` in which each copy lies; None if they lie in order.
        """
        order = self.by_row
        if copies.dtype != dtype:
            copies = (copies if places is None else copies[places]).to(dtype)
        elif places is not None:
            order = places[order]
        return sum_rows(copies, order, self.row_starts)

    @property
    def _num_pairs_of_rows(self) -> int:
        """N * W."""
        return (self.row_starts.shape[0] - 1) * self.width


def pick(lists: torch.Tensor, pairs: torch.Tensor, missing: int) -> torch.Tensor:
    """What lies at these places of [N, W] lists; `missing` where there is no pair."""
    return torch.cat([lists.flatten(), lists.new_full((1,), missing)])[pairs]


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


def find_copies(ids: torch.Tensor, parts: ExpertRange, num_copies: int) -> Copies:
    """The copies that rows with these lists need.

    Hand-worked: two rows with lists [1 4 5] and [0 5 -], two parts of experts 0-3 and 4-7: the
    copies are row 0, row 1 for the first part, then row 0, row 1 for the second; their lists are
    [1 - -], [0 - -], [4 5 -], [5 - -].

    Args:
        ids: [N, W] ascending experts of each row, padded with a number beyond the last expert.
        parts: the ranges of experts to copy for.
        num_copies: M, known from the counts.
    """
    num_rows, width = ids.shape
    # [N, W] the part of every pair; the pairs of a part follow each other in a list.
    part = ids.long() - parts.first
    if parts.size > 1:
        part = part.div(parts.size, rounding_mode="floor")
    # [N, W] where the pairs of the same part end in the list.
    ends = torch.searchsorted(part, part, right=True)
    # Only the first pair of each part stands for a copy.
    skipped = (part < 0) | (part >= parts.num_parts)
    skipped[:, 1:] |= part[:, 1:] == part[:, :-1]

    rows = torch.arange(num_rows, device=ids.device)[:, None]
    key = torch.add(rows, part, alpha=num_rows).masked_fill_(skipped, parts.num_parts * num_rows)
    # Copied, because a slice would keep the memory of all.
    first_pair = key.flatten().argsort(stable=True)[:num_copies].clone()
    row_starts = torch.nn.functional.pad((width - skipped.sum(dim=1)).cumsum(dim=0), (1, 0))
    return Copies(
        row=first_pair // width,
        first_pair=first_pair,
        num_pairs=ends.flatten()[first_pair] - first_pair % width,
        by_row=first_pair.argsort(stable=True),
        row_starts=row_starts,
        width=width,
    )
