"""Payloads: the columns of a row in one message, or in one message each.

Columns: `rows` [N, H], the hidden states; `probs`, the routing probabilities, [N] where a row is a
permuted token and [N, W] where it is a token with up to W experts; `ids` [N, W], those experts.
Where a stage copies the rows anyway, the columns after it share a message of bytes, and each
collective is issued once; where nothing is copied they are sent in place, column by column, because
packing them would cost a copy.

No uninitialised byte is sent: those between the columns of a packed row are zero.

Overhead of a packed row: the probabilities, the ids, and alignment to 16 bytes. At H=4096 in bf16
(8,192 bytes) with fp32 probabilities that is 16 bytes (0.2%) for a permuted token; for
a token with 8 experts it is 8 * (4 + 4) = 64 bytes (0.8%) in dispatch and 32 bytes in its backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from monta_megatron.chains.program import Buffer, Column, Program, offsets_bytes


class Columns(NamedTuple):
    """The columns of one pass, for all rows or for the rows of a chunk.

    Attributes:
        rows: [N, H].
        probs: [N] or [N, W], or None in a pass that carries rows alone.
        ids: [N, W] int32, or None; they travel in dispatch forward only.
    """

    rows: torch.Tensor
    probs: torch.Tensor | None = None
    ids: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """The columns that are present."""
        return [column for column in (self.rows, self.probs, self.ids) if column is not None]

    def of_rows(self, rows: slice) -> "Columns":
        """The columns of some rows."""
        probs, ids = self.probs, self.ids
        return Columns(
            self.rows[rows],
            None if probs is None else probs[rows],
            None if ids is None else ids[rows],
        )


@dataclass(frozen=True, kw_only=True)
class Payload:
    """The layout of a message: the shape and type of each column of a row, and where it lies.

    Attributes:
        shapes: shape of each column after the row axis: (H,), then () or (W,), then (W,).
        dtypes: dtype of each column.
        packed: the columns share one message of bytes.
        device: where messages are allocated.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    packed: bool
    device: torch.device

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], packed: bool) -> "Payload":
        """The layout for columns like these; a single one is never packed."""
        return cls(
            shapes=tuple(tuple(tensor.shape[1:]) for tensor in tensors),
            dtypes=tuple(tensor.dtype for tensor in tensors),
            packed=packed and len(tensors) > 1,
            device=tensors[0].device,
        )

    def allocate(self, num_rows: int) -> list[torch.Tensor]:
        """Uninitialised messages for `num_rows` rows."""
        if self.packed:
            row_bytes = self._offsets_bytes[-1]
            return [torch.empty(num_rows, row_bytes, dtype=torch.uint8, device=self.device)]
        return [
            torch.empty(num_rows, *shape, dtype=dtype, device=self.device)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]

    def columns(self, messages: Sequence[torch.Tensor]) -> Columns:
        """The columns inside `messages`, as views."""
        if not self.packed:
            return Columns(*messages)
        views = []
        offsets = self._offsets_bytes
        for shape, dtype, offset in zip(self.shapes, self.dtypes, offsets, strict=False):
            num_bytes = shape[0] * dtype.itemsize if shape else dtype.itemsize
            view = messages[0][:, offset : offset + num_bytes].view(dtype)
            views.append(view if shape else view[:, 0])
        return Columns(*views)

    def clear_gaps(self, messages: Sequence[torch.Tensor]) -> None:
        """Zero the bytes of packed rows that belong to no column."""
        for gap in self._gaps_bytes:
            messages[0][:, gap].zero_()

    @cached_property
    def _gaps_bytes(self) -> list[slice]:
        """Padding bytes of a row, before an aligned column or the next row."""
        if not self.packed:
            return []
        ends = [
            offset + (shape[0] if shape else 1) * dtype.itemsize
            for offset, shape, dtype in zip(
                self._offsets_bytes, self.shapes, self.dtypes, strict=False
            )
        ]
        gaps = zip(ends, self._offsets_bytes[1:], strict=True)
        return [slice(end, begin) for end, begin in gaps if end < begin]

    @cached_property
    def _offsets_bytes(self) -> list[int]:
        """Offsets of the columns in a packed row, followed by the size of the row."""
        return offsets_bytes(
            [
                (shape[0] if shape else 1, dtype.itemsize)
                for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
            ]
        )


@lru_cache(maxsize=512)
def payloads_of(
    program: Program,
    max_experts_per_token: int,
    dtypes: tuple[tuple[str, int, torch.dtype], ...],
    device: torch.device,
) -> tuple[Payload, ...]:
    """Layout of a row in the messages of each buffer of a program.

    Args:
        program: its structure.
        max_experts_per_token: W.
        dtypes: (name of a column, bytes of a value, dtype); the last one counts.
        device: where messages are allocated.
    """
    dtype_of = {(name, value_bytes): dtype for name, value_bytes, dtype in dtypes}

    def shape(column: Column) -> tuple[int, ...]:
        if column.name == "rows":
            return (column.width or 0,)
        return (max_experts_per_token,) if column.width is None else ()

    def payload(buffer: Buffer) -> Payload:
        return Payload(
            shapes=tuple(map(shape, buffer.columns)),
            dtypes=tuple(dtype_of[each.name, each.value_bytes] for each in buffer.columns),
            packed=buffer.packed,
            device=device,
        )

    return tuple(map(payload, program.buffers))
