"""Price of a pass on a cluster: bytes through the curves, operations through the schedule.

A collective of a group that spans nodes moves bytes through the network and the node link at once:
it takes the longer of the two times and occupies the network. All ranks of a group finish together,
so the busiest one is priced; where ranks share a network interface, the busiest interface.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

import numpy as np

from monta_megatron.chains.program import Kind, Program, Resource
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import FINDS
from monta_megatron.planner.schedule import Factor, Schedule, Work, serial_us, simulate
from monta_megatron.planner.traffic import (
    COUNT_EXCHANGE,
    Around,
    PassTraffic,
    StageTraffic,
    num_host_operations,
)

# Host work of a pass besides its stages.
AROUND_STAGES = "around the stages"
# Of a pass that is priced and not yet scheduled.
NOT_YET = Schedule(times=(), host_us=0.0, total_us=0.0)
# Rounds in which the leads of backward passes settle where the host takes longer than the device.
LEAD_ROUNDS = 4


class Reached(NamedTuple):
    """Times of host and device, from the end of all work queued before a pass."""

    host_us: float
    device_us: float

    def after(self, works: Iterable[Work]) -> "Reached":
        """Behind works that the host launches one after the other."""
        host_us, device_us = self
        for work in works:
            host_us += work.launch_us * len(work.times_us)
            device_us = max(device_us, host_us) + sum(work.times_us)
        return Reached(host_us, device_us)


@dataclass(frozen=True, kw_only=True)
class PassPrice:
    """The time of one pass.

    Attributes:
        program: the part that runs in chunks.
        host_us: host time besides the stages, spent before them.
        before: works before the program, one after the other, each in one chunk.
        pipeline: the program, series by series.
        after: works after it, likewise.
        schedule: when the operations of the program run.
        notes: assumptions.
        lead_us: by how much the host is ahead of the device at the start; see `schedule`.
    """

    program: Program
    host_us: float
    before: tuple[Work, ...]
    pipeline: tuple[Work, ...]
    after: tuple[Work, ...]
    schedule: Schedule
    notes: tuple[str, ...]
    lead_us: float = 0.0

    @property
    def pass_name(self) -> str:
        """Name of the pass."""
        return self.program.pass_.name

    @property
    def is_backward(self) -> bool:
        """Whether it is a backward pass."""
        return self.program.pass_.name.endswith("backward")

    @property
    def works(self) -> tuple[Work, ...]:
        """Everything, in order."""
        return (*self.before, *self.pipeline, *self.after)

    @property
    def total_us(self) -> float:
        """Time from the first to the last operation."""
        return self._end.device_us

    @property
    def left_us(self) -> float:
        """Lead of the host at the end, for the next pass."""
        if self.waits:
            return 0.0
        end = self._end
        return max(end.device_us - end.host_us, 0.0)

    @property
    def waits(self) -> bool:
        """Whether the host waits for the operations that it starts, as on CPU ranks."""
        return self.program.policy == "host"

    @property
    def start_us(self) -> float:
        """When the program starts, at the earliest."""
        return max(self._before)

    def busy_us(self, resource: str) -> float:
        """Time for which it occupies a resource; "host" for the time to start all of it."""
        works = self.works
        if resource == "host":
            return self.host_us + sum(work.launch_us * len(work.times_us) for work in works)
        return sum(sum(work.times_us) for work in works if work.resource == resource)

    def scheduled(self, factor: Factor, lead_us: float) -> "PassPrice":
        """The same pass with another lead."""
        led = replace(self, lead_us=lead_us)
        reached = led._before
        schedule = simulate(
            self.program.operations,
            self.pipeline,
            factor,
            lead_us=max(reached.device_us - reached.host_us, 0.0),
        )
        return replace(led, schedule=schedule)

    @cached_property
    def _before(self) -> Reached:
        """Times of host and device when the program begins."""
        if self.waits or self.program.pass_.ids:
            # It waits for the counts, behind which nothing is queued.
            before_us = self.host_us + serial_us(self.before)
            return Reached(before_us, before_us)
        return Reached(self.host_us - self.lead_us, 0.0).after(self.before)

    @cached_property
    def _end(self) -> Reached:
        """Times of host and device at the end."""
        device_us = self.start_us + self.schedule.total_us
        if self.waits:
            device_us += serial_us(self.after)
            return Reached(device_us, device_us)
        host_us = self.start_us + self.schedule.host_us
        return Reached(host_us, device_us).after(self.after)


def with_leads(passes: Sequence[PassPrice], factor: Factor) -> tuple[PassPrice, ...]:
    """Passes in their order, scheduled with the leads that they have in a training; see `schedule`.

    Args:
        passes: of one layer; backward passes last.
        factor: see `schedule.simulate`.
    """
    led: list[PassPrice] = []
    backward: list[PassPrice] = []
    for of_pass in passes:
        if of_pass.waits:
            led.append(of_pass.scheduled(factor, 0.0))
        elif of_pass.is_backward:
            backward.append(of_pass.scheduled(factor, of_pass.busy_us("host")))
        else:
            lead_us = led[-1].left_us if led else 0.0
            led.append(of_pass.scheduled(factor, lead_us))
    host_us = sum(of_pass.busy_us("host") for of_pass in backward)
    if host_us > sum(of_pass.total_us for of_pass in backward):
        lead_us = 0.0
        for _ in range(LEAD_ROUNDS):
            for place, of_pass in enumerate(backward):
                backward[place] = of_pass.scheduled(factor, lead_us)
                lead_us = backward[place].left_us
    return (*led, *backward)


def price_pass(
    program: Program, traffic: PassTraffic, cluster: Cluster, nic_starts: Sequence[int]
) -> PassPrice:
    """Price one pass; `with_leads` says when its operations run.

    Args:
        program: its program.
        traffic: what the ranks move in it, in order; a single one stands for all.
        cluster: the cluster whose costs are used.
        nic_starts: the first rank of each network interface; the ranks up to the next one share it.
    """
    notes: dict[str, None] = {}

    def priced(
        stages: Sequence[StageTraffic],
        kinds: Iterable[Kind | Around],
        num_chunks: int = 1,
        stage_us: float = 0.0,
    ) -> tuple[Work, ...]:
        return tuple(
            work_of(
                stage,
                num_host_operations(kind, program.pass_, program.row, program.policy, num_chunks),
                cluster,
                nic_starts,
                stage_us,
                notes,
            )
            for stage, kind in zip(stages, kinds, strict=True)
        )

    before, after = (
        priced(around, [cast("Kind | Around", stage.operation) for stage in around])
        for around in (traffic.before, traffic.after)
    )
    kinds = [series[0].kind for series in program.series]
    num_chunks = len(program.series[0]) if program.series else 1
    pipeline = priced(traffic.pipeline, kinds, num_chunks, cluster.host.stage_us)
    host_us = cluster.host.pass_us + (cluster.host.counts_us if program.pass_.ids else 0.0)
    return PassPrice(
        program=program,
        host_us=host_us,
        before=before,
        pipeline=pipeline,
        after=after,
        schedule=NOT_YET,
        notes=tuple(notes),
    )


def work_of(
    stage: StageTraffic,
    host_operations: float,
    cluster: Cluster,
    nic_starts: Sequence[int],
    stage_us: float,
    notes: dict[str, None],
) -> Work:
    """Cost of a stage whose chunks take the host so many operations on tensors each."""
    host = cluster.host
    num_peers = max((moved.group_size for moved in stage.moved.values()), default=1) - 1
    launch_us = host.start_us(stage.operation, host_operations, num_peers)
    launch_us *= len(stage.message_bytes)
    if stage.stage == COUNT_EXCHANGE:
        launch_us += host.counts_to_host_us
    if stage.operation not in FINDS:
        # Finding copies and making them is one stage to the host.
        launch_us += stage_us
    by_resource = [
        _times_us(stage, resource, cluster, nic_starts, notes) for resource in stage.moved
    ]
    times = list(map(max, zip(*by_resource, strict=True)))
    times[0] += host.first_us(stage.operation)
    return Work(
        stage=stage.stage, resource=stage.resource, times_us=tuple(times), launch_us=launch_us
    )


def _times_us(
    stage: StageTraffic,
    resource: Resource,
    cluster: Cluster,
    nic_starts: Sequence[int],
    notes: dict[str, None],
) -> list[float]:
    """[C] us in one resource, for all messages as a GPU stream or a host handles them."""
    num_bytes, group_size, ranks_on_node = stage.moved[resource]
    num_ranks = num_bytes.shape[1]
    if resource == "inter" and num_ranks > 1:
        sharing = np.diff([*nic_starts, num_ranks])[:, None]
        num_bytes = np.add.reduceat(num_bytes, nic_starts, axis=1) / sharing
    row_bytes, messages = sum(stage.message_bytes), stage.message_bytes
    if stage.messages_overlap and resource == "inter":
        messages = (row_bytes,)
    busiest: list[float] = num_bytes.max(axis=(0, 1)).tolist()
    # Most chunks are as large as others, so each size is looked up once.
    times_us = dict.fromkeys(busiest, 0.0)
    for moved in times_us:
        for message in messages:
            time = cluster.time_us(
                stage.operation, resource, moved * message / row_bytes, group_size, ranks_on_node
            )
            times_us[moved] += time.us
            if time.note is not None:
                notes.setdefault(time.note)
    return [times_us[moved] for moved in busiest]
