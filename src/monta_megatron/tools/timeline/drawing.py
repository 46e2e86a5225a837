"""Draw a timeline from a recording or from the cost model: a picture and a Chrome trace.

The trace has a process per rank and a thread per resource and opens in Perfetto. Its format is
"Trace Event Format": events of phase "X" with start and duration in us. Slices of one thread have
to be nested, so spans that overlap on one resource go to additional threads.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from monta_megatron.chains import CHAINS, Chain, check_chain, chunks_of
from monta_megatron.chains.alltoall import ALLTOALL
from monta_megatron.common.files import write_whole
from monta_megatron.common.rules import require
from monta_megatron.common.strict_yaml import plain
from monta_megatron.common.tables import WIDTH
from monta_megatron.common.units import counted
from monta_megatron.exchange.recording import Span
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools import pictures
from monta_megatron.tools.plan.request import PlanRequest, plan_request
from monta_megatron.tools.timeline import picture
from monta_megatron.tools.timeline.picture import Comparison
from monta_megatron.tools.timeline.predicted import predict
from monta_megatron.tools.timeline.recording import (
    Recording,
)
from monta_megatron.tools.timeline.spans import (
    RESOURCES_AND_HOST,
    Timeline,
    overlap_table,
    overlaps,
    rows_of,
)

# More than the number of rows that a resource will ever have.
THREADS_PER_RESOURCE = 100
# Perfetto takes both thread 0 and a thread with its process's number for the main thread.
FIRST_THREAD = 1
PROCESS_STEP = 1000
# Perfetto truncates starts and durations to whole nanoseconds separately, and drops a slice that
# then begins before its predecessor has ended.
GAP_US = 1e-3
PHASES = {
    "forward": "dispatch + combine, forward",
    "forward_backward": "dispatch + combine, forward + backward",
}


def chrome_trace(timelines: Sequence[Timeline], about: Mapping[str, Any]) -> dict[str, Any]:
    """A document for chrome://tracing and https://ui.perfetto.dev.

    Args:
        timelines: to show; tracks become processes 1000, 2000 and so on, in this order.
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


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Timelines and texts to draw.

    Attributes:
        name: name of the files, without endings.
        folder: where they go unless the user says where.
        title: title of the picture.
        timelines: the timelines, drawn one above the other, or pass by pass.
        comparison: of two of them, stock alltoall and a chain; None where a chain is drawn alone.
        recorded: files of recordings: what each is -> its path.
        notes: what the text says besides.
        about: metadata for the trace and for --json.
    """

    name: str
    folder: Path
    title: str
    timelines: list[Timeline]
    comparison: Comparison | None = None
    recorded: Mapping[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    about: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DrawingReport:
    """Report of what was drawn.

    Attributes:
        drawing: what was drawn.
        files: kind of a file -> its path, of every file that there is now.
    """

    drawing: Drawing
    files: Mapping[str, str]

    def document(self) -> dict[str, Any]:
        """Overlaps and files, for JSON."""
        drawing = self.drawing
        rows = [row for timeline in drawing.timelines for row in overlaps(timeline)]
        return {
            "title": drawing.title,
            "ratio_to_alltoall": drawing.comparison.ratio if drawing.comparison else None,
            "overlaps": [plain(row) for row in rows],
            "files": dict(self.files),
            "about": drawing.about,
        }

    def text(self) -> str:
        """The same in words and tables."""
        drawing = self.drawing
        headline = [drawing.comparison.headline] if drawing.comparison else []
        texts = [drawing.title, *headline, *drawing.notes]
        lines = [line for text in texts for line in textwrap.wrap(text, WIDTH)]
        for timeline in drawing.timelines:
            lines += ["", overlap_table(overlaps(timeline))]
        files = (f"{kind:<10}{path}" for kind, path in self.files.items())
        return "\n".join([*lines, "", *files])


def of_recordings(
    recordings: Sequence[Recording], folder: Path, cluster: Cluster | None
) -> Drawing:
    """Recordings of one run, which are kept in a folder: the last, below stock's if it is there."""
    paths = {}
    for recording in recordings:
        paths[recording.chain] = folder / f"{recording.chain}_x{recording.num_chunks}.json"
        recording.save(paths[recording.chain])
    stock = paths.get("alltoall") if len(paths) > 1 else None
    return of_recording(paths[recordings[-1].chain], cluster if stock is None else None, stock)


