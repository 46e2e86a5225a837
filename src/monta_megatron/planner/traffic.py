"""The bytes that each operation of a pass moves, by chunk and tier, from its program.

Rows, bytes of a row and what is done come from the program, which the executor runs too. For
integer counts the bytes equal what the executor's monitor counts.

Notation: C = number of chunks, S = ranks of the exchange, P = ranks of a stage's group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains.program import BoundProgram, Buffer, Kind
from monta_megatron.chains.program import Operation as ProgramOperation
from monta_megatron.chains.stages import RowCounts
from monta_megatron.planner.curves import Operation
from monta_megatron.topology.layout import GroupName, Layout

GATHER_OF_COUNTS = "gather of counts"
COUNT_BYTES = 8

# About how many times finding copies sorts and scans the lists, as int64 (exchange/copies.py);
# twice as many if the copies keep their share of the lists.
FIND_VALUE_BYTES = 8
FIND_PASSES: dict[Operation, int] = {"find": 6, "find_lists": 12}
# Work on Megatron's routing map [T, E] before a dispatch, in bytes per token and expert: counting
# passes over its bools about 6 times, making lists of experts over 4-byte scores as often.
COUNT_MAP_BYTES = 6
LIST_MAP_BYTES = 6 * 4


@dataclass(frozen=True, kw_only=True)
class Peers:
    """The group of a collective, as one rank sees it.

    Attributes:
        size: P.
        position: this rank's position.
        inter: [P] 1 for every rank on another node.
        intra: [P] 1 for every other rank on this node.
    """

    size: int
    position: int
    inter: NDArray[np.int64]
    intra: NDArray[np.int64]

    @cached_property
    def ranks_on_node(self) -> int:
        """Ranks of the group on this node, this one included."""
        return 1 + int(self.intra.sum())


@dataclass(frozen=True, kw_only=True)
class CopyTraffic:
    """What one rank does in its memory: one series of a program, or what surrounds it.

    Attributes:
        stage: name of the stage, or of what runs before or after the program.
        operation: what is done.
        moved_bytes: [C] bytes read and written.
    """

    stage: str
    operation: Operation
    moved_bytes: RowCounts


@dataclass(frozen=True, kw_only=True)
class CollectiveTraffic:
    """One collective on one rank, likewise.

    Attributes:
        stage: name of the stage, or of what runs before or after the program.
        operation: the collective.
        peers: its group.
        message_bytes: bytes of a row in each of its messages.
        sent_bytes: tier -> [C] bytes that leave this rank for others.
        received_bytes: tier -> [C] bytes that arrive at it from others.
        messages_overlap: its messages are under way at the same time, not one after the other.
    """

    stage: str
    operation: Operation
    peers: Peers
    message_bytes: tuple[int, ...]
    sent_bytes: Mapping[str, RowCounts]
    received_bytes: Mapping[str, RowCounts]
    messages_overlap: bool = False


StageTraffic: TypeAlias = CopyTraffic | CollectiveTraffic


@dataclass(frozen=True, kw_only=True)
class WalkTraffic:
    """One pass of one rank.

    Attributes:
        before: what runs before the program, one after the other.
        pipeline: the program, a series of operations after the other.
        after: what runs after it, one after the other.
    """

    before: tuple[StageTraffic, ...]
    pipeline: tuple[StageTraffic, ...]
    after: tuple[StageTraffic, ...]

    @property
    def stages(self) -> tuple[StageTraffic, ...]:
        """Everything, in order."""
        return (*self.before, *self.pipeline, *self.after)

    def bytes_by_stage(self) -> dict[tuple[str, str], float]:
        """(stage, tier) -> bytes of the program, as the executor's monitor counts them."""
        return {
            (stage.stage, tier): sent.sum().item()
            for stage in self.pipeline
            if isinstance(stage, CollectiveTraffic)
            for tier, sent in stage.sent_bytes.items()
        }


def walk_traffic(bound: BoundProgram, gathered_counts: int) -> WalkTraffic:
    """Everything that one rank does in one pass.

    Args:
        bound: the program with this rank's rows.
        gathered_counts: integers that are gathered from every rank; see `chains.gathered`.
    """
    before, after = _around(bound, gathered_counts)
    pipeline = tuple(TRAFFIC[series[0].kind](bound, series) for series in bound.program.series)
    return WalkTraffic(before=before, pipeline=pipeline, after=after)


def _bytes_of(bound: BoundProgram, series: Sequence[ProgramOperation], buffer: Buffer) -> RowCounts:
    """[C] bytes of each chunk's rows in a buffer like this one."""
    rows = bound.bound.rows_by_boundary[buffer.boundary][[each.chunk for each in series]]
    return buffer.copies * sum(bound.message_bytes(buffer)) * rows


def _moves(bound: BoundProgram, series: Sequence[ProgramOperation]) -> StageTraffic:
    """A copy reads what it writes."""
    first = series[0]
    written = _bytes_of(bound, series, bound.program.buffers[first.writes[0]])
    # Writing to places all over a tensor is slower than reading from them.
    is_put = first.kind == "put" and bound.bound.shapes[first.position].placement == "index"
    return CopyTraffic(
        stage=first.stage, operation="put" if is_put else "copy", moved_bytes=2 * written
    )


