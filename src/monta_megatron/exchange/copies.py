"""What a `Duplicate` copies: derived on the device from the expert ids, without a sync.

The host knows the size of every output from the counts, so nothing here waits for the device.

Notation: N = rows, W = most experts of any row, M = copies, P = parts.
"""

from dataclasses import dataclass

import torch

from monta_megatron.chains.stages import ExpertRange
from monta_megatron.exchange.sums import sum_rows


@dataclass(frozen=True, kw_only=True)
class Copies:
    """The copies of one chunk's rows, and the way back.

    What is kept grows with the copies, of which there are no more than token-expert pairs, and not
    with W.

    Attributes:
        row: [M] the row that each copy is made from; copies are ordered by part, then by row.
        first_position: [M] where each copy's experts begin in the flattened ids [N * W].
        num_experts: [M] how many experts it is for; they follow each other.
        by_row: [M] the copies, ordered by row, then by part.
        row_starts: [N + 1] where each row's copies begin in `by_row`.
        width: W.
    """

    row: torch.Tensor
    first_position: torch.Tensor
    num_experts: torch.Tensor
    by_row: torch.Tensor
    row_starts: torch.Tensor
    width: int

    def tensors(self) -> list[torch.Tensor]:
        """Everything that lies on the device."""
        return [self.row, self.first_position, self.num_experts, self.by_row, self.row_starts]

    def positions(self, per_expert: bool) -> torch.Tensor:
        """Where each copy's experts lie in the flattened ids.

        Args:
            per_expert: every copy is for one expert.

        Returns:
            [M] if it is, or [M, W], padded with N * W.
        """
        if per_expert:
            return self.first_position
        steps = torch.arange(self.width, device=self.first_position.device)
        positions = self.first_position[:, None] + steps
        return positions.masked_fill_(steps >= self.num_experts[:, None], self._num_positions)

    def put_back(self, shares: torch.Tensor) -> torch.Tensor:
        """The transpose of `pick`: [M, W] or [M] -> [N, W]. Every expert has one copy: no sum."""
        flat = shares.new_zeros(self._num_positions + 1)
        positions = self.positions(per_expert=shares.dim() == 1)
        flat.scatter_(0, positions.flatten(), shares.flatten())
        return flat[:-1].view(-1, self.width)

    def sum_by_row(
        self, copies: torch.Tensor, dtype: torch.dtype, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add the copies of each row in the order of their parts: [M, H] -> [N, H] in `dtype`.

        Args:
            copies: [M, H], or more rows, of which `index` names the copies.
            dtype: dtype of the sum.
            index: [M] the row of `copies` in which each copy lies; None if they lie in order.
        """
        order = self.by_row
        if copies.dtype != dtype:
            copies = (copies if index is None else copies[index]).to(dtype)
        elif index is not None:
            order = index[order]
        return sum_rows(copies, order, self.row_starts)

    @property
    def _num_positions(self) -> int:
        """N * W."""
        return (self.row_starts.shape[0] - 1) * self.width


def pick(values: torch.Tensor, positions: torch.Tensor, missing: int) -> torch.Tensor:
    """What lies at these positions of [N, W] values; `missing` beyond the last of them."""
    return torch.cat([values.flatten(), values.new_full((1,), missing)])[positions]


def put_rows(into: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> None:
    """Put rows where they belong: into[index[n]] = rows[n], for `rows` [N, H] or [N].

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
    """The copies that rows with these experts need.

    Hand-worked: two rows with ids [1 4 5] and [0 5 -], two parts of experts 0-3 and 4-7: the
    copies are row 0, row 1 for the first part, then row 0, row 1 for the second; their ids are
    [1 - -], [0 - -], [4 5 -], [5 - -].

    Args:
        ids: [N, W] ascending experts of each row, padded with a number beyond the last expert.
        parts: the ranges of experts to copy for.
        num_copies: M, known from the counts.
    """
    num_rows, width = ids.shape
    # [N, W] the part of every expert; the experts of a part follow each other.
    part = ids.long() - parts.first
    if parts.size > 1:
        part = part.div(parts.size, rounding_mode="floor")
    # [N, W] where the experts of the same part end in their row.
    ends = torch.searchsorted(part, part, right=True)
    # Only the first expert of each part stands for a copy.
    skipped = (part < 0) | (part >= parts.num_parts)
    skipped[:, 1:] |= part[:, 1:] == part[:, :-1]

    rows = torch.arange(num_rows, device=ids.device)[:, None]
    key = torch.add(rows, part, alpha=num_rows).masked_fill_(skipped, parts.num_parts * num_rows)
    # Copied, because a slice would keep the memory of all.
    first_position = key.flatten().argsort(stable=True)[:num_copies].clone()
    row_starts = torch.nn.functional.pad((width - skipped.sum(dim=1)).cumsum(dim=0), (1, 0))
    return Copies(
        row=first_position // width,
        first_position=first_position,
        num_experts=ends.flatten()[first_position] - first_position % width,
        by_row=first_position.argsort(stable=True),
        row_starts=row_starts,
        width=width,
    )
