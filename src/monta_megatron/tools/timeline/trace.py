"""Timelines as a Chrome trace: a process per rank, a thread per resource; opens in Perfetto.

The format: "Trace Event Format", events of phase "X" with start and duration in us. Slices of one
thread have to be nested, so spans that overlap on one resource go to additional threads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from monta_megatron.exchange.recording import Span
from monta_megatron.tools.timeline.spans import RESOURCES_AND_HOST, Timeline, rows_of

# More than the number of rows that a resource will ever have.
THREADS_PER_RESOURCE = 100
# Perfetto takes both thread 0 and a thread with its process's number for the main thread.
FIRST_THREAD = 1
PROCESS_STEP = 1000
# Perfetto truncates starts and durations to whole nanoseconds separately, and drops a slice that
# then begins before its predecessor has ended.
GAP_US = 1e-3


def chrome_trace(timelines: Sequence[Timeline], about: Mapping[str, Any]) -> dict[str, Any]:
    """A document for chrome://tracing and https://ui.perfetto.dev.

    Args:
        timelines: what to show; tracks become processes 1000, 2000 and so on, in this order.
        about: metadata to store with the events.
    """
    tracks = [
        replace(track, name=f"{timeline.name}: {track.name}")
        for timeline in timelines
        for track in timeline.tracks
    ]
    events: list[dict[str, Any]] = []
    for order, track in enumerate(tracks, 1):
        process = PROCESS_STEP * order
        events += _named("process", track.name, process, FIRST_THREAD, order)
        for position, (resource, name) in enumerate(RESOURCES_AND_HOST.items()):
            spans = [span for span in track.spans if span.resource == resource]
            for number, row in enumerate(rows_of(spans)):
                thread = FIRST_THREAD + position * THREADS_PER_RESOURCE + number
                numbered = f"{name} ({number + 1})" if number else name
                events += _named("thread", numbered, process, thread, thread)
                events += [_event(span, process, thread) for span in row]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def _event(span: Span, process: int, thread: int) -> dict[str, Any]:
    verb = {"run": "", "launch": "launch ", "wait": "wait for "}[span.action]
    chunk = "" if span.chunk is None else f", chunk {span.chunk}"
    start_us, end_us = round(span.start_us, 3), round(span.end_us, 3)
    return {
        "ph": "X",
        "name": f"{verb}{span.stage}{chunk}",
        "cat": span.pass_name,
        "pid": process,
        "tid": thread,
        "ts": start_us,
        "dur": max(round(end_us - start_us - GAP_US, 3), 0.0),
        "args": {"pass": span.pass_name, "stage": span.stage, "chunk": span.chunk},
    }


def _named(kind: str, name: str, process: int, thread: int, order: int) -> Iterator[dict[str, Any]]:
    where = {"ph": "M", "pid": process, "tid": thread}
    yield {**where, "name": f"{kind}_name", "args": {"name": name}}
    yield {**where, "name": f"{kind}_sort_index", "args": {"sort_index": order}}
