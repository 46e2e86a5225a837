"""The cost model's timeline: the schedules from which a chain is priced, laid end to end."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from monta_megatron.chains import Chain
from monta_megatron.chains.program import Operation, Phase
from monta_megatron.core import Shape
from monta_megatron.exchange.recording import Span
from monta_megatron.planner.chain_price import price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.pricing import AROUND_STAGES, PassPrice
from monta_megatron.planner.schedule import Work
from monta_megatron.tools.timeline.spans import Timeline, Track, pipeline_name

# Times that are equal differ by rounding.
TOLERANCE_US = 1e-6


def predict(
    shape: Shape,
    cluster: Cluster,
    chain: Chain,
    num_chunks: int,
    phase: Phase,
    num_counts: int | None = None,
) -> Timeline:
    """Predict the timeline of a chain.

    It prices the busiest rank of every stage, so one track stands for all ranks. `num_counts` are
    the integers to each rank in the exchange of counts, None for those that the chain needs.
    """
    price = price_chain(shape, cluster, chain, num_chunks, phase, num_counts)
    spans: list[Span] = []
    start_us = 0.0
    for priced in price.passes:
        # Host work ahead of a pass lies beside an earlier one, or another layer.
        spans += (
            span for span in _spans_of(priced, start_us) if span.start_us > start_us - TOLERANCE_US
        )
        start_us += priced.total_us
    track = Track(name="busiest rank, predicted", spans=tuple(spans))
    name = pipeline_name(chain.name, num_chunks)
    return Timeline(source="predicted", name=name, tracks=(track,))


def _spans_of(priced: PassPrice, start_us: float) -> Iterator[Span]:
    first_us = start_us - priced.lead_us
    if priced.host_us > 0:
        yield Span(
            pass_name=priced.pass_name,
            stage=AROUND_STAGES,
            chunk=None,
            resource="host",
            action="run",
            start_us=first_us,
            end_us=first_us + priced.host_us,
        )

    def spans_of(
        work: Work,
        launched_us: float,
        runs_us: tuple[float, float],
        operation: Operation | None = None,
    ) -> Iterator[Span]:
        """The launch, if the host takes time for it, and the run."""
        run = Span(
            pass_name=priced.pass_name,
            stage=work.stage,
            chunk=None if operation is None else operation.chunk,
            resource=work.resource,
            action="run",
            start_us=runs_us[0],
            end_us=runs_us[1],
            operation=None if operation is None else operation.number,
        )
        if work.launch_us > 0:
            yield replace(
                run,
                resource="host",
                action="launch",
                start_us=launched_us - work.launch_us,
                end_us=launched_us,
            )
        yield run

    def one_after_the_other(
        works: Sequence[Work], host_us: float, device_us: float, waits: bool
    ) -> Iterator[Span]:
        for work in works:
            host_us = (max(host_us, device_us) if waits else host_us) + work.launch_us
            begun_us = max(host_us, device_us)
            device_us = begun_us + sum(work.times_us)
            yield from spans_of(work, host_us, (begun_us, device_us))

    waits = priced.waits or priced.program.pass_.ids
    yield from one_after_the_other(priced.before, first_us + priced.host_us, start_us, waits)
    start_us += priced.start_us

    for operation, times in zip(priced.program.operations, priced.schedule.times, strict=True):
        yield from spans_of(
            priced.pipeline[operation.series],
            start_us + times.launched_us,
            (start_us + times.start_us, start_us + times.end_us),
            operation,
        )
    host_us, end_us = (
        start_us + time_us for time_us in (priced.schedule.host_us, priced.schedule.total_us)
    )
    yield from one_after_the_other(priced.after, host_us, end_us, priced.waits)
