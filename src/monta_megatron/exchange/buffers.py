"""Buffers of a pass: its messages, and the columns of rows in them as views.

Columns: `rows` [N, H], the hidden states; `probs`, the routing probabilities, [N] where a row is a
permuted token and [N, W] where it is a token with up to W experts; `ids` [N, W], those experts.
Where a stage copies the rows anyway, it packs their columns into one message of bytes, so that each
collective is issued once; elsewhere each column is a message, sent in place, because packing would
cost a copy. The gaps between the columns of a packed row are zero: no uninitialised byte is sent.

Overhead of a packed row: the probabilities, the ids, and alignment to 16 bytes. At H=4096 in bf16
(8,192 bytes) with fp32 probabilities that is 16 bytes (0.2%) for a permuted token; for
a token with 8 experts it is 8 * (4 + 4) = 64 bytes (0.8%) in dispatch and 32 bytes in its backward.

On a device all buffers of one format share one allocation, made on the caller's stream before the
pass forks. So every use comes after the allocation, and memory freed on the caller's stream can be
used at once. On CPU ranks a buffer is allocated when it is first written and freed after its last
read.

Notation: N = rows, H = hidden size, W = most experts of any token.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import (
    ALIGNMENT_BYTES,
    INPUT,
    Column,
    Operation,
    Pass,
    Policy,
    Program,
    Release,
    RowFormat,
    offsets_bytes,
)
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.copies import Copies, Parts
from monta_megatron.exchange.exchange import Exchange

if TYPE_CHECKING:
    from monta_megatron.exchange.kernels.tiles import Launches


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


class _Allocation(NamedTuple):
    """Memory of all buffers of one format.

    Attributes:
        messages: of all of its rows.
        columns: in those messages.
    """

    messages: list[torch.Tensor]
    columns: Columns


class Buffers:
    """The buffers of one pass over an exchange, by their numbers in its program.

    Args:
        exchange: this micro-batch's exchange.
        pass_: the pass.
        columns: its input, contiguous.
        policy: how the program is executed.
        output: buffers for the result; None allocates them.

    Attributes:
        exchange: this micro-batch's exchange.
        bound: the program of the pass with this micro-batch's rows.
        sum_dtype: dtype of the sums over copies of a row.
        indices: row indices and copies, which the passes of the exchange share.
        formats: of each buffer.
        parts: the parts of a `Duplicate` on the device, by its position; see `operations`.
    """

    def __init__(
        self,
        exchange: Exchange,
        pass_: Pass,
        columns: Columns,
        policy: Policy,
        output: Columns | None = None,
    ) -> None:
        rows_NH, probs, device = columns.rows, columns.probs, columns.rows.device
        width = exchange.max_experts_per_token
        self.exchange = exchange
        self.sum_dtype = promoted(exchange.sum_dtype, rows_NH.dtype)
        row = RowFormat(
            hidden_size=rows_NH.shape[1],
            value_bytes=rows_NH.itemsize,
            prob_bytes=0 if probs is None else probs.itemsize,
            sum_bytes=self.sum_dtype.itemsize,
        )
        self.bound = lower(exchange.bound_chain, pass_, row, width, policy, order=exchange.order)
        program = self.bound.program
        prob_dtype = None if probs is None else probs.dtype
        plan = _plan(program, width, rows_NH.dtype, self.sum_dtype, prob_dtype, device)
        self.formats = plan.formats
        self.indices = exchange.indices(device)
        self.parts: dict[int, Parts] = {}
        # Positions of the first and the last stage of the pass.
        last = len(exchange.bound_chain.stages) - 1
        self._first, self._last = (last, 0) if pass_.transpose else (0, last)
        # Rows of a buffer in an allocation; none on CPU ranks.
        self._reserved: dict[int, tuple[_Allocation, slice]] = {}
        # Views are made lazily: each costs the host as much as an operation.
        self._messages: dict[int, list[torch.Tensor]] = {INPUT: columns.tensors()}
        self._columns: dict[int, Columns] = {INPUT: columns}
        # Runs of rows in the input or the output, by its number and the chunk.
        self._runs: dict[tuple[int, int], Columns] = {}
        if output is not None:
            self._columns[program.output] = output
            self._messages[program.output] = output.tensors()
        if policy != "host":
            self._reserve(plan)
        self._launches: dict[int, Launches] | None = plan.launches
        if policy == "fused" and not (
            _is_regular(columns) and _is_regular(self.columns(program.output))
        ):
            self._launches = None

    @property
    def pass_name(self) -> str:
        """Name of the pass."""
        return self.bound.program.pass_.name

    def messages(self, number: int) -> list[torch.Tensor]:
        """The messages of a buffer, which CPU ranks allocate at its first write."""
        if number not in self._messages:
            if number in self._reserved:
                allocation, rows = self._reserved[number]
                self._messages[number] = [message[rows] for message in allocation.messages]
            else:
                num_rows = self.bound.rows(self.bound.program.buffers[number])
                self._messages[number] = self._allocate(self.formats[number], int(num_rows))
        return self._messages[number]

    def columns(self, number: int) -> Columns:
        """The columns of a buffer."""
        if number not in self._columns:
            format_ = self.formats[number]
            if format_.packed and number in self._reserved:
                allocation, rows = self._reserved[number]
                self._columns[number] = allocation.columns.of_rows(rows)
            else:
                self._columns[number] = format_.columns(self.messages(number))
        return self._columns[number]

    def source(self, operation: Operation) -> tuple[Columns, torch.Tensor | None]:
        """Input columns of an operation; if its rows are not all of them, their indices [N]."""
        number = operation.reads[0]
        if number != INPUT:
            return self.columns(number), None
        return self._of_chunk(number, self._first, operation.chunk)

    def sent(self, operation: Operation) -> list[torch.Tensor]:
        """Input messages of an operation."""
        number = operation.reads[0]
        return self.messages(number) if number != INPUT else self.source(operation)[0].tensors()

    def target(self, operation: Operation) -> tuple[Columns, torch.Tensor | None]:
        """Output columns of an operation; if its rows are not all of them, their indices [N]."""
        number = operation.writes[0]
        if number != self.bound.program.output:
            return self.columns(number), None
        return self._of_chunk(number, self._last, operation.chunk)

    def copies(self, operation: Operation) -> Copies:
        """Copies of an operation's chunk."""
        return self.indices.copies(operation.position, operation.chunk)

    def group(self, operation: Operation) -> PeerGroup:
        """Group of a collective, or of the sum over ranks to which a "reduce" belongs."""
        assert operation.group is not None, f"{operation.kind} has no group"
        return self.exchange.groups[operation.group]

    def launches(self, operation: Operation) -> "Launches":
        """Kernel launches that all chunks share, and later passes; new ones for irregular rows."""
        return {} if self._launches is None else self._launches[operation.series]

    def release(self, operation: Operation) -> None:
        """Free the buffers that an operation is the last to read, if they are released then."""
        for number in operation.reads:
            buffer = self.bound.program.buffers[number]
            if buffer.release is Release.LAST_READ and buffer.last_read == operation.number:
                self._messages.pop(number, None)
                self._columns.pop(number, None)

    def _of_chunk(
        self, number: int, position: int, chunk: int
    ) -> tuple[Columns, torch.Tensor | None]:
        """Columns of a buffer of all chunks, and the row indices of one chunk."""
        segments = self.exchange.bound_chain.stages[position].segments
        if segments is None:
            return self.columns(number), None
        if not segments.is_slice:
            return self.columns(number), self.indices.rows(position, segments)[chunk]
        key = number, chunk
        if key not in self._runs:
            self._runs[key] = self.columns(number).of_rows(segments.slice_of(chunk))
        return self._runs[key], None

    def _reserve(self, plan: "_Plan") -> None:
        """Allocate all buffers of chunks: one allocation per format, slot after slot."""
        rows_at = self.bound.bound.rows_at
        for format_, slots in plan.slots.items():
            places: list[tuple[int, slice]] = []
            end = 0
            for slot in slots:
                start = end
                for number, boundary, chunk, repeats in slot:
                    last = start + int(rows_at[boundary][chunk]) * repeats
                    places.append((number, slice(start, last)))
                    end = max(end, last)
            messages = self._allocate(format_, end)
            allocation = _Allocation(messages, format_.columns(messages))
            for number, rows in places:
                self._reserved[number] = allocation, rows
        self.columns(self.bound.program.output)

    def _allocate(self, format_: MessageFormat, num_rows: int) -> list[torch.Tensor]:
        messages = format_.allocate(num_rows)
        format_.clear_gaps(messages)
        return messages


