"""Buffers of a pass, as its operations address them."""

from collections import defaultdict
from functools import cache, lru_cache
from typing import TYPE_CHECKING

import torch

from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import (
    ALIGNMENT_BYTES,
    INPUT,
    Operation,
    Pass,
    Policy,
    RowFormat,
)
from monta_megatron.chains.stages import AllGather, BoundStage
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.copies import Copies, PartBounds
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.memory import Columns, Memory, MemoryLayout, memory_layout

if TYPE_CHECKING:
    from monta_megatron.exchange.kernels.tiles import Launches


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
        self.indices = exchange.indices(device)
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
            self._views[key] = self.columns(number).of_rows(segments.slice_of(chunk))
        return self._views[key]


@lru_cache(maxsize=512)
def _launches_of(layout: MemoryLayout, rank: int, num_local_experts: int) -> dict[int, "Launches"]:
    """Kernel launches by series of operations: the arguments are all that a launch freezes.

        frozen in a bound launch                     given by
        ranks of groups, how terms are summed        the program of `layout`
        W, dtypes, strides between two stages        the formats of `layout`
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