def _sums(bound: BoundProgram, series: Sequence[ProgramOperation]) -> StageTraffic:
    """A sum reads all copies, or parts, and writes one row for them."""
    first, buffers = series[0], bound.program.buffers
    read = _bytes_of(bound, series, buffers[first.reads[0]])
    written = _bytes_of(bound, series, buffers[first.writes[0]])
    return CopyTraffic(stage=first.stage, operation="sum", moved_bytes=read + written)


def _finds(bound: BoundProgram, series: Sequence[ProgramOperation]) -> StageTraffic:
    """Copies are found from the lists of experts alone."""
    first = series[0]
    operation: Operation = "find" if first.kind == "find_copies" else "find_lists"
    list_bytes = FIND_PASSES[operation] * FIND_VALUE_BYTES * bound.list_width
    rows = bound.bound.rows_by_boundary[first.position][[each.chunk for each in series]]
    return CopyTraffic(stage=first.stage, operation=operation, moved_bytes=list_bytes * rows)


def _exchanges(bound: BoundProgram, series: Sequence[ProgramOperation]) -> StageTraffic:
    first = series[0]
    assert first.group is not None, f"{first.kind} is no collective"
    chunks = [each.chunk for each in series]
    stage = bound.bound.stages[first.position]
    send, receive = stage.send[chunks], stage.receive[chunks]
    if bound.program.walked.transpose:
        send, receive = receive, send
    peers = peers_of(bound.bound.layout, first.group)
    message_bytes = bound.message_bytes(bound.program.buffers[first.writes[0]])
    return CollectiveTraffic(
        stage=first.stage,
        operation="allgather" if first.kind == "allgather" else "alltoall",
        peers=peers,
        message_bytes=message_bytes,
        sent_bytes=_by_tier(peers, sum(message_bytes) * send),
        received_bytes=_by_tier(peers, sum(message_bytes) * receive),
        messages_overlap=first.host == "starts",
    )


TRAFFIC: Mapping[Kind, Callable[[BoundProgram, Sequence[ProgramOperation]], StageTraffic]] = {
    "pack": _moves,
    "find_lists": _finds,
    "find_copies": _finds,
    "duplicate": _moves,
    "reduce": _sums,
    "alltoall": _exchanges,
    "allgather": _exchanges,
    "reduce_parts": _sums,
    "put": _moves,
}


@lru_cache(maxsize=4096)
def peers_of(layout: Layout, group: GroupName) -> Peers:
    """The ranks of the exchange in this rank's group of that name."""
    rank = layout.rank
    members = layout.members(group, rank)
    ranks = np.array(members)
    on_node = np.array(layout.nodes)[ranks] == layout.nodes[rank]
    return Peers(
        size=len(ranks),
        position=members.index(rank),
        inter=(~on_node).astype(np.int64),
        intra=(on_node & (ranks != rank)).astype(np.int64),
    )


def _by_tier(peers: Peers, num_bytes: RowCounts) -> dict[str, RowCounts]:
    """[C, P] -> tier -> [C]."""
    return {"inter": num_bytes @ peers.inter, "intra": num_bytes @ peers.intra}


def _around(
    program: BoundProgram, gathered_counts: int
) -> tuple[tuple[StageTraffic, ...], tuple[StageTraffic, ...]]:
    """What the dispatcher and Megatron do before and after the program of a pass.

    Dispatch counts, gathers the counts, and makes lists of experts if rows are tokens. If rows are
    pairs, Megatron permutes tokens into pairs before dispatch and sums pairs into tokens after
    combine; the backward passes do the transposes.
    """
    bound, walked, row = program.bound, program.program.walked, program.program.row
    before: list[StageTraffic] = []
    after: list[StageTraffic] = []
    sends_pairs = bound.chain.rows == "pairs"
    pairs = np.array([bound.num_source_rows])
    tokens = pairs / program.list_width if sends_pairs else pairs

    def add(into: list[StageTraffic], stage: str, operation: Operation, moved: RowCounts) -> None:
        into.append(CopyTraffic(stage=stage, operation=operation, moved_bytes=moved))

    peers = peers_of(bound.layout, "tp_ep")
    size_of_map = bound.layout.num_experts * tokens
    if walked.ids:
        add(before, "count", "count", COUNT_MAP_BYTES * size_of_map)
    if walked.ids and peers.size > 1:
        moved = _by_tier(peers, np.full((1, peers.size), COUNT_BYTES * gathered_counts))
        gather = CollectiveTraffic(
            stage=GATHER_OF_COUNTS,
            operation="allgather",
            peers=peers,
            message_bytes=(COUNT_BYTES,),
            sent_bytes=moved,
            received_bytes=moved,
        )
        before.append(gather)
    if walked.ids and not sends_pairs:
        add(before, "lists of experts", "lists", LIST_MAP_BYTES * size_of_map)
    hidden_bytes = row.hidden_size * row.value_bytes
    if sends_pairs and walked.transpose:
        add(after, "unpermute", "unpermute", hidden_bytes * (pairs + tokens))
    elif sends_pairs:
        add(before, "permute", "permute", 2 * hidden_bytes * pairs)
    return tuple(before), tuple(after)
