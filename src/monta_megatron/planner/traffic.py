"""The bytes that each stage of a walk moves, by chunk and tier, from the bound chain.

The rows come from `chain.bind`, which the executor runs too, and the bytes of a row from
`chains.lanes`; nothing about a chain is written down a second time here. For integer counts the
bytes equal what the executor's monitor counts.

Notation: C = number of chunks, S = ranks of the exchange, P = ranks of a stage's group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import BoundChain
from monta_megatron.chains.lanes import RowFormat, Walk, message_bytes_by_stage
from monta_megatron.chains.stages import (
    AllGather,
    AllToAll,
    BoundStage,
    Place,
    Replicate,
    RowCounts,
    first_place_copies,
)
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
    """One stage of a walk on one rank, in its memory.

    Attributes:
        stage: name of the chain's stage, or of what runs before or after the chain.
        depth: how many steps it trails the first stage; see `BoundChain.depths`.
        moved_bytes: operation -> [C] bytes read and written, one operation after the other.
    """

    stage: str
    depth: int
    moved_bytes: Mapping[Operation, RowCounts]


@dataclass(frozen=True, kw_only=True)
class CollectiveTraffic:
    """One collective of a walk on one rank.

    Attributes:
        stage: name of the chain's stage, or of what runs before or after the chain.
        depth: how many steps it trails the first stage.
        operation: the collective.
        peers: its group.
        message_bytes: bytes of a row in each of the messages that are sent one after the other.
        sent_bytes: tier -> [C] bytes that leave this rank for others.
        received_bytes: tier -> [C] bytes that arrive at it from others.
    """

    stage: str
    depth: int
    operation: Operation
    peers: Peers
    message_bytes: tuple[int, ...]
    sent_bytes: Mapping[str, RowCounts]
    received_bytes: Mapping[str, RowCounts]


StageTraffic: TypeAlias = CopyTraffic | CollectiveTraffic


@dataclass(frozen=True, kw_only=True)
class WalkTraffic:
    """One walk of one rank.

    Attributes:
        before: what runs before the pipeline, one after the other.
        pipeline: the stages that work on chunks, in the walk's order.
        after: what runs after it, likewise.
    """

    before: tuple[StageTraffic, ...]
    pipeline: tuple[StageTraffic, ...]
    after: tuple[StageTraffic, ...]

    @property
    def stages(self) -> tuple[StageTraffic, ...]:
        """All stages, in order."""
        return (*self.before, *self.pipeline, *self.after)

    def bytes_by_stage(self) -> dict[tuple[str, str], float]:
        """(stage, tier) -> bytes of the chain's stages, as the executor's monitor counts them."""
        return {
            (stage.stage, tier): sent.sum().item()
            for stage in self.pipeline
            if isinstance(stage, CollectiveTraffic)
            for tier, sent in stage.sent_bytes.items()
        }


def walk_traffic(
    bound: BoundChain,
    row: RowFormat,
    walk: Walk,
    gathered_counts: int,
    copies_block_host: bool = False,
) -> WalkTraffic:
    """Everything that one rank does in one walk.

    Args:
        bound: the chain with this rank's rows.
        row: the sizes of a row's values.
        walk: one of the four walks.
        gathered_counts: integers that are gathered from every rank; see `chains.gathered`.
        copies_block_host: see `BoundChain.depths`.
    """
    stages = bound.walked(walk.transpose)
    depths = bound.depths(walk.transpose, copies_block_host)
    message_bytes = message_bytes_by_stage(bound, row, walk)
    row_bytes = [sum(messages) for messages in message_bytes]
    pipeline: list[StageTraffic] = []
    for position, stage in enumerate(stages):
        kind, depth, behind = stage.stage, depths[position], row_bytes[position]
        if isinstance(kind, Place):
            if first_place_copies(stages) if position == 0 else stage.segments is not None:
                moved = 2 * behind * stage.send[:, 0]
                # The last one writes to places all over the tensor, the first one reads from them.
                puts = position > 0 and stage.segments is not None and not stage.segments.is_slice
                pipeline.append(_copy(kind.name, depth, **{"put" if puts else "copy": moved}))
        elif isinstance(kind, Replicate):
            rows, copies = stage.send[:, 0], stage.receive.sum(axis=1)
            if walk.transpose:
                summed = row_bytes[position - 1] * copies + behind * rows
                pipeline.append(_copy(kind.name, depth, sum=summed))
                continue
            copied = 2 * behind * copies
            if walk.ids:
                find: Operation = "find" if kind.part == "expert" else "find_lists"
                found = FIND_PASSES[find] * FIND_VALUE_BYTES * row.list_width * rows
                pipeline.append(_copy(kind.name, depth, **{find: found}, copy=copied))
            else:
                pipeline.append(_copy(kind.name, depth, copy=copied))
        else:
            peers = peers_of(bound.layout, kind.group)
            if peers.size == 1:
                continue
            messages = message_bytes[position]
            pipeline.append(_collective(stage, peers, messages, depth, walk.transpose))
            if walk.transpose and isinstance(kind, AllGather):
                # The next stage sums the copies of a row that came from all ranks.
                summed = behind * (peers.size + 1) * stage.send[:, peers.position]
                pipeline.append(_copy(f"sum of {kind.name}", depths[position + 1], sum=summed))
    before, after = _around(bound, row, walk, gathered_counts)
    return WalkTraffic(before=before, pipeline=tuple(pipeline), after=after)


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


def _copy(stage: str, depth: int, **moved_bytes: RowCounts) -> CopyTraffic:
    return CopyTraffic(stage=stage, depth=depth, moved_bytes=moved_bytes)  # type: ignore[arg-type]


def _collective(
    stage: BoundStage, peers: Peers, message_bytes: tuple[int, ...], depth: int, transpose: bool
) -> CollectiveTraffic:
    assert isinstance(stage.stage, AllToAll | AllGather)
    send, receive = (stage.receive, stage.send) if transpose else (stage.send, stage.receive)
    gathers = isinstance(stage.stage, AllGather) and not transpose
    return CollectiveTraffic(
        stage=stage.stage.name,
        depth=depth,
        operation="allgather" if gathers else "alltoall",
        peers=peers,
        message_bytes=message_bytes,
        sent_bytes=_by_tier(peers, sum(message_bytes) * send),
        received_bytes=_by_tier(peers, sum(message_bytes) * receive),
    )


def _by_tier(peers: Peers, num_bytes: RowCounts) -> dict[str, RowCounts]:
    """[C, P] -> tier -> [C]."""
    return {"inter": num_bytes @ peers.inter, "intra": num_bytes @ peers.intra}


def _around(
    bound: BoundChain, row: RowFormat, walk: Walk, gathered_counts: int
) -> tuple[tuple[StageTraffic, ...], tuple[StageTraffic, ...]]:
    """What the dispatcher and Megatron do before and after the pipeline of a walk.

    Dispatch counts, gathers the counts, and makes lists of experts if rows are tokens. If rows are
    pairs, Megatron permutes tokens into pairs before dispatch and sums pairs into tokens after
    combine; the backward walks do the transposes.
    """
    before: list[StageTraffic] = []
    after: list[StageTraffic] = []
    sends_pairs = bound.chain.rows == "pairs"
    tokens = np.array([bound.num_source_rows / (row.list_width if sends_pairs else 1)])
    peers = peers_of(bound.layout, "tp_ep")
    if walk.ids:
        size_of_map = bound.layout.num_experts * tokens
        before.append(_copy("count", 0, count=COUNT_MAP_BYTES * size_of_map))
    if walk.ids and peers.size > 1:
        num_bytes = COUNT_BYTES * gathered_counts
        moved = _by_tier(peers, np.full((1, peers.size), num_bytes))
        gather = CollectiveTraffic(
            stage=GATHER_OF_COUNTS,
            depth=0,
            operation="allgather",
            peers=peers,
            message_bytes=(COUNT_BYTES,),
            sent_bytes=moved,
            received_bytes=moved,
        )
        before.append(gather)
    if walk.ids and not sends_pairs:
        before.append(_copy("lists of experts", 0, lists=LIST_MAP_BYTES * size_of_map))
    if sends_pairs:
        pairs = np.array([bound.num_source_rows])
        if walk.transpose:
            after.append(_copy("unpermute", 0, unpermute=row.hidden_bytes * (pairs + tokens)))
        else:
            before.append(_copy("permute", 0, permute=2 * row.hidden_bytes * pairs))
    return tuple(before), tuple(after)
