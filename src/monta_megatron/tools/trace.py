"""Traces: when each operation of a dispatcher's passes ran, on every rank, as a file. No torch.

The format is Chrome's "Trace Event Format", which https://ui.perfetto.dev opens: a process for each
rank, a thread for its passes and for each resource, events of phase "X" with start and duration in
us. The rows of a benchmark follow each other in time. Slices of one thread have to be nested, so
what overlaps on one resource goes to additional threads.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from monta_megatron.chains.program import Resource
from monta_megatron.common.errors import UserError
from monta_megatron.common.files import read_text, write_whole
from monta_megatron.planner.curves import RESOURCE_NAMES

STOCK = "stock alltoall"
SpanResource: TypeAlias = Resource | Literal["host", "pass"]
# With their names for people, in the order in which they are shown.
RESOURCES: Mapping[str, str] = {"pass": "passes", **RESOURCE_NAMES, "host": "host"}

# Perfetto takes both thread 0 and a thread with its process's number for the main thread.
PROCESS_STEP = 1000
# Perfetto truncates starts and durations to whole nanoseconds separately, and drops a slice that
# then begins before its predecessor has ended.
RESOLUTION_US = 1e-3


class Span(NamedTuple):
    """An operation on a resource, its launch by the host of a device, or a whole pass.

    Attributes:
        row: name of the benchmark's row: a chain and its number of chunks, or `STOCK`.
        rank: rank that ran the operation.
        pass_name: dispatch, combine, or the backward pass of one of them.
        stage: stage of the chain, or work before or after it; "" for a pass.
        chunk: chunk number; None for all chunks at once.
        operation: number of the operation in the program of the pass; None outside of a program.
        resource: resource that the operation occupies; "pass" for a pass. On a device a pass starts
            when the host reaches it, perhaps before the device has finished the previous pass.
        start_us, end_us: times since the start of the trace.
    """

    row: str
    rank: int
    pass_name: str
    stage: str
    chunk: int | None
    operation: int | None
    resource: SpanResource
    start_us: float
    end_us: float


def lanes_of(spans: Iterable[Span]) -> list[list[Span]]:
    """A rank's spans by resource, in as few lanes per resource as possible, filled in order."""
    order = list(RESOURCES)
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: (order.index(s.resource), s.start_us, s.end_us)):
        for lane in lanes:
            last = lane[-1]
            if last.resource == span.resource and last.end_us <= span.start_us + RESOLUTION_US:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Spans of a benchmark's rows.

    Attributes:
        title: one line about the benchmark and its machine.
        ranks: names of the ranks, in order.
        spans: spans of all ranks.
        about: machine, command and clock, as kept in the file.
    """

    title: str
    ranks: tuple[str, ...]
    spans: tuple[Span, ...]
    about: Mapping[str, Any]

    @cached_property
    def rows(self) -> dict[str, list[Span]]:
        """Name -> spans of all ranks, in the order of the first rank."""
        rows: dict[str, list[Span]] = defaultdict(list)
        for span in self.spans:
            rows[span.row].append(span)
        return rows

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all; its times begin at 0.

        Raises:
            OSError: it cannot be written.
        """
        document = {
            "traceEvents": list(self._events()),
            "otherData": {"title": self.title, "ranks": self.ranks, **self.about},
        }
        write_whole(path, json.dumps(document) + "\n")

    def _events(self) -> Iterator[dict[str, Any]]:
        """The slices of each thread, and the names of processes and threads."""
        first_us = min(span.start_us for span in self.spans)
        by_rank: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            start_us, end_us = span.start_us - first_us, span.end_us - first_us
            by_rank[span.rank].append(span._replace(start_us=start_us, end_us=end_us))
        for rank, name in enumerate(self.ranks):
            process = PROCESS_STEP * (rank + 1)
            yield from _names("process", name, process, 1)
            for thread, lane in enumerate(lanes_of(by_rank[rank]), 2):
                yield from _names("thread", RESOURCES[lane[0].resource], process, thread)
                yield from (_slice(span, process, thread) for span in lane)

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Read a file of `save`.

        Raises:
            UserError: one line that names the file and what is wrong with it.
        """
        text = read_text(path, "a trace of monta bench --trace")
        try:
            document = json.loads(text)
            spans = tuple(
                Span(**event["args"]) for event in document["traceEvents"] if event["ph"] == "X"
            )
            about = dict(document["otherData"])
            title, ranks = about.pop("title"), tuple(about.pop("ranks"))
            return cls(title=title, ranks=ranks, spans=spans, about=about)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f"{path}: is no trace, must be one that monta bench --trace has written"
            ) from error


def _names(kind: str, name: str, process: int, thread: int) -> Iterator[dict[str, Any]]:
    """Events that name a process or thread, and sort it by its number."""
    where = {"ph": "M", "pid": process, "tid": thread}
    yield {**where, "name": f"{kind}_name", "args": {"name": name}}
    yield {**where, "name": f"{kind}_sort_index", "args": {"sort_index": process + thread}}


def _slice(span: Span, process: int, thread: int) -> dict[str, Any]:
    """The event of a span."""
    chunk = "" if span.chunk is None else f", chunk {span.chunk}"
    launch = "launch " if span.resource == "host" else ""
    name = f"{span.row}: {span.pass_name}" if span.resource == "pass" else f"{span.stage}{chunk}"
    start_us, end_us = round(span.start_us, 3), round(span.end_us, 3)
    return {
        "ph": "X",
        "name": launch + name,
        "pid": process,
        "tid": thread,
        "ts": start_us,
        "dur": max(round(end_us - start_us - RESOLUTION_US, 3), 0.0),
        "args": span._asdict(),
    }
