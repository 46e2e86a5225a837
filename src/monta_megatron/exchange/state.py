"""What one micro-batch exchanges, and the state of a pass over it: messages, and what was started.

Notation: C = number of chunks, W = most experts of any token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from monta_megatron.chains.chain import BoundChain, Order, order_of_issue
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import Buffer, Column, Operation, Pass, RowFormat
from monta_megatron.chains.stages import Segments
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.copies import Copies
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.payload import Columns, Payload
from monta_megatron.exchange.streams import Ready, streams_for


class ExchangeError(RuntimeError):
    """A collective failed; the message names chain, stage, chunk and group."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchange:
    """One micro-batch's exchange, made before dispatch, kept for combine and both backward passes.

    Attributes:
        bound: the chain with this micro-batch's rows.
        groups: the process group for every group name of the chain.
        sum_dtype: dtype of the sums over copies of a row: fp32; for permuted tokens that of the
            probabilities if it is wider, in which Megatron reduces over ETP.
        monitor: counts bytes; tells its recorder, if it has one, what is issued.
        max_experts_per_token: W; 0 where rows are permuted tokens.
        order: the order of issue; see `lower`.
        row_indices: by position in the chain, for each `Permute` that copies, the rows of each
            chunk in the whole tensor; made at first use, shared by all passes.
        copies: by position in the chain and chunk, what is copied; made by dispatch, shared
            likewise.
    """

    bound: BoundChain
    groups: Mapping[str, PeerGroup]
    sum_dtype: torch.dtype
    monitor: Monitor
    max_experts_per_token: int = 0
    order: Order = order_of_issue
    row_indices: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    copies: dict[tuple[int, int], Copies] = field(default_factory=dict)


