"""A micro-batch's exchange, and the state of a pass over it: messages and started operations.

Notation: W = most experts of any token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import torch

from monta_megatron.chains.chain import BoundChain, Order, order_of_issue
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import Buffer, Operation, Pass, Policy, RowFormat
from monta_megatron.exchange import errors
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.copies import Indices, Parts
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.payload import Columns, payloads_of
from monta_megatron.exchange.streams import Ready, streams_for


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
        fused: Triton kernels do the work; see `kernel_choice`.
        shared: by device, the indices that all passes share; made by the first one.
    """

    bound: BoundChain
    groups: Mapping[str, PeerGroup]
    sum_dtype: torch.dtype
    monitor: Monitor
    max_experts_per_token: int = 0
    order: Order = order_of_issue
    fused: bool = False
    shared: dict[torch.device, Indices] = field(default_factory=dict)


class State:
    """One pass under way.

    Args:
        exchange: what moves.
        pass_: the pass.
        columns: see `executor.run`.
        output: where the pass puts the result; None lets it allocate that.

    Attributes:
        exchange: what moves.
        bound: the program of the pass with this micro-batch's rows.
        groups: the process group for every group name of the chain.
        streams: where operations are issued.
        indices: what the passes share.
        sum_dtype: dtype of the sums over copies of a row.
        payloads: how a row lies in the messages of each buffer.
        num_issued: operations that were issued.
        works: by number of a collective, what was started; emptied where the host has waited.
    """

    def __init__(
        self, exchange: Exchange, pass_: Pass, columns: Columns, output: Columns | None = None
    ) -> None:
        rows, probs, device = columns.rows, columns.probs, columns.rows.device
        width = exchange.max_experts_per_token
        self.exchange = exchange
        self.groups = exchange.groups
        self.streams = streams_for(device)
        self.sum_dtype = promoted(exchange.sum_dtype, rows.dtype)
        row = RowFormat(
            hidden_size=rows.shape[1],
            value_bytes=rows.itemsize,
            prob_bytes=0 if probs is None else probs.itemsize,
            sum_bytes=self.sum_dtype.itemsize,
        )
        policy: Policy = "fused" if exchange.fused else self.streams.policy
        self.bound = lower(exchange.bound, pass_, row, width, policy, order=exchange.order)
        dtypes = (
            ("rows", row.sum_bytes, self.sum_dtype),
            ("rows", row.value_bytes, rows.dtype),
            ("probs", row.prob_bytes, rows.dtype if probs is None else probs.dtype),
            ("ids", torch.int32.itemsize, torch.int32),
        )
        self.payloads = payloads_of(self.bound.program, width, dtypes, device)
        if device not in exchange.shared:
            exchange.shared[device] = Indices(exchange.bound, device)
        self.indices = exchange.shared[device]
        if self.indices.memory is not None:
            self.streams.keep(self.indices.memory)
        self._first = len(exchange.bound.stages) - 1 if pass_.transpose else 0
        self._messages: dict[int, list[torch.Tensor]] = {0: columns.tensors()}
        self._columns: dict[int, Columns] = {0: columns}
        # By chunk, its rows of what the pass was given, where they lie in order.
        self._slices: dict[int | None, Columns] = {}
        if output is not None:
            self._messages[self.bound.program.output] = output.tensors()
        # By buffer whose columns share a message: what holds those of other chunks too.
        self._wholes: dict[int, _Whole] = {}
        self._parts: dict[int, Parts] = {}
        self._started: dict[int, Ready] = {}
        self.num_issued = 0
        self.works: dict[int, list[torch.distributed.Work]] = {}
        errors.UNDER_WAY.add(self)

    @property
    def pass_name(self) -> str:
        """Name of the pass."""
        return self.bound.program.pass_.name

    def allocate(self, number: int) -> list[torch.Tensor]:
        """The messages of a buffer that is about to be written."""
        if number not in self._messages:
            payload, slots = self.payloads[number], self.bound.program.allocations[number]
            rows = [[int(self.bound.rows(buffer)) for buffer in buffers] for buffers in slots]
            messages = self.streams.on_caller(payload.allocate, sum(map(max, rows)))
            if len(slots) == len(slots[0]) == 1:
                self._messages[number] = messages
            else:
                whole = _Whole(slots, rows, messages)
                self._messages |= whole.by_buffer(messages)
                if payload.packed:
                    self._wholes |= dict.fromkeys(whole.numbers, whole)
        return self._messages[number]

    def columns_to_write(self, number: int) -> Columns:
        """The columns of a buffer that is about to be written, with nothing else left open."""
        self.payloads[number].clear_gaps(self.allocate(number))
        return self.columns(number)

    def reserve(self) -> None:
        """Allocate buffers held until the join, for a pass whose caller goes on before it ends.

        Memory allocated after the caller has been given work may be in use by that work.
        """
        program = self.bound.program
        for buffer in program.buffers:
            if buffer.release in ("join", "window") or buffer.number == program.output:
                self.allocate(buffer.number)

    def columns(self, number: int) -> Columns:
        """The columns of a buffer."""
        if number not in self._columns:
            payload = self.payloads[number]
            if number in self._wholes:
                whole = self._wholes[number]
                views = whole.by_buffer(payload.columns(whole.messages).tensors())
                self._columns |= {buffer: Columns(*tensors) for buffer, tensors in views.items()}
            else:
                self._columns[number] = payload.columns(self._messages[number])
        return self._columns[number]

    def read(self, operation: Operation) -> tuple[Columns, torch.Tensor | None]:
        """The columns that an operation reads, and its chunk's rows of them, if not all."""
        number, chunk = operation.reads[0], operation.chunk
        segments = self.exchange.bound.stages[self._first].segments if number == 0 else None
        if segments is None:
            return self.columns(number), None
        if segments.is_slice:
            if chunk not in self._slices:
                self._slices[chunk] = self.columns(number).of_rows(segments.slice_of(chunk))
            return self._slices[chunk], None
        return self.columns(number), self.rows_in_place(self._first, chunk)

    def messages(self, operation: Operation) -> list[torch.Tensor]:
        """The messages that an operation reads; its chunk's alone, where they lie in order."""
        number = operation.reads[0]
        return self._messages[number] if number else self.read(operation)[0].tensors()

    def rows_in_place(self, position: int, chunk: int) -> torch.Tensor:
        """[rows of the chunk] int64: where the `Permute` at `position` takes or puts them."""
        segments = self.exchange.bound.stages[position].segments
        assert segments is not None, f"the rows of stage {position} lie in order"
        return self.indices.rows(position, segments)[chunk]

    def parts(self, operation: Operation, ids: torch.Tensor) -> Parts:
        """Parts of a stage's copies, held from the first chunk with ids like these to the last."""
        position = operation.position
        if position not in self._parts:
            bound = self.exchange.bound
            parts = bound.stages[position].parts
            assert parts is not None, f"{operation.stage} has nothing to find"
            before, after = bound.rows_at[position : position + 2]
            self._parts[position] = Parts.of(parts, int(max(before)), int(max(after)), ids)
        if operation.chunk == self.exchange.bound.num_chunks - 1:
            return self._parts.pop(position)
        return self._parts[position]

    def group(self, operation: Operation) -> PeerGroup:
        """The group of a collective."""
        assert operation.group is not None, f"{operation.kind} is no collective"
        return self.groups[operation.group]

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
        """Keep started work for the operations that wait for it."""
        if operation.number in self.bound.program.awaited:
            self._started[operation.number] = self.streams.ready(works)
        self.num_issued = operation.number + 1
        if works:
            self.works[operation.number] = works
            self.streams.watch(self.bound, self.groups, operation, works)
        else:
            self._ended(operation)

    def failure(self, operation: Operation, error: Exception) -> errors.ExchangeError:
        """The error of an operation that failed; a copy may be waited for on a device."""
        return errors.failure(self, operation, error)

    def _ended(self, operation: Operation) -> None:
        """Release buffers at their last read; all others are held until the join."""
        for number in operation.reads:
            buffer = self.bound.program.buffers[number]
            if buffer.release == "last read" and buffer.last_read == operation.number:
                self._messages.pop(number, None)
                self._columns.pop(number, None)
                if number == 0:
                    self._slices.clear()


class _Whole(NamedTuple):
    """Memory allocated for the buffers of several chunks.

    Attributes:
        slots: the buffers, by the memory that they use one after the other.
        rows: of each of them.
        messages: the memory of one slot after the other.
    """

    slots: tuple[tuple[Buffer, ...], ...]
    rows: list[list[int]]
    messages: list[torch.Tensor]

    @property
    def numbers(self) -> list[int]:
        """The numbers of the buffers."""
        return [buffer.number for buffers in self.slots for buffer in buffers]

    def by_buffer(self, tensors: list[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """By number of a buffer, its rows of tensors that lie as the messages do."""
        sizes = [max(rows) for rows in self.rows]
        by_slot = zip(*[tensor.split_with_sizes(sizes) for tensor in tensors], strict=True)
        return {
            buffer.number: [part if num_rows == size else part[:num_rows] for part in parts]
            for buffers, rows, size, parts in zip(
                self.slots, self.rows, sizes, by_slot, strict=True
            )
            for buffer, num_rows in zip(buffers, rows, strict=True)
        }


@cache
def promoted(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """The dtype in which values of both are added."""
    return torch.promote_types(one, other)
