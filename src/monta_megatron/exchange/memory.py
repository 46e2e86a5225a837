"""Memory of a pass: the messages of its buffers, and the columns of rows in them as views.

Columns: `rows` [N, H], the hidden states; `probs`, the routing probabilities, [N] where a row is a
permuted token and [N, W] where it is a token with up to W experts; `ids` [N, W], those experts.
Where a stage copies the rows anyway, it packs their columns into one message of bytes, so that each
collective is issued once; elsewhere each column is a message, sent in place, because packing would
cost a copy. The gaps between the columns of a packed row are zero: no uninitialised byte is sent.

Packed rows are aligned to 16 bytes. At H=4096 in bf16 (8,192 bytes) with fp32 probabilities the
columns besides the hidden values take 16 bytes (0.2%) of a permuted token, 64 of a token with 8
experts in dispatch, 32 in its backward.

On a device all buffers of one format share one allocation, made before the pass forks
(`exchange.streams`). On CPU ranks a buffer is allocated when it is first written and freed after
its last read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeAlias

import torch

from monta_megatron.chains.program import (
    BoundProgram,
    Column,
    Operation,
    Program,
    Release,
    offsets_bytes,
)


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


# Number, boundary, chunk and repeats of a buffer that uses a slot.
Use: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class MemoryLayout:
    """Formats and slots of a program's buffers, whatever the counts. Compared by identity.

    Attributes:
        formats: of each buffer.
        slots: by format, for each slot of its buffers that are held until the join, the buffers
            that use it.
    """

    formats: tuple[MessageFormat, ...]
    slots: tuple[tuple[MessageFormat, tuple[tuple[Use, ...], ...]], ...]


# W is part of the key, as the columns of tokens have that width. It is top-k, or, where a routing
# map is padded or tokens are dropped, one of a few numbers around it.
@lru_cache(maxsize=512)
def memory_layout(
    program: Program,
    max_experts_per_token: int,
    dtype: torch.dtype,
    sum_dtype: torch.dtype,
    prob_dtype: torch.dtype | None,
    device: torch.device,
) -> MemoryLayout:
    """Memory layout of a program: the same object for equal W, dtypes and device."""

    def shape(column: Column) -> tuple[int, ...]:
        if column.name == "rows":
            return (column.width or 0,)
        return (max_experts_per_token,) if column.width is None else ()

    def dtype_of(column: Column) -> torch.dtype:
        if column.name == "rows":
            return dtype if column.value_bytes == dtype.itemsize else sum_dtype
        return prob_dtype if column.name == "probs" and prob_dtype is not None else torch.int32

    formats = tuple(
        MessageFormat(
            shapes=tuple(map(shape, buffer.columns)),
            dtypes=tuple(map(dtype_of, buffer.columns)),
            packed=buffer.packed,
            device=device,
        )
        for buffer in program.buffers
    )
    by_format: dict[MessageFormat, dict[int, list[Use]]] = {}
    for buffer, format_ in zip(program.buffers, formats, strict=True):
        if buffer.release is Release.JOIN:
            assert buffer.chunk is not None, f"{buffer.name} is the caller's"
            use = buffer.number, buffer.boundary, buffer.chunk, buffer.repeats
            by_format.setdefault(format_, {}).setdefault(buffer.slot, []).append(use)
    slots = tuple(
        (format_, tuple(map(tuple, by_slot.values()))) for format_, by_slot in by_format.items()
    )
    return MemoryLayout(formats, slots)


class Memory:
    """Messages and columns of a pass's buffers, by their numbers in the program.

    Args:
        bound: the program of the pass with this micro-batch's rows.
        layout: of the program.
        given: buffers of the caller: the input, and the output if the caller has one.
    """

    def __init__(
        self, bound: BoundProgram, layout: MemoryLayout, given: dict[int, Columns]
    ) -> None:
        self._bound, self._layout = bound, layout
        # The messages and columns of an allocation, and a buffer's rows in them.
        self._reserved: dict[int, tuple[list[torch.Tensor], Columns, slice]] = {}
        # Views are made lazily: each costs the host as much as an operation.
        self._columns = given
        self._messages = {number: columns.tensors() for number, columns in given.items()}

    def reserve(self) -> None:
        """Allocate all buffers at once: one allocation per format, slot after slot."""
        rows_at = self._bound.bound.rows_at
        for format_, slots in self._layout.slots:
            places: list[tuple[int, slice]] = []
            end = 0
            for slot in slots:
                start = end
                for number, boundary, chunk, repeats in slot:
                    last = start + int(rows_at[boundary][chunk]) * repeats
                    places.append((number, slice(start, last)))
                    end = max(end, last)
            messages = _allocate(format_, end)
            columns = format_.columns(messages)
            for number, rows in places:
                self._reserved[number] = messages, columns, rows
        self.columns(self._bound.program.output)

    def messages(self, number: int) -> list[torch.Tensor]:
        """The messages of a buffer, which is allocated now if it was not reserved."""
        if number not in self._messages:
            if number in self._reserved:
                messages, _, rows = self._reserved[number]
                self._messages[number] = [message[rows] for message in messages]
            else:
                num_rows = self._bound.rows(self._bound.program.buffers[number])
                self._messages[number] = _allocate(self._layout.formats[number], int(num_rows))
        return self._messages[number]

    def columns(self, number: int) -> Columns:
        """The columns of a buffer, which is allocated now if it was not reserved."""
        if number not in self._columns:
            format_ = self._layout.formats[number]
            if format_.packed and number in self._reserved:
                _, columns, rows = self._reserved[number]
                self._columns[number] = columns.of_rows(rows)
            else:
                self._columns[number] = format_.columns(self.messages(number))
        return self._columns[number]

    def release(self, operation: Operation) -> None:
        """Free the buffers that no operation reads after this one, if they are released then."""
        for number in operation.reads:
            buffer = self._bound.program.buffers[number]
            if buffer.release is Release.LAST_READ and buffer.last_read == operation.number:
                self._messages.pop(number, None)
                self._columns.pop(number, None)


def _allocate(format_: MessageFormat, num_rows: int) -> list[torch.Tensor]:
    messages = format_.allocate(num_rows)
    format_.clear_gaps(messages)
    return messages