class State:
    """One pass under way.

    Attributes:
        exchange: what moves.
        bound: the program of the pass with this micro-batch's rows.
        streams: where operations are issued.
        sum_dtype: dtype of the sums over copies of a row.
    """

    def __init__(self, exchange: Exchange, pass_: Pass, columns: Columns) -> None:
        rows, probs = columns.rows, columns.probs
        stages = exchange.bound.stages
        self.exchange = exchange
        self.streams = streams_for(rows.device)
        self.sum_dtype = torch.promote_types(exchange.sum_dtype, rows.dtype)
        row = RowFormat(
            hidden_size=rows.shape[1],
            value_bytes=rows.itemsize,
            prob_bytes=0 if probs is None else probs.itemsize,
            sum_bytes=self.sum_dtype.itemsize,
        )
        self.bound = lower(
            exchange.bound,
            pass_,
            row,
            exchange.max_experts_per_token,
            self.streams.policy,
            order=exchange.order,
        )
        self._device = rows.device
        self._dtypes = {
            ("rows", row.sum_bytes): self.sum_dtype,
            ("rows", row.value_bytes): rows.dtype,
            ("probs", row.prob_bytes): rows.dtype if probs is None else probs.dtype,
            ("ids", torch.int32.itemsize): torch.int32,
        }
        self._first = len(stages) - 1 if pass_.transpose else 0
        self._messages: dict[int, list[torch.Tensor]] = {0: columns.tensors()}
        self._slots: dict[int, list[torch.Tensor]] = {}
        self._payloads: dict[object, Payload] = {}
        self._started: dict[int, Ready] = {}

    @property
    def pass_name(self) -> str:
        """Name of the pass."""
        return self.bound.program.pass_.name

    def payload(self, number: int) -> Payload:
        """How a row lies in the messages of a buffer."""
        buffer = self.bound.program.buffers[number]
        key = (buffer.columns, buffer.packed)
        if key not in self._payloads:
            self._payloads[key] = Payload(
                shapes=tuple(self._shape(column) for column in buffer.columns),
                dtypes=tuple(
                    self._dtypes[column.name, column.value_bytes] for column in buffer.columns
                ),
                packed=buffer.packed,
                device=self._device,
            )
        return self._payloads[key]

    def allocate(self, number: int) -> list[torch.Tensor]:
        """The messages of a buffer that is about to be written."""
        buffer = self.bound.program.buffers[number]
        if number not in self._messages and buffer.release != "window":
            self._messages[number] = self._allocate(buffer, self._num_rows(buffer))
        elif number not in self._messages:
            if buffer.slot not in self._slots:
                num_rows = max(map(self._num_rows, self.bound.program.slots[buffer.slot]))
                self._slots[buffer.slot] = self._allocate(buffer, num_rows)
            whole = self._slots[buffer.slot]
            self._messages[number] = [message[: self._num_rows(buffer)] for message in whole]
        return self._messages[number]

    def columns(self, number: int) -> Columns:
        """The columns of a buffer."""
        return self.payload(number).columns(self._messages[number])

    def messages(self, operation: Operation) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The messages that an operation reads, and its chunk's rows of them, if not all."""
        messages = self._messages[operation.reads[0]]
        segments = self.exchange.bound.stages[self._first].segments
        if operation.reads[0] != 0 or segments is None:
            return messages, None
        if segments.is_slice:
            return [message[segments.slice_of(operation.chunk)] for message in messages], None
        return messages, self.rows_in_place(self._first, operation.chunk)

    def read(self, operation: Operation) -> tuple[Columns, torch.Tensor | None]:
        """The columns of these messages, and its chunk's rows of them, if not all."""
        messages, index = self.messages(operation)
        return self.payload(operation.reads[0]).columns(messages), index

    def rows_in_place(self, position: int, chunk: int) -> torch.Tensor:
        """[rows of the chunk] int64: where the `Permute` at `position` takes or puts them."""
        indices = self.exchange.row_indices
        if position not in indices:
            segments = self.exchange.bound.stages[position].segments
            assert segments is not None, f"the rows of stage {position} lie in order"
            indices[position] = _row_indices(segments, self._device)
        index = indices[position][chunk]
        self.streams.keep([index])
        return index

    def group(self, operation: Operation) -> PeerGroup:
        """The group of a collective."""
        assert operation.group is not None, f"{operation.kind} is no collective"
        return self.exchange.groups[operation.group]

    def wait(self, numbers: Sequence[int]) -> None:
        """Let the current stream, or the host, wait for operations."""
        monitor = self.exchange.monitor
        for number in numbers:
            operation = self.bound.program.operations[number]
            monitor.note("wait", self.pass_name, operation)
            try:
                self._started[number]()
            except RuntimeError as error:
                raise self.failure(operation, error) from error
            monitor.note("ready", self.pass_name, operation)
            self._ended(operation)

    def issued(self, operation: Operation, works: list[torch.distributed.Work]) -> None:
        """Keep what was started for those who wait for it."""
        if operation.number in self.bound.program.awaited:
            self._started[operation.number] = self.streams.ready(works)
        if not works:
            self._ended(operation)

    def failure(self, operation: Operation, error: Exception) -> ExchangeError:
        """The error of an operation that failed; a copy, waited for on a device, has no group."""
        bound, ranks = self.exchange.bound, ""
        if operation.group is not None:
            group = self.group(operation)
            ranks = f", group {group.name} (rank {group.rank} of {group.size})"
        return ExchangeError(
            f"{self.pass_name}: chain {bound.chain.name}, stage {operation.stage}, "
            f"chunk {operation.chunk + 1} of {bound.num_chunks}{ranks} failed: {error}"
        )

    def _ended(self, operation: Operation) -> None:
        """Let go of what is released at its last read; all else is held until the join."""
        for number in operation.reads:
            buffer = self.bound.program.buffers[number]
            if buffer.release == "last read" and buffer.last_read == operation.number:
                self._messages.pop(number, None)

    def _allocate(self, buffer: Buffer, num_rows: int) -> list[torch.Tensor]:
        with self.streams.on_caller():
            return self.payload(buffer.number).allocate(num_rows)

    def _num_rows(self, buffer: Buffer) -> int:
        return int(self.bound.rows(buffer))

    def _shape(self, column: Column) -> tuple[int, ...]:
        if column.name == "rows":
            return (column.width or 0,)
        return (self.exchange.max_experts_per_token,) if column.width is None else ()


def _row_indices(segments: Segments, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Row numbers of every chunk from its runs; one copy to the device, and no sync.

    [C, N] runs -> per chunk [rows]: starts[c, 0], starts[c, 0] + 1, ..., starts[c, 1], ...
    """
    lengths = segments.lengths.ravel()
    total = int(lengths.sum())
    # A row is its run's start plus its distance from the run's first row in the result.
    shifts = segments.starts.ravel() - (np.cumsum(lengths) - lengths)
    runs = torch.from_numpy(np.stack([shifts, lengths]))
    if device.type == "cuda":
        runs = runs.pin_memory().to(device, non_blocking=True)
    shift_of_row = torch.repeat_interleave(runs[0], runs[1], output_size=total)
    rows = torch.arange(total, device=device) + shift_of_row
    return rows.split(segments.lengths.sum(axis=1).tolist())
