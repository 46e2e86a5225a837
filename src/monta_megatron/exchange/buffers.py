"""Buffers of a pass, as its operations address them: columns, and row indices of a chunk in them.

Notation: N = rows of a chunk, H = hidden size, W = most experts of any token.
"""

from collections import defaultdict
from functools import cache, lru_cache
from typing import TYPE_CHECKING, TypeAlias

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

# Columns, and the row indices [N] of a chunk in them; None where all of their rows are the chunk's.
Addressed: TypeAlias = tuple[Columns, torch.Tensor | None]


class Buffers:
    """What the operations of one pass read and write.

    Columns and indices of an operation's `source` and `target`:

        buffer                      columns                     index
        between two stages          the chunk's rows            None
        input or output, by the addressing of the first or last stage of the pass:
            "none", the only chunk  all rows                    None
            "slice"                 a view of the chunk's rows  None
            "index"                 all rows                    [N] the chunk's rows in them

    An index may come with the source of a "pack", or of a "reduce" that is the first operation, and
    with the target of a "put" or "to_experts"; all other operations get None.

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
        self.bound = lower(exchange.bound_chain, pass_, row, width, policy, order=exchange.order)
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
        # Positions of the first and the last stage of the pass.
        last = len(exchange.bound_chain.stages) - 1
        self._first, self._last = (last, 0) if pass_.transpose else (0, last)
        # Views of a chunk's rows in the input or the output, by its number and the chunk.
        self._views: dict[tuple[int, int], Columns] = {}
        # None where kernels may not be launched as in other passes.
        self._launches: dict[int, Launches] | None = None
        if policy == "fused" and _is_regular(columns) and _is_regular(self.columns(self._output)):
            self._launches = _launches_of(layout)

    @property
    def pass_name(self) -> str:
        """Name of the pass."""
        return self.bound.program.pass_.name

    def source(self, operation: Operation) -> Addressed:
        """What an operation reads; see the table of the class."""
        number = operation.reads[0]
        if number != INPUT:
            return self.columns(number), None
        return self._of_chunk(number, self._first, operation.chunk)

    def sent(self, operation: Operation) -> list[torch.Tensor]:
        """Input messages of an operation."""
        number = operation.reads[0]
        return self.messages(number) if number != INPUT else self.source(operation)[0].tensors()

    def target(self, operation: Operation) -> Addressed:
        """What an operation writes; see the table of the class."""
        number = operation.writes[0]
        if number != self._output:
            return self.columns(number), None
        return self._of_chunk(number, self._last, operation.chunk)

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
        """Kernel launches that other passes and chunks have bound; none for irregular rows."""
        return {} if self._launches is None else self._launches[operation.series]

    def _of_chunk(self, number: int, position: int, chunk: int) -> Addressed:
        """A chunk's rows in the input or the output, which the stage at `position` addresses."""
        segments = self.exchange.bound_chain.stages[position].segments
        if segments is None:
            return self.columns(number), None
        if not segments.is_slice:
            return self.columns(number), self.indices.rows(position, segments)[chunk]
        key = number, chunk
        if key not in self._views:
            self._views[key] = self.columns(number).of_rows(segments.slice_of(chunk))
        return self._views[key], None


@lru_cache(maxsize=512)
def _launches_of(layout: MemoryLayout) -> dict[int, "Launches"]:
    """Kernel launches by series of operations, which the passes with one layout bind and share."""
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