def of_recording(path: Path, cluster: Cluster | None = None, stock: Path | None = None) -> Drawing:
    """A recording: below that of stock's chain, or below the cost model's view, or alone.

    Args:
        path: its file.
        cluster: by whose costs to predict; None for no prediction.
        stock: the file of the same exchange recorded with the chain `alltoall`, or None.

    Raises:
        ValueError: a file is missing or wrong, or both `cluster` and `stock` are given.
    """
    if cluster is not None and stock is not None:
        raise ValueError(f"--cluster: got {cluster.name}, must be left out beside --stock")
    recording = Recording.load(path)
    ours = recording.timeline
    compared, timelines, recorded = None, [ours], {"recording": path}
    if stock is not None:
        of_stock = Recording.load(stock)
        _check_stock(stock, of_stock.chain)
        where, _, what = recording.title.removeprefix(f"{ours.name}, ").partition(": ")
        compared = Comparison(stock=of_stock.timeline, ours=ours, about=(where, what))
        timelines.insert(0, of_stock.timeline)
        recorded["of stock"] = stock
    elif cluster is not None:
        timelines.insert(0, recording.predicted(cluster))
    return Drawing(
        name=path.stem,
        folder=path.parent,
        title=recording.title,
        timelines=timelines,
        comparison=compared,
        recorded=recorded,
        about={
            "clock": recording.clock,
            "clock_error_us": recording.clock_error_us,
            "cluster": None if cluster is None else cluster.name,
            "recorded": recording.meta,
        },
    )


def _check_stock(path: Path, chain: str) -> None:
    rule = f"be {ALLTOALL.name}, which does what stock does"
    require(chain == ALLTOALL.name, f"--stock: {path}: chain", chain, rule)


def of_prediction(
    request: PlanRequest,
    given: tuple[Chain, int] | None = None,
    is_alone: bool = False,
) -> Drawing:
    """Drawing of a layout's prediction, below that of stock alltoall there.

    Args:
        request: what is planned.
        given: a chain and its number of chunks; None for the planner's choice.
        is_alone: leave stock alltoall out.

    Raises:
        ValueError: no chain can run.
    """
    settings: dict[str, Any] = {}
    if given is not None:
        settings |= {"chains": (given[0].name,), "num_chunks": (given[1],)}
    planned = plan_request(request, **settings)
    plan, shape, memory, model = planned.plan, planned.shape, planned.memory, planned.model
    cluster, layout = planned.cluster, planned.layout
    chain = CHAINS[plan.chain]
    ours = predict(shape, cluster, chain, plan.num_chunks, request.phase)
    where = f"{model.name} on {cluster.name}"
    sizes = (
        f"TP {layout.tp}, EP {layout.ep}, ETP {layout.etp}, PP {layout.pp} on "
        f"{counted(layout.world_size, 'rank')}, {counted(shape.tokens_per_rank, 'token')} each"
    )
    comparison = None
    if chain is not ALLTOALL and not is_alone:
        stock = predict(shape, cluster, ALLTOALL, 1, request.phase)
        about = (f"predicted: {where}", f"{sizes}; {PHASES[request.phase]}")
        comparison = Comparison(stock=stock, ours=ours, about=about)
    return Drawing(
        name=f"{chain.name}_x{plan.num_chunks}",
        folder=Path(),
        title=f"{ours.name}, predicted: {where}, {sizes}",
        timelines=[ours] if comparison is None else [comparison.stock, ours],
        comparison=comparison,
        notes=[f"needs {memory.text}", *(f"note: {note}" for note in model.notes)],
        about={
            "cluster": cluster.name,
            "model": model.name,
            "notes": list(plan.notes),
            "memory": memory.document(),
        },
    )


def named_chain(
    name: str | None, num_chunks: int | None, fields: tuple[str, str]
) -> tuple[Chain, int] | None:
    """A chain and its number of chunks, for `of_prediction`; None where none is named.

    Args:
        name: the chain's name.
        num_chunks: the number that was given with it, if any.
        fields: where the two were given, for messages.

    Raises:
        ValueError: there is no such chain, it cannot run in so many chunks, or none is named.
    """
    if num_chunks is not None:
        is_number = type(num_chunks) is int and num_chunks >= 1
        require(is_number, fields[1], repr(num_chunks), "be an integer >= 1")
    if name is None:
        require(num_chunks is None, fields[1], num_chunks, f"be left out without {fields[0]}")
        return None
    check_chain(name, fields[0])
    return CHAINS[name], chunks_of(CHAINS[name], num_chunks, fields[1])


def write(drawing: Drawing, folder: Path, max_ranks: int) -> DrawingReport:
    """Write the trace and, where matplotlib is installed, the picture.

    Args:
        drawing: to draw.
        folder: where to.
        max_ranks: ranks in a picture of one chain; the trace has all.
    """
    trace, png = folder / f"{drawing.name}.trace.json", folder / f"{drawing.name}.png"
    write_whole(trace, json.dumps(chrome_trace(drawing.timelines, drawing.about)) + "\n")
    files = {"trace": str(trace)}
    files |= {what: str(path) for what, path in drawing.recorded.items()}
    if pictures.can_draw():
        if drawing.comparison is not None:
            picture.draw_comparison(drawing.comparison, png)
        else:
            picture.draw(drawing.timelines, drawing.title, png, max_ranks)
        files["picture"] = str(png)
    return DrawingReport(drawing=drawing, files=files)
