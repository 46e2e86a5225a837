"""The four stages of chains: linear maps on rows, each with a known transpose.

    stage        forward                                    transpose
    Permute      whole[start:start+length] <-> chunk rows   the inverse permutation
    Duplicate    a copy for each part that a row goes to    the sum of a row's copies, in fp32
    AllToAll     send rows to the ranks of the group        the same with swapped counts
    AllGather    concatenate over the group                 AllToAll of terms, then their fp32 sum

A stage is plain data and names its operation. Bound to counts it becomes a `BoundStage`. Stages are
compared by identity, so that the shape of a chain is cheap to hash. No torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

from numpy.typing import NDArray

from monta_megatron.core import GroupName

# Rows per chunk and peer: integers at run time, expected values (floats) in the planner.
RowCounts: TypeAlias = NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Permute:
    """A device-to-device copy between a whole tensor and the rows of one chunk."""

    name: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Duplicate:
    """A copy of a row for every part of the experts in which its token has an expert.

    The parts are nodes, ranks or single experts. Copies are ordered by part, then by row. A copy
    for a node or a rank carries the whole list of its token's experts and their probabilities, a
    copy for an expert that expert's probability alone. The transpose sums the copies of a row in
    the order of the parts, and so of the experts, in fp32 and rounds once. It sums gradients of
    lists likewise, to which each copy adds 0 for the experts of other parts; the gradient of a
    single expert's probability is put in its place in the list.
    """

    name: str
    per: Literal["node", "rank", "expert"]


@dataclass(frozen=True, kw_only=True, eq=False)
class AllToAll:
    """Every rank of `group` sends rows to every other; the transpose swaps sent and received."""

    name: str
    group: GroupName


@dataclass(frozen=True, kw_only=True, eq=False)
class AllGather:
    """Every rank of `group` receives every rank's rows, in rank order.

    The transpose is a reduce-scatter, made of an AllToAll of the ranks' terms and a local sum: so a
    sum is rounded once, whatever the size of the group.
    """

    name: str
    group: GroupName


Stage: TypeAlias = Permute | Duplicate | AllToAll | AllGather


# Segments and bound stages are made for each micro-batch: frozen ones take three times as long.
@dataclass(kw_only=True, eq=False)
class Segments:
    """Run-length-encoded scatter map: row of a chunk -> row of the tensor.

    Attributes:
        num_runs: runs of each chunk.
        find_runs: computes `runs` at their first use, which on the expert side is after the first
            collective has started.
    """

    num_runs: int
    find_runs: Callable[[], tuple[RowCounts, RowCounts]]

    @cached_property
    def runs(self) -> tuple[RowCounts, RowCounts]:
        """[C, runs] length of each run and its first row in the tensor; a chunk is its runs."""
        return self.find_runs()

    @property
    def is_slice(self) -> bool:
        """Whether every chunk is one run, so that no row indices are needed."""
        return self.num_runs == 1

    @cached_property
    def slices(self) -> list[slice]:
        """[C] rows of the tensor for chunks that are one run each."""
        lengths, starts = (of[:, 0].tolist() for of in self.runs)
        return [slice(start, start + n) for start, n in zip(starts, lengths, strict=True)]


class Parts(NamedTuple):
    """The parts that a bound `Duplicate` copies for: equal, consecutive ranges of experts.

    Attributes:
        first: the first expert of the first part.
        size: experts in each part.
        num_parts: number of parts; experts outside all of them belong to other ranks.
    """

    first: int
    size: int
    num_parts: int


# How a `Permute` addresses the rows of a chunk in the tensor. "none": the only chunk is the tensor;
# "slice": the rows are one run; "index": a list of row indices.
Addressing: TypeAlias = Literal["none", "slice", "index"]


class StageShape(NamedTuple):
    """Properties of a bound stage that do not depend on its counts.

    Attributes:
        stage: the stage.
        addressing: how a `Permute` addresses its rows.
        group_size: ranks of a collective's group.
    """

    stage: Stage
    addressing: Addressing
    group_size: int


@dataclass(kw_only=True, eq=False)
class BoundStage:
    """A stage with this rank's row counts in the forward direction.

    Attributes:
        stage: the stage.
        send: [C, P] rows sent to each peer, this rank included. A `Permute` has P = 1, and an
            `AllGather` sends the same rows to every peer.
        receive: [C, P] rows received from each peer; of a `Duplicate`, the copies for each part.
        segments: scatter map of a `Permute`; None where the chunk is the tensor itself, so that
            there is nothing to copy.
        parts: the parts of a `Duplicate`.
    """

    stage: Stage
    send: RowCounts
    receive: RowCounts
    segments: Segments | None = None
    parts: Parts | None = None

    @cached_property
    def splits(self) -> tuple[list[list[int]], list[list[int]]]:
        """[C][P] `send` and `receive` as Python integers."""
        return self.send.tolist(), self.receive.tolist()

    @property
    def rows_before(self) -> RowCounts:
        """[C] input rows; an AllGather sends the same ones to every peer."""
        if isinstance(self.stage, AllGather):
            return self.send[:, 0]
        return _over_peers(self.send)

    @property
    def rows_after(self) -> RowCounts:
        """[C] output rows."""
        return _over_peers(self.receive)

    @property
    def shape(self) -> StageShape:
        """Shape of the stage, which does not depend on the counts."""
        addressing: Addressing = "none"
        if self.segments is not None:
            addressing = "slice" if self.segments.is_slice else "index"
        return StageShape(self.stage, addressing, self.send.shape[1])


def _over_peers(rows: RowCounts) -> RowCounts:
    """[C, P] -> [C]. A view where there is one peer: numpy's sum takes ten times as long."""
    return rows[:, 0] if rows.shape[1] == 1 else rows.sum(axis=1)


def bind_gather(stage: AllGather, received_CP: RowCounts, position: int) -> BoundStage:
    """Bind an AllGather to the rows of each rank; this rank is at `position` in the group."""
    sent_CP = received_CP[:, position, None].repeat(received_CP.shape[1], axis=1)
    return BoundStage(stage=stage, send=sent_CP, receive=received_CP)
