"""Traces: when each operation of a dispatcher's passes ran, on every rank, as a file. No torch.

The format is Chrome's "Trace Event Format", which https://ui.perfetto.dev opens: a process for each
rank, a thread for its passes and for each resource, events of phase "X" with start and duration in
us. The rows of a benchmark follow each other in time. Slices of one thread have to be nested, so
what overlaps on one resource goes to additional threads.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from monta_megatron.chains.program import Resource
from monta_megatron.common.files import read_text, write_whole
from monta_megatron.planner.curves import RESOURCE_NAMES

ResourceOrHost: TypeAlias = Literal[Resource, "host"]
# With their names in tables and pictures, in their order there.
RESOURCES_AND_HOST: Mapping[str, str] = {**RESOURCE_NAMES, "host": "host"}
STOCK = "stock alltoall"

# Thread of a process's first name; its sort index comes first.
PASSES_THREAD = 1
# More than the number of lanes that a resource will ever have.
THREADS_PER_RESOURCE = 100
# Perfetto takes both thread 0 and a thread with its process's number for the main thread.
PROCESS_STEP = 1000
# Perfetto truncates starts and durations to whole nanoseconds separately, and drops a slice that
# then begins before its predecessor has ended.
RESOLUTION_US = 1e-3


class Span(NamedTuple):
    """An operation on a resource, or its launch by the host of a device.

    Attributes:
        pass_name: dispatch, combine, or the backward pass of one of them.
        stage: a stage of the chain, or work before or after it.
        chunk: None for all chunks at once.
        operation: its number in the program of the pass; None outside of a program.
        resource: that it occupies.
        start_us, end_us: since the start of the trace, or of a predicted exchange.
    """

    pass_name: str
    stage: str
    chunk: int | None
    operation: int | None
    resource: ResourceOrHost
    start_us: float
    end_us: float


# The stage of a span that stands for a whole pass.
WHOLE_PASS = ""
# What an event holds of a span besides its times.
SPAN_FIELDS = Span._fields[:5]


class Track(NamedTuple):
    """One rank.

    Attributes:
        name: to show.
        passes: name -> start and end, in us. On a device a pass begins when the host comes to it,
            which may be before the device has ended the pass before.
        spans: each inside of its pass.
    """

    name: str
    passes: Mapping[str, tuple[float, float]]
    spans: tuple[Span, ...]

    def shifted(self, by_us: float) -> "Track":
        """The same track, `by_us` later."""
        return Track(
            name=self.name,
            passes={
                name: (start_us + by_us, end_us + by_us)
                for name, (start_us, end_us) in self.passes.items()
            },
            spans=tuple(
                span._replace(start_us=span.start_us + by_us, end_us=span.end_us + by_us)
                for span in self.spans
            ),
        )


class Timeline(NamedTuple):
    """One row of a benchmark: a pass of each kind, on every rank; predicted, one track for all.

    Attributes:
        name: the chain and its number of chunks, or `STOCK`.
        tracks: the ranks, in order.
    """

    name: str
    tracks: tuple[Track, ...]

    @property
    def start_us(self) -> float:
        """First start of a pass on any rank."""
        return min(start for track in self.tracks for start, _ in track.passes.values())

    @property
    def total_us(self) -> float:
        """From the first start to the last end of a pass, on any rank."""
        ends = (end for track in self.tracks for _, end in track.passes.values())
        return max(ends) - self.start_us

    def shifted(self, by_us: float) -> "Timeline":
        """The same timeline, `by_us` later."""
        return self._replace(tracks=tuple(track.shifted(by_us) for track in self.tracks))


def pipeline_name(chain: str, num_chunks: int) -> str:
    """The text for a chain with a number of chunks."""
    return f"{chain} in 1 chunk" if num_chunks == 1 else f"{chain} in {num_chunks} chunks"


def lanes_of(spans: Sequence[Span]) -> list[list[Span]]:
    """One resource's spans in as few lanes as possible without overlap, the first filled first."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_us, span.end_us)):
        for lane in lanes:
            if lane[-1].end_us <= span.start_us + RESOLUTION_US:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a benchmark has recorded.

    Attributes:
        title: what ran, and on what, in one line.
        timelines: the rows, in order.
        about: the machine, the command, the clock; kept in the file.
    """

    title: str
    timelines: tuple[Timeline, ...]
    about: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all; its times begin at 0.

        Raises:
            OSError: it cannot be written.
        """
        first_us = min(timeline.start_us for timeline in self.timelines)
        document = {
            "traceEvents": list(self._events(first_us)),
            "displayTimeUnit": "ms",
            "otherData": {"title": self.title, **self.about},
        }
        write_whole(path, json.dumps(document) + "\n")

    def _events(self, first_us: float) -> Iterator[dict[str, Any]]:
        """The slices of each thread, and the names of processes and threads."""
        names: dict[tuple[int, int], tuple[str, str]] = {}
        for timeline in self.timelines:
            for rank, track in enumerate(timeline.shifted(-first_us).tracks):
                process = PROCESS_STEP * (rank + 1)
                names[process, PASSES_THREAD] = "process", track.name
                # On one thread, unless they overlap.
                lanes = {"passes": lanes_of(_pass_spans(track))}
                for resource, name in RESOURCES_AND_HOST.items():
                    spans = [span for span in track.spans if span.resource == resource]
                    lanes[name] = lanes_of(spans)
                for position, (name, lanes_here) in enumerate(lanes.items()):
                    for number, lane in enumerate(lanes_here):
                        thread = PASSES_THREAD + 1 + position * THREADS_PER_RESOURCE + number
                        numbered = f"{name} ({number + 1})" if number else name
                        names[process, thread] = "thread", numbered
                        yield from (_slice(timeline.name, span, process, thread) for span in lane)
        for (process, thread), (kind, name) in names.items():
            where = {"ph": "M", "pid": process, "tid": thread}
            yield {**where, "name": f"{kind}_name", "args": {"name": name}}
            yield {**where, "name": f"{kind}_sort_index", "args": {"sort_index": thread}}

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read a file of `save`.

        Raises:
            ValueError: one line that names the file and what is wrong with it.
        """
        text = read_text(path, "a trace of monta bench --trace")
        # row -> process -> its passes and spans
        rows: dict[str, dict[int, tuple[dict[str, Any], list[Span]]]] = {}
        names: dict[int, str] = {}
        try:
            document = json.loads(text)
            for event in document["traceEvents"]:
                process, args = event["pid"], event["args"]
                if event["name"] == "process_name":
                    names[process] = args["name"]
                if event["ph"] != "X":
                    continue
                passes, spans = rows.setdefault(args["row"], {}).setdefault(process, ({}, []))
                times_us = event["ts"], event["ts"] + event["dur"]
                span = Span._make([*(args[name] for name in SPAN_FIELDS), *times_us])
                if span.stage == WHOLE_PASS:
                    passes[span.pass_name] = times_us
                else:
                    spans.append(span)
            about = dict(document["otherData"])
            timelines = []
            for row, ranks in rows.items():
                tracks = (
                    Track(names[process], passes, tuple(spans))
                    for process, (passes, spans) in sorted(ranks.items())
                )
                timelines.append(Timeline(row, tuple(tracks)))
            return cls(title=about.pop("title"), timelines=tuple(timelines), about=about)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path}: is no trace, must be one that monta bench --trace has written"
            ) from error


def _pass_spans(track: Track) -> list[Span]:
    return [
        Span(name, WHOLE_PASS, None, None, "host", *times_us)
        for name, times_us in track.passes.items()
    ]


def _slice(row: str, span: Span, process: int, thread: int) -> dict[str, Any]:
    chunk = "" if span.chunk is None else f", chunk {span.chunk}"
    launch = "launch " if span.resource == "host" else ""
    is_pass = span.stage == WHOLE_PASS
    start_us, end_us = round(span.start_us, 3), round(span.end_us, 3)
    return {
        "ph": "X",
        "name": f"{row}: {span.pass_name}" if is_pass else f"{launch}{span.stage}{chunk}",
        "cat": "pass" if is_pass else "operation",
        "pid": process,
        "tid": thread,
        "ts": start_us,
        "dur": max(round(end_us - start_us - RESOLUTION_US, 3), 0.0),
        "args": {"row": row, **dict(zip(SPAN_FIELDS, span, strict=False))},
    }
