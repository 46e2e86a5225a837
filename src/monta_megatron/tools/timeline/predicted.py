"""The cost model's timeline: the schedules from which a chain is priced, laid end to end."""

from collections.abc import Iterator, Sequence

from monta_megatron.chains import Chain
from monta_megatron.chains.program import Operation
from monta_megatron.planner.chain_price import price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import Phase
from monta_megatron.planner.pricing import AROUND_STAGES, WalkPrice
from monta_megatron.planner.schedule import Work
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.timeline.spans import Lane, Span, Timeline, Track


def predict(
    workload: Workload, cluster: Cluster, chain: Chain, num_chunks: int, phase: Phase
) -> Timeline:
    """What the cost model expects of a chain.

    It prices the busiest rank of every stage, so one track stands for all ranks.
    """
    price = price_chain(workload, cluster, chain, num_chunks, phase)
    spans: list[Span] = []
    start_us = 0.0
    for walk in price.walks:
        spans += _spans_of(walk, start_us)
        start_us += walk.total_us
    track = Track(name="busiest rank, predicted", spans=tuple(spans))
    return Timeline(source="predicted", tracks=(track,))


def _spans_of(walk: WalkPrice, start_us: float) -> Iterator[Span]:
    if walk.host_us > 0:
        yield Span(
            walk=walk.walk,
            stage=AROUND_STAGES,
            chunk=None,
            lane="host",
            action="run",
            start_us=start_us,
            end_us=start_us + walk.host_us,
        )
        start_us += walk.host_us

    def span(
        work: Work, lane: Lane, start_us: float, end_us: float, operation: Operation | None = None
    ) -> Span:
        return Span(
            walk=walk.walk,
            stage=work.stage,
            chunk=None if operation is None else operation.chunk,
            lane=lane,
            action="launch" if lane == "host" else "run",
            start_us=start_us,
            end_us=end_us,
            operation=None if operation is None else operation.number,
        )

    def one_after_the_other(works: Sequence[Work], start_us: float) -> Iterator[Span]:
        for work in works:
            launched_us = start_us + work.launch_us
            if work.launch_us > 0:
                yield span(work, "host", start_us, launched_us)
            start_us = launched_us + sum(work.times_us)
            yield span(work, work.resource, launched_us, start_us)

    yield from one_after_the_other(walk.before, start_us)
    start_us += sum(work.launch_us + sum(work.times_us) for work in walk.before)

    schedule = walk.schedule
    for operation, times in zip(walk.program.operations, schedule.times, strict=True):
        work = walk.pipeline[operation.series]
        if work.launch_us > 0:
            end_us = start_us + times.launched_us
            yield span(work, "host", end_us - work.launch_us, end_us, operation)
        yield span(
            work, work.resource, start_us + times.start_us, start_us + times.end_us, operation
        )
    yield from one_after_the_other(walk.after, start_us + schedule.total_us)
