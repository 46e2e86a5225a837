"""Messages: rows as a collective sends them, and the columns of rows in them as views.

Columns: `rows` [N, H], the hidden states; `probs`, the routing probabilities, [N] where a row is a
permuted token and [N, W] where it is a token with up to W experts; `ids` [N, W], those experts.
Where a stage copies the rows anyway, it packs their columns into one message of bytes, so that each
collective is issued once; elsewhere each column is a message, sent in place, because packing would
cost a copy. The gaps between the columns of a packed row are zero: no uninitialised byte is sent.

Overhead of a packed row: the probabilities, the ids, and alignment to 16 bytes. At H=4096 in bf16
(8,192 bytes) with fp32 probabilities that is 16 bytes (0.2%) for a permuted token; for
a token with 8 experts it is 8 * (4 + 4) = 64 bytes (0.8%) in dispatch and 32 bytes in its backward.

Notation: N = rows, H = hidden size, W = most experts of any token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from monta_megatron.chains.program import offsets_bytes


class Columns(NamedTuple):
    """The columns of one pass, for all rows or for the rows of a chunk.

    Attributes:
        rows: [N, H].
        probs: [N] or [N, W]; None in a pass of rows alone.
        ids: [N, W] int32; None except in dispatch forward.
    """

    rows: torch.Tensor
    probs: torch.Tensor | None = None
    ids: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All columns but those that are None."""
        return [column for column in self if column is not None]

    def of_rows(self, rows: slice) -> "Columns":
        """The same columns, restricted to `rows`."""
        probs, ids = self.probs, self.ids
        return Columns(
            self.rows[rows],
            None if probs is None else probs[rows],
            None if ids is None else ids[rows],
        )


@dataclass(frozen=True, kw_only=True)
class MessageFormat:
    """Shape, dtype and offset of each column of a row.

    Attributes:
        shapes: shape of each column after the row axis: (H,), then () or (W,), then (W,).
        dtypes: dtype of each column.
        packed: the columns share one message of bytes; else each is a message.
        device: of the messages.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    packed: bool
    device: torch.device

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], packed: bool) -> "MessageFormat":
        """The format of `tensors`; a single column is never packed."""
        return cls(
            shapes=tuple(tuple(tensor.shape[1:]) for tensor in tensors),
            dtypes=tuple(tensor.dtype for tensor in tensors),
            packed=packed and len(tensors) > 1,
            device=tensors[0].device,
        )

    def allocate(self, num_rows: int) -> list[torch.Tensor]:
        """Uninitialised messages for `num_rows` rows."""
        if self.packed:
            return [torch.empty(num_rows, *self.row_bytes, dtype=torch.uint8, device=self.device)]
        return [
            torch.empty(num_rows, *shape, dtype=dtype, device=self.device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    def columns(self, messages: Sequence[torch.Tensor]) -> Columns:
        """The columns inside `messages`, as views."""
        if not self.packed:
            return Columns(*messages)
        views = []
        for shape, dtype, place in zip(self.shapes, self.dtypes, self._places_bytes, strict=True):
            view = messages[0][:, place].view(dtype)
            views.append(view if shape else view[:, 0])
        return Columns(*views)

    def clear_gaps(self, messages: Sequence[torch.Tensor]) -> None:
        """Zero the bytes of packed rows that belong to no column."""
        for gap in self._gaps_bytes:
            messages[0][:, gap].zero_()

    @cached_property
    def row_bytes(self) -> list[int]:
        """Bytes of a row in each message."""
        if self.packed:
            return offsets_bytes(self._sizes)[-1:]
        return [num_values * value_bytes for num_values, value_bytes in self._sizes]

    @cached_property
    def _sizes(self) -> list[tuple[int, int]]:
        """Values of each column in a row, and bytes of a value."""
        return [
            (math.prod(shape), dtype.itemsize)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    @cached_property
    def _places_bytes(self) -> list[slice]:
        """Bytes of each column in a packed row."""
        offsets = offsets_bytes(self._sizes)
        return [
            slice(offset, offset + num_values * value_bytes)
            for offset, (num_values, value_bytes) in zip(offsets, self._sizes, strict=False)
        ]

    @cached_property
    def _gaps_bytes(self) -> list[slice]:
        """Padding of a packed row, before an aligned column or the next row."""
        if not self.packed:
            return []
        starts = [*(place.start for place in self._places_bytes[1:]), *self.row_bytes]
        ends = [place.stop for place in self._places_bytes]
        return [slice(*gap) for gap in zip(ends, starts, strict=True) if gap[0] < gap[1]]
