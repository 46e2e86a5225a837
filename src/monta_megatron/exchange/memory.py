"""Memory of a pass: the messages and columns of its buffers, by their numbers in the program.

On a device all buffers of one format share one allocation, made on the caller's stream before the
pass forks. So every use comes after the allocation, and memory freed on the caller's stream can be
used at once. On CPU ranks a buffer is allocated when it is first written and freed after its last
read. `exchange.buffers` says which rows of them an operation uses.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from monta_megatron.chains.program import BoundProgram, Column, Operation, Program, Release
from monta_megatron.exchange.messages import Columns, MessageFormat


class Use(NamedTuple):
    """A buffer that uses a slot; attributes as of `Buffer`."""

    number: int
    boundary: int
    chunk: int
    repeats: int


@dataclass(frozen=True, eq=False)
class MemoryLayout:
    """Formats and slots of a program's buffers, whatever the counts. Compared by identity.

    Attributes:
        formats: of each buffer.
        slots: (format, slots of its buffers that are held until the join, each with the buffers
            that use it).
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
    """Memory layout of a program; the same object for equal arguments.

    Args:
        program: of the pass.
        max_experts_per_token: W.
        dtype: of hidden values.
        sum_dtype: of the sums over copies of a row.
        prob_dtype: of probabilities; None in a pass that carries none.
        device: of the rows.
    """

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
            use = Use(buffer.number, buffer.boundary, buffer.chunk, buffer.repeats)
            by_format.setdefault(format_, {}).setdefault(buffer.slot, []).append(use)
    slots = tuple(
        (format_, tuple(map(tuple, by_slot.values()))) for format_, by_slot in by_format.items()
    )
    return MemoryLayout(formats, slots)


class Memory(ABC):
    """Memory of the buffers of one pass.

    Args:
        bound: the program of the pass with this micro-batch's rows.
        layout: of the program.
        given: buffers of the caller, by number: the input, and the output if the caller has one.
    """

    def __init__(
        self, bound: BoundProgram, layout: MemoryLayout, given: Mapping[int, Columns]
    ) -> None:
        self._bound, self._formats = bound, layout.formats
        # Views are made lazily: each costs the host as much as an operation.
        self._columns = dict(given)
        self._messages = {number: columns.tensors() for number, columns in given.items()}

    @abstractmethod
    def messages(self, number: int) -> list[torch.Tensor]:
        """The messages of a buffer."""

    @abstractmethod
    def columns(self, number: int) -> Columns:
        """The columns of a buffer."""

    def release(self, operation: Operation) -> None:
        """Free the buffers that no operation reads after this one."""
        for number in operation.reads:
            buffer = self._bound.program.buffers[number]
            if buffer.release is Release.LAST_READ and buffer.last_read == operation.number:
                self._messages.pop(number, None)
                self._columns.pop(number, None)


class FirstWriteMemory(Memory):
    """On CPU ranks: a buffer is allocated when it is first written."""

    def messages(self, number: int) -> list[torch.Tensor]:
        if number not in self._messages:
            num_rows = self._bound.rows(self._bound.program.buffers[number])
            self._messages[number] = _allocate(self._formats[number], int(num_rows))
        return self._messages[number]

    def columns(self, number: int) -> Columns:
        if number not in self._columns:
            self._columns[number] = self._formats[number].columns(self.messages(number))
        return self._columns[number]


class ReservedMemory(Memory):
    """On a device: all buffers are allocated at once, and none is freed before the join."""

    def __init__(
        self, bound: BoundProgram, layout: MemoryLayout, given: Mapping[int, Columns]
    ) -> None:
        super().__init__(bound, layout, given)
        # number -> messages and columns of the allocation, and the buffer's rows in it.
        self._reserved: dict[int, tuple[list[torch.Tensor], Columns, slice]] = {}
        rows_at = bound.bound.rows_at
        # One allocation per format, one slot of its ring after the other.
        for format_, slots in layout.slots:
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
        output = bound.program.output
        if output not in self._columns:
            num_rows = int(bound.rows(bound.program.buffers[output]))
            self._messages[output] = _allocate(self._formats[output], num_rows)
            self._columns[output] = self._formats[output].columns(self._messages[output])

    def messages(self, number: int) -> list[torch.Tensor]:
        if number not in self._messages:
            messages, _, rows = self._reserved[number]
            self._messages[number] = [message[rows] for message in messages]
        return self._messages[number]

    def columns(self, number: int) -> Columns:
        if number not in self._columns:
            format_ = self._formats[number]
            if format_.packed:
                _, columns, rows = self._reserved[number]
                self._columns[number] = columns.of_rows(rows)
            else:
                self._columns[number] = format_.columns(self.messages(number))
        return self._columns[number]


def _allocate(format_: MessageFormat, num_rows: int) -> list[torch.Tensor]:
    messages = format_.allocate(num_rows)
    format_.clear_gaps(messages)
    return messages
