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
    """The launch of every task, if the host takes time for it, and its run."""
    for task, times in zip(priced.tasks, priced.times, strict=True):
        work = priced.works[task.work]
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
        begin_us = times.launched_us - task.launch_us
        if work.resource == "host":
            yield replace(run, start_us=begin_us, end_us=times.launched_us)
            continue
        if task.launch_us > 0:
            launch = replace(run, resource="host", action="launch")
            yield replace(launch, start_us=begin_us, end_us=times.launched_us)
        yield run
