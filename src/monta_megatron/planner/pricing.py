"""What a walk costs on a cluster: bytes through the curves, stages through the schedule.

A collective of a group that spans nodes moves bytes in both tiers at once: it takes the longer of
the two times and occupies the network. All ranks of a group finish together, so the busiest one
is priced; where ranks share a network interface, the busiest interface.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from monta_megatron.chains.program import Program
from monta_megatron.chains.stages import RowCounts
from monta_megatron.planner.cluster import FINDS, Cluster
from monta_megatron.planner.curves import Operation, Tier
from monta_megatron.planner.schedule import (
    Schedule,
    Work,
    lower_bound_us,
    serial_us,
    simulate,
)
from monta_megatron.planner.traffic import (
    GATHER_OF_COUNTS,
    CollectiveTraffic,
    CopyTraffic,
    StageTraffic,
    WalkTraffic,
)

# What the host does in a walk besides its stages.
AROUND_STAGES = "around the stages"


@dataclass(frozen=True, kw_only=True)
class WalkPrice:
    """The time of one walk.

    Attributes:
        program: what runs in chunks.
        host_us: host time besides the stages, spent before them.
        before: what runs before the program, one after the other, each in one chunk.
        pipeline: the program, series by series.
        after: what runs after it, as before it.
        schedule: when the operations of the program run.
        lower_bound_us: lower bound for the whole walk; see `schedule.lower_bound_us`.
        notes: what had to be assumed.
    """

    program: Program
    host_us: float
    before: tuple[Work, ...]
    pipeline: tuple[Work, ...]
    after: tuple[Work, ...]
    schedule: Schedule
    lower_bound_us: float
    notes: tuple[str, ...]

    @property
    def walk(self) -> str:
        """Name of the pass."""
        return self.program.walked.name

    @property
    def works(self) -> tuple[Work, ...]:
        """Everything, in order."""
        return (*self.before, *self.pipeline, *self.after)

    @cached_property
    def total_us(self) -> float:
        """From the first to the last operation."""
        return (
            self.host_us + serial_us(self.before) + self.schedule.total_us + serial_us(self.after)
        )


def price_walk(
    program: Program, ranks: Sequence[WalkTraffic], cluster: Cluster, nic_starts: Sequence[int]
) -> WalkPrice:
    """Price one pass.

    Args:
        program: its program.
        ranks: what each rank of the exchange moves, in order; a single one stands for all.
        cluster: the cluster whose costs are used.
        nic_starts: the first rank of each network interface; the ranks up to the next one share it.
    """
    notes: dict[str, None] = {}

    def priced(part: str, stage_us: float = 0.0) -> tuple[Work, ...]:
        by_stage = zip(*(getattr(rank, part) for rank in ranks), strict=True)
        return tuple(_work(stages, cluster, nic_starts, stage_us, notes) for stages in by_stage)

    before, after = priced("before"), priced("after")
    pipeline = priced("pipeline", cluster.launch.stage_us)
    host_us = cluster.launch.walk_us + (cluster.launch.counts_us if program.walked.ids else 0.0)
    return WalkPrice(
        program=program,
        host_us=host_us,
        before=before,
        pipeline=pipeline,
        after=after,
        schedule=simulate(program.operations, pipeline, cluster.factor),
        lower_bound_us=host_us
        + serial_us(before)
        + lower_bound_us(pipeline, cluster.factor)
        + serial_us(after),
        notes=tuple(notes),
    )


def _resource_of(stages: Sequence[StageTraffic]) -> Tier:
    """What a stage occupies, from what every rank does in it."""
    if isinstance(stages[0], CopyTraffic):
        return "memory"
    groups = [stage.peers for stage in cast(Sequence[CollectiveTraffic], stages)]
    spans_nodes = any(peers.ranks_on_node < peers.size for peers in groups)
    return "inter" if spans_nodes else "intra"


def _work(
    stages: Sequence[StageTraffic],
    cluster: Cluster,
    nic_starts: Sequence[int],
    stage_us: float,
    notes: dict[str, None],
) -> Work:
    """One series, or what surrounds the program, from what every rank does in it."""
    first, resource, launch = stages[0], _resource_of(stages), cluster.launch
    launch_us = launch.start_us(first.operation)
    if isinstance(first, CopyTraffic):
        copies = cast(Sequence[CopyTraffic], stages)
        moved = _busiest([[rank.moved_bytes for rank in copies]], range(len(copies)))
        times = _times_us(cluster, first.operation, "memory", moved, 1, 1, notes)
    else:
        collectives = cast(Sequence[CollectiveTraffic], stages)
        times = _collective_times(collectives, resource, cluster, nic_starts, notes)
        launch_us *= len(first.message_bytes)
    if first.stage == GATHER_OF_COUNTS:
        launch_us += launch.counts_to_host_us
    if first.operation not in FINDS:
        # What is found and then copied is one stage to the host.
        launch_us += stage_us
    times[0] += launch.first_us(first.operation)
    return Work(stage=first.stage, resource=resource, times_us=tuple(times), launch_us=launch_us)


def _collective_times(
    ranks: Sequence[CollectiveTraffic],
    resource: Tier,
    cluster: Cluster,
    nic_starts: Sequence[int],
    notes: dict[str, None],
) -> list[float]:
    """[C] us, of a collective that occupies `resource`."""
    first = ranks[0]
    size = first.peers.size
    # The groups of the exchange may lie on the nodes in different ways.
    on_node = [rank.peers.ranks_on_node for rank in ranks]

    def times_in(tier: Tier, moved: Sequence[float], group_size: int, most: int) -> list[float]:
        """[C] us for all messages, one after the other, as a GPU stream or a host handles them."""
        row_bytes = sum(first.message_bytes)
        messages = first.message_bytes
        if first.messages_overlap and tier == "inter":
            messages = (row_bytes,)
        by_message = [
            _times_us(
                cluster,
                first.operation,
                tier,
                [num_bytes * message / row_bytes for num_bytes in moved],
                group_size,
                most,
                notes,
            )
            for message in messages
        ]
        return [sum(chunk) for chunk in zip(*by_message, strict=True)]

    times: list[float] = []
    if max(on_node) > 1:
        moved = _busiest(_directions(ranks, "intra"), range(len(ranks)))
        times = times_in("intra", moved, max(on_node), max(on_node))
    if resource == "inter":
        moved = _busiest(_directions(ranks, "inter"), nic_starts)
        network = times_in("inter", moved, size, min(on_node))
        times = list(map(max, times, network)) if times else network
    return times


def _directions(ranks: Sequence[CollectiveTraffic], tier: str) -> list[list[RowCounts]]:
    """[2][ranks] of [C] bytes: what leaves each rank, and what arrives at it."""
    return [
        [rank.sent_bytes[tier] for rank in ranks],
        [rank.received_bytes[tier] for rank in ranks],
    ]


def _busiest(directions: Sequence[Sequence[RowCounts]], starts: Sequence[int]) -> list[float]:
    """[C] bytes per rank in the busiest run of ranks, in the busier direction.

    Args:
        directions: [directions][ranks] of [C] bytes.
        starts: the first rank of each run.
    """
    if len(directions[0]) == 1:
        return [
            max(chunk) for chunk in zip(*(ranks[0].tolist() for ranks in directions), strict=True)
        ]
    shares = np.diff([*starts, len(directions[0])])[:, None]
    by_direction = [
        (np.add.reduceat(np.stack(ranks), starts, axis=0) / shares).max(axis=0)
        for ranks in directions
    ]
    busiest: list[float] = np.max(by_direction, axis=0).tolist()
    return busiest


def _times_us(
    cluster: Cluster,
    operation: Operation,
    tier: Tier,
    moved: Sequence[float],
    group_size: int,
    ranks_on_node: int,
    notes: dict[str, None],
) -> list[float]:
    """[C] bytes -> [C] us; chunks are mostly alike, so each size is looked up once."""
    found: dict[float, float] = {}
    for num_bytes in moved:
        if num_bytes not in found:
            time = cluster.time_us(operation, tier, num_bytes, group_size, ranks_on_node)
            found[num_bytes] = time.us
            if time.note is not None:
                notes.setdefault(time.note)
    return [found[num_bytes] for num_bytes in moved]
