"""The four stages that a chain is made of: linear maps on rows, each with a known transpose.

    stage        forward                                    transpose
    Permute      whole[start:start+length] <-> chunk rows   the inverse permutation
    Duplicate    a copy for each part that a row goes to    the sum of a row's copies, in fp32
    AllToAll     exchange rows with the group               the same with swapped counts
    AllGather    concatenate over the group                 exchange of parts, then one fp32 sum

A stage is plain data. For a given matrix of counts it becomes a `BoundStage`, which the
executor runs, the cost model prices and the timeline draws. Nothing here needs torch.

Notation: C = number of chunks, P = ranks of the stage's group.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
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
    """A copy of a row for every part of the experts in which its token has one.

    The parts are nodes, ranks or single experts. Copies are ordered by part, then by row; each
    keeps the expert ids and probabilities that belong to its part. The transpose sums the copies
    of a row in the order of the parts, and so of the experts, in fp32 and rounds once; the
    probabilities go back to where they came from, without a sum.
    """

    name: str
    part: Literal["node", "rank", "expert"]


@dataclass(frozen=True, kw_only=True, eq=False)
class AllToAll:
    """An exchange inside `group`; the transpose swaps sent and received rows."""

    name: str
    group: GroupName


@dataclass(frozen=True, kw_only=True, eq=False)
class AllGather:
    """Every rank of `group` receives every rank's rows, in rank order.

    The transpose hands each rank its own rows from every peer and sums them: an exchange of
    parts and a local sum, so that a sum is rounded once, whatever the size of the group.
    """

    name: str
    group: GroupName


Stage: TypeAlias = Permute | Duplicate | AllToAll | AllGather


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Places of each chunk's rows in the whole tensor, as runs in the chunk's own order.

    Attributes:
        lengths: [C, N] rows in each run; a chunk's rows are its runs one after the other.
        find_starts: called for `starts` when they are first needed: on the experts' side that is
            after the first collective has started.
    """

    lengths: RowCounts
    find_starts: Callable[[], RowCounts]

    @cached_property
    def starts(self) -> RowCounts:
        """[C, N] first row of each run in the whole tensor."""
        return self.find_starts()

    @property
    def is_slice(self) -> bool:
        """Whether every chunk is one run, so that no row indices are needed."""
        return self.lengths.shape[1] == 1

    def slice_of(self, chunk: int) -> slice:
        """The rows of a chunk that is one run."""
        return self._slices[chunk]

    @cached_property
    def _slices(self) -> list[slice]:
        ends = (self.starts + self.lengths)[:, 0].tolist()
        return list(map(slice, self.starts[:, 0].tolist(), ends))


@dataclass(frozen=True, kw_only=True)
class ExpertRange:
    """The parts of a `Duplicate`: equal, consecutive ranges of experts.

    Attributes:
        first: the first expert of the first part.
        size: experts in each part.
        num_parts: how many parts; experts outside all of them belong to other ranks.
    """

    first: int
    size: int
    num_parts: int


# Where a `Permute` finds or puts the rows of a chunk: nowhere else than they lie, in one run of the
# whole tensor, or row by row.
Placement: TypeAlias = Literal["none", "slice", "index"]


class StageShape(NamedTuple):
    """Shape of a bound stage, known without its counts.

    Attributes:
        stage: of the operation.
        placement: where a `Permute` finds or puts its rows.
        group_size: ranks of a collective's group.
    """

    stage: Stage
    placement: Placement
    group_size: int


@dataclass(frozen=True, kw_only=True)
class BoundStage:
    """One stage with its row counts, as this rank sees it going forward.

    Attributes:
        stage: of the operation.
        send: [C, P] rows that leave for each peer (this rank's own share included). A `Permute`
            has P = 1, and an `AllGather` sends the same rows to every peer.
        receive: [C, P] rows that arrive from each peer.
        segments: where a `Permute` finds or puts its rows; None where the chunk is the whole
            tensor in its own order, so that there is nothing to copy.
        parts: what a `Duplicate` copies for; its `receive` counts the copies by part.
    """

    stage: Stage
    send: RowCounts
    receive: RowCounts
    segments: Segments | None = None
    parts: ExpertRange | None = None

    @cached_property
    def splits(self) -> tuple[list[list[int]], list[list[int]]]:
        """[C][P] of `send` and `receive`, as integers of Python."""
        return self.send.tolist(), self.receive.tolist()

    @property
    def rows_before(self) -> RowCounts:
        """[C] rows that go into the stage; an AllGather sends the same ones to every peer."""
        if isinstance(self.stage, AllGather):
            return self.send[:, 0]
        return _over_peers(self.send)

    @property
    def rows_after(self) -> RowCounts:
        """[C] rows that come out of it."""
        return _over_peers(self.receive)

    @property
    def shape(self) -> StageShape:
        """Shape of the stage, which does not depend on the counts."""
        placement: Placement = "none"
        if self.segments is not None:
            placement = "slice" if self.segments.is_slice else "index"
        return StageShape(self.stage, placement, self.send.shape[1])


def _over_peers(rows: RowCounts) -> RowCounts:
    """[C, P] -> [C]. Rows that stay have one peer, and a sum takes as long as ten views."""
    return rows[:, 0] if rows.shape[1] == 1 else rows.sum(axis=1)


def bind_gather(stage: AllGather, receive: RowCounts, position: int) -> BoundStage:
    """An AllGather that brings [C, P] rows, of which this rank's own are at `position`."""
    send = np.broadcast_to(receive[:, position, None], receive.shape)
    return BoundStage(stage=stage, send=send, receive=receive)
