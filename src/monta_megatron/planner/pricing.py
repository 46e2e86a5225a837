"""What a pass costs on a cluster: bytes through the curves, stages through the schedule.

A collective of a group that spans nodes moves bytes through the network and the node link at once:
it takes the longer of the two times and occupies the network. All ranks of a group finish together,
so the busiest one is priced; where ranks share a network interface, the busiest interface.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from monta_megatron.chains.program import Kind, Program, Resource
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.host_costs import FINDS
from monta_megatron.planner.host_operations import Around, num_host_operations
from monta_megatron.planner.schedule import Schedule, Work, serial_us, simulate
from monta_megatron.planner.traffic import COUNT_EXCHANGE, PassTraffic, StageTraffic

# What the host does in a pass besides its stages.
AROUND_STAGES = "around the stages"


@dataclass(frozen=True, kw_only=True)
class PassPrice:
    """The time of one pass.

    Attributes:
        program: what runs in chunks.
        host_us: host time besides the stages, spent before them.
        before: what runs before the program, one after the other, each in one chunk.
        pipeline: the program, series by series.
        after: what runs after it, as before it.
        schedule: when the operations of the program run.
        notes: what had to be assumed.
    """

    program: Program
    host_us: float
    before: tuple[Work, ...]
    pipeline: tuple[Work, ...]
    after: tuple[Work, ...]
    schedule: Schedule
    notes: tuple[str, ...]

    @property
    def pass_name(self) -> str:
        """Name of the pass."""
        return self.program.pass_.name

    @property
    def works(self) -> tuple[Work, ...]:
        """Everything, in order."""
        return (*self.before, *self.pipeline, *self.after)

    @property
    def total_us(self) -> float:
        """From the first to the last operation."""
        return self._with_around(self.schedule.total_us)

    @property
    def exposed_us(self) -> float:
        """What training waits for where other work runs beside the program, and hides it.

        Nothing else is hidden: the host's time, and what runs before and after the program, are
        spent on the thread that issues that work and on the stream that it runs on.
        """
        return self._with_around(self.schedule.left_over_us)

    def busy_us(self, resource: str) -> float:
        """How long it occupies a resource; "host" for the time to start all of it."""
        works = self.works
        if resource == "host":
            return self.host_us + sum(work.launch_us * len(work.times_us) for work in works)
        return sum(sum(work.times_us) for work in works if work.resource == resource)

    def _with_around(self, program_us: float) -> float:
        return self.host_us + serial_us(self.before) + program_us + serial_us(self.after)


def price_pass(
    program: Program,
    traffic: PassTraffic,
    cluster: Cluster,
    nic_starts: Sequence[int],
    beside_us: float = 0.0,
) -> PassPrice:
    """Price one pass.

    Args:
        program: its program.
        traffic: what the ranks move in it, in order; a single one stands for all.
        cluster: the cluster whose costs are used.
        nic_starts: the first rank of each network interface; the ranks up to the next one share it.
        beside_us: other work that runs beside the program.
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
    pipeline = priced(traffic.pipeline, kinds, num_chunks, cluster.launch.stage_us)
    host_us = cluster.launch.pass_us + (cluster.launch.counts_us if program.pass_.ids else 0.0)
    return PassPrice(
        program=program,
        host_us=host_us,
        before=before,
        pipeline=pipeline,
        after=after,
        schedule=simulate(program.operations, pipeline, cluster.factor, beside_us),
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
    """What a stage costs, whose chunks take the host so many operations on tensors each."""
    launch_us = cluster.launch.start_us(stage.operation, host_operations)
    launch_us *= len(stage.message_bytes)
    if stage.stage == COUNT_EXCHANGE:
        launch_us += cluster.launch.counts_to_host_us
    if stage.operation not in FINDS:
        # Finding copies and making them is one stage to the host.
        launch_us += stage_us
    by_resource = [
        _times_us(stage, resource, cluster, nic_starts, notes) for resource in stage.moved
    ]
    times = list(map(max, zip(*by_resource, strict=True)))
    times[0] += cluster.launch.first_us(stage.operation)
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
