"""The cost model's timeline: the schedule from which a chain is priced."""

from collections.abc import Iterator
from dataclasses import replace

from monta_megatron.chains import Chain
from monta_megatron.chains.program import Phase
from monta_megatron.core import Shape
from monta_megatron.exchange.recording import Span
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.price import Price, price
from monta_megatron.tools.timeline.spans import Timeline, Track, pipeline_name


def predict(
    shape: Shape, cluster: Cluster, chain: Chain, num_chunks: int, phase: Phase
) -> Timeline:
    """Predict the timeline of a chain.

    It prices the busiest rank of every stage, so one track stands for all ranks.
    """
    priced = price(shape, cluster, chain, num_chunks, phase)
    track = Track(name="busiest rank, predicted", spans=tuple(_spans_of(priced)))
    name = pipeline_name(chain.name, num_chunks)
    return Timeline(source="predicted", name=name, tracks=(track,))


def _spans_of(priced: Price) -> Iterator[Span]:
    """The launch of every task, if the host takes time for it, and its run.

    What the host does for a pass while the pass before it runs is left out.
    """
    ends_us: dict[str, float] = {}
    for task, times in zip(priced.tasks, priced.times, strict=True):
        work = priced.works[task.work]
        first_us = max(
            (end for name, end in ends_us.items() if name != work.pass_name), default=0.0
        )
        ends_us[work.pass_name] = max(times.end_us, ends_us.get(work.pass_name, 0.0))
        run = Span(
            pass_name=work.pass_name,
            stage=work.stage,
            chunk=task.chunk,
            resource=work.resource,
            action="run",
            start_us=times.start_us,
            end_us=times.end_us,
            operation=task.operation,
        )
        is_host = work.resource == "host"
        if task.launch_us > 0 and times.launched_us > first_us:
            begin_us = max(times.launched_us - task.launch_us, first_us)
            launch = replace(run, start_us=begin_us, end_us=times.launched_us)
            yield launch if is_host else replace(launch, resource="host", action="launch")
        if not is_host:
            yield run
