"""Buffers of a pass: their memory, the columns of rows in it, and how operations address them.

Columns: `rows` [N, H], the hidden states; `probs`, the routing probabilities, [N] where a row is a
permuted token and [N, W] where it is a token with up to W experts; `ids` [N, W], those experts.
Where a stage copies the rows anyway, it packs their columns into one message of bytes, so that each
collective is issued once; elsewhere each column is a message and an NCCL launch, sent in place, as
packing would cost a copy: two for permuted tokens in one chunk, as in stock, three in dispatch by
`allgather`. The gaps between the columns of a packed row are zero: no uninitialised byte is sent.

Packed rows are aligned to 16 bytes. At H=4096 in bf16 (8,192 bytes) with fp32 probabilities the
columns besides the hidden values take 16 bytes (0.2%) of a permuted token, 64 of a token with 8
experts in dispatch, 32 in its backward.

On a device all buffers of one format share one allocation, made before the pass forks
(`exchange.streams`). On CPU ranks a buffer is allocated when it is first written and freed after
its last read.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import (
    ALIGNMENT_BYTES,
    INPUT,
    BoundProgram,
    Column,
    Operation,
    Pass,
    Policy,
    Program,
    Release,
    RowFormat,
    offsets_bytes,
)
from monta_megatron.chains.stages import AllGather, BoundStage
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.rows import Copies, PartBounds

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


class Buffers:
    """What the operations of one pass read and write.

    The columns of an operation's `source` and `target` are the chunk's rows; but those of the whole
    input or output if it has `row_indices` in them.

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
        memory: of the buffers.
        messages, columns: of `memory`.
        part_bounds: bounds of the parts of a `Duplicate`, by its position; see `operations`.
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
        self.bound = lower(exchange.bound_chain, pass_, row, width, policy)
        prob_dtype = None if probs is None else probs.dtype
        layout = memory_layout(
            self.bound.program, width, rows_NH.dtype, self.sum_dtype, prob_dtype, device
        )
        self.formats = layout.formats
        self.indices = exchange.indices
        self.indices.allocate(device)
        self.part_bounds: dict[int, PartBounds] = {}
        given = {INPUT: columns}
        self._output = self.bound.program.output
        if output is not None:
            given[self._output] = output
        self.memory = Memory(self.bound, layout, given)
        if policy != "host":
            self.memory.reserve()
        self.messages, self.columns = self.memory.messages, self.memory.columns
        # The first and the last stage of the pass.
        stages = exchange.bound_chain.stages[:: -1 if pass_.transpose else 1]
        self._first, self._last = stages[0], stages[-1]
        # Views of a chunk's rows in the input or the output, by its number and the chunk.
        self._views: dict[tuple[int, int], Columns] = {}
        # None if no other pass may share launches with this one.
        self._launches: dict[int, Launches] | None = None
        if policy == "fused" and _is_regular(columns) and _is_regular(self.columns(self._output)):
            place = exchange.bound_chain.layout
            self._launches = _launches_of(layout, place.rank, place.num_local_experts)

    @property
    def pass_name(self) -> str:
        """Name of the pass."""
        return self.bound.program.pass_.name

    def source(self, operation: Operation) -> Columns:
        """What an operation reads."""
        number = operation.reads[0]
        if number != INPUT:
            return self.columns(number)
        return self._of_chunk(number, self._first, operation.chunk)

    def sent(self, operation: Operation) -> list[torch.Tensor]:
        """Input messages of an operation."""
        number = operation.reads[0]
        return self.messages(number) if number != INPUT else self.source(operation).tensors()

    def target(self, operation: Operation) -> Columns:
        """What an operation writes."""
        number = operation.writes[0]
        if number != self._output:
            return self.columns(number)
        return self._of_chunk(number, self._last, operation.chunk)

    def row_indices(self, operation: Operation) -> torch.Tensor | None:
        """[N] the chunk's rows in the whole input or output; see `Operation.indexed_by`."""
        position = operation.indexed_by
        return None if position is None else self.indices.of_rows(position)[operation.chunk]

    def copies(self, operation: Operation) -> Copies:
        """Copies of an operation's chunk."""
        return self.indices.copies(operation.position, operation.chunk)

    def group(self, operation: Operation) -> PeerGroup:
        """Group of a collective."""
        assert operation.group is not None, f"{operation.kind} is no collective"
        return self.exchange.groups[operation.group]

    def gather(self, operation: Operation) -> tuple[BoundStage, int]:
        """The AllGather to whose transpose an operation belongs, and this rank's position in it."""
        assert operation.gather is not None, f"{operation.stage} is summed over no ranks"
        bound = self.exchange.bound_chain.stages[operation.gather]
        assert isinstance(bound.stage, AllGather), f"{bound.stage.name} is no AllGather"
        return bound, self.exchange.groups[bound.stage.group].rank

    def launches(self, operation: Operation) -> "Launches":
        """Launches of an operation's kernels, by name: those that an earlier pass has bound."""
        return {} if self._launches is None else self._launches[operation.series]

    def _of_chunk(self, number: int, stage: BoundStage, chunk: int) -> Columns:
        """The input or the output: a chunk's rows if they are a slice, else all."""
        segments = stage.segments
        if segments is None or not segments.is_slice:
            return self.columns(number)
        key = number, chunk
        if key not in self._views:
            self._views[key] = self.columns(number).of_rows(segments.slices[chunk])
        return self._views[key]


@lru_cache(maxsize=512)
def _launches_of(layout: MemoryLayout, rank: int, num_local_experts: int) -> dict[int, "Launches"]:
    """Kernel launches by series of operations: the arguments are all that a launch freezes.

        frozen in a bound launch                     given by
        ranks of groups, how terms are summed        the program of `layout`
        W, device, dtypes, strides between stages    the formats of `layout`
        parts of the experts, position in a group    `rank`, `num_local_experts`
        strides and alignment of input and output    `_is_regular`, without which none is shared

    Everything else, such as tensors and their numbers of rows, is an argument of each launch.
    """
    return defaultdict(dict)


def _is_regular(columns: Columns) -> bool:
    """Whether rows are contiguous and their hidden values aligned to 16 bytes.

    Triton compiles a kernel for the alignment and strides of its arguments, so launches bound for
    regular rows serve only these. A single row, or none, may have any stride.
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
