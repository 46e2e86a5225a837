"""The cost model's timeline: the schedules from which a chain is priced, laid end to end."""

from collections.abc import Iterator, Sequence

from monta_megatron.chains import Chain
from monta_megatron.chains.program import Operation, Phase
from monta_megatron.planner.chain_price import price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.pricing import AROUND_STAGES, PassPrice
from monta_megatron.planner.schedule import Work
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.timeline.spans import Span, SpanResource, Timeline, Track


def predict(
    workload: Workload, cluster: Cluster, chain: Chain, num_chunks: int, phase: Phase
) -> Timeline:
    """What the cost model expects of a chain.

    It prices the busiest rank of every stage, so one track stands for all ranks.
    """
    price = price_chain(workload, cluster, chain, num_chunks, phase)
    spans: list[Span] = []
    start_us = 0.0
    for pass_name in price.passes:
        spans += _spans_of(pass_name, start_us)
        start_us += pass_name.total_us
    track = Track(name="busiest rank, predicted", spans=tuple(spans))
    return Timeline(source="predicted", tracks=(track,))


def _spans_of(pass_name: PassPrice, start_us: float) -> Iterator[Span]:
    if pass_name.host_us > 0:
        yield Span(
            pass_name=pass_name.pass_name,
            stage=AROUND_STAGES,
            chunk=None,
            resource="host",
            action="run",
            start_us=start_us,
            end_us=start_us + pass_name.host_us,
        )
        start_us += pass_name.host_us

    def span(
        work: Work,
        resource: SpanResource,
        start_us: float,
        end_us: float,
        operation: Operation | None = None,
    ) -> Span:
        return Span(
            pass_name=pass_name.pass_name,
            stage=work.stage,
            chunk=None if operation is None else operation.chunk,
            resource=resource,
            action="launch" if resource == "host" else "run",
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

    yield from one_after_the_other(pass_name.before, start_us)
    start_us += sum(work.launch_us + sum(work.times_us) for work in pass_name.before)

    schedule = pass_name.schedule
    for operation, times in zip(pass_name.program.operations, schedule.times, strict=True):
        work = pass_name.pipeline[operation.series]
        if work.launch_us > 0:
            end_us = start_us + times.launched_us
            yield span(work, "host", end_us - work.launch_us, end_us, operation)
        yield span(
            work, work.resource, start_us + times.start_us, start_us + times.end_us, operation
        )
    yield from one_after_the_other(pass_name.after, start_us + schedule.total_us)