class _Use(NamedTuple):
    """A buffer that uses a slot; attributes as of `Buffer`."""

    number: int
    boundary: int
    chunk: int
    repeats: int


class _Plan(NamedTuple):
    """Facts about a program and its dtypes that its passes share.

    Attributes:
        formats: of each buffer.
        slots: by format, for each slot of its buffers that are held until the join, the buffers
            that use it.
        launches: kernel launches by series of operations.
    """

    formats: tuple[MessageFormat, ...]
    slots: dict[MessageFormat, list[list[_Use]]]
    launches: dict[int, "Launches"]


# W is part of the key, as the columns of tokens have that width. It is top-k, or, where a routing
# map is padded or tokens are dropped, one of a few numbers around it; each binds its launches once.
@lru_cache(maxsize=512)
def _plan(
    program: Program,
    max_experts_per_token: int,
    dtype: torch.dtype,
    sum_dtype: torch.dtype,
    prob_dtype: torch.dtype | None,
    device: torch.device,
) -> _Plan:
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
    slots: dict[MessageFormat, dict[int, list[_Use]]] = {}
    for buffer, format_ in zip(program.buffers, formats, strict=True):
        if buffer.release is Release.JOIN:
            assert buffer.chunk is not None, f"{buffer.name} is the caller's"
            use = _Use(buffer.number, buffer.boundary, buffer.chunk, buffer.repeats)
            slots.setdefault(format_, {}).setdefault(buffer.slot, []).append(use)
    return _Plan(
        formats=formats,
        slots={format_: list(by_slot.values()) for format_, by_slot in slots.items()},
        launches=defaultdict(dict),
    )


def _is_regular(columns: Columns) -> bool:
    """Whether rows are contiguous and their hidden values aligned to 16 bytes.

    A single row, or none, may have any stride.
    """
    rows = columns.rows
    return (rows.data_ptr() | rows.shape[1] * rows.itemsize) % ALIGNMENT_BYTES == 0 and all(
        column.stride(0) == (column.shape[1] if column.dim() > 1 else 1)
        for column in columns
        if column is not None
    )


@cache
def promoted(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Dtype for adding values of two dtypes."""
    return torch.promote_types(one, other)
