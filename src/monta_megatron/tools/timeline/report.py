"""Timelines to compare, recorded or predicted, and the share of each resource that was hidden."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS, Chain, chunks_of
from monta_megatron.chains.alltoall import ALLTOALL
from monta_megatron.common.rules import require
from monta_megatron.common.text import WIDTH, counted, one_of, table
from monta_megatron.core import Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import RESOURCE_NAMES
from monta_megatron.planner.price import price
from monta_megatron.tools.plan.request import PlanRequest, plan_request
from monta_megatron.tools.trace import STOCK, Span, Timeline, Trace, Track, pipeline_name

# Above this many us tables and pictures show ms.
LONGEST_IN_US = 20_000.0


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Overlap of the resources in a row: all of its passes, mean over its ranks.

    Attributes:
        name: of the row.
        total_us: from the first start to the last end on any rank.
        busy_us: resource -> time in which it worked. A collective counts from its start until it
            has finished, including its waits for peers.
        hidden_share: resource -> share of its busy time in which another resource worked too; None
            where it was never busy.
    """

    name: str
    total_us: float
    busy_us: dict[str, float]
    hidden_share: dict[str, float | None]


def overlap_of(timeline: Timeline) -> Overlap:
    """How much of each resource was hidden by the others."""
    # [resources, 2] busy and hidden us, mean over ranks.
    times_us = np.mean([_busy_and_hidden_us(track.spans) for track in timeline.tracks], axis=0)
    by_resource = dict(zip(RESOURCE_NAMES, times_us.tolist(), strict=True))
    return Overlap(
        name=timeline.name,
        total_us=timeline.total_us,
        busy_us={resource: busy_us for resource, (busy_us, _) in by_resource.items()},
        hidden_share={
            resource: hidden_us / busy_us if busy_us > 0 else None
            for resource, (busy_us, hidden_us) in by_resource.items()
        },
    )


def _busy_and_hidden_us(spans: Sequence[Span]) -> NDArray[np.float64]:
    """[resources, 2] time in which a resource worked, and in which another worked too."""
    # Between two neighbouring ends of spans nothing changes.
    ends_us = np.unique([(span.start_us, span.end_us) for span in spans])
    works = np.zeros((len(RESOURCE_NAMES), len(ends_us) - 1), dtype=np.bool_)
    for at, resource in enumerate(RESOURCE_NAMES):
        for span in spans:
            if span.resource == resource:
                works[at] |= (span.start_us <= ends_us[:-1]) & (ends_us[1:] <= span.end_us)
    hidden = works & (works.sum(axis=0) > 1)
    return np.stack([works @ np.diff(ends_us), hidden @ np.diff(ends_us)], axis=1)


@dataclass(frozen=True, kw_only=True)
class TimelineReport:
    """What is drawn and printed.

    Attributes:
        title: what ran or was predicted, and on what, in one line.
        stock: of the stock dispatcher alltoall; None where it was not recorded, or is `ours`.
        ours: of the chain that is compared with it.
        rows: all rows of the trace, or these two.
        picture: the PNG that was written; None without matplotlib.
    """

    title: str
    stock: Timeline | None
    ours: Timeline
    rows: Sequence[Timeline]
    picture: Path | None = None

    @property
    def ratio(self) -> float | None:
        """Speedup of ours over stock."""
        return None if self.stock is None else self.stock.total_us / self.ours.total_us

    @property
    def headline(self) -> str:
        """The result in a line."""
        if self.stock is None:
            in_unit, unit = shown_us(self.ours.total_us)
            return f"{self.ours.name}: {in_unit(self.ours.total_us)} {unit}"
        in_unit, unit = shown_us(self.stock.total_us)
        return (
            f"{self.ours.name} is {self.ratio:.2f}x as fast as {STOCK}: "
            f"{in_unit(self.ours.total_us)} instead of {in_unit(self.stock.total_us)} {unit}"
        )

    def document(self) -> dict[str, Any]:
        """Overlaps and files, for JSON."""
        return {
            "title": self.title,
            "ratio_to_alltoall": self.ratio,
            "drawn": [each.name for each in (self.stock, self.ours) if each is not None],
            "rows": [asdict(overlap_of(row)) for row in self.rows],
            "picture": None if self.picture is None else str(self.picture),
        }

    def text(self) -> str:
        """The same in words and a table."""
        overlaps = [overlap_of(row) for row in self.rows]
        in_unit, unit = shown_us(max(overlap.total_us for overlap in overlaps))

        def cells(overlap: Overlap) -> list[str | None]:
            shown: list[str | None] = [overlap.name, in_unit(overlap.total_us)]
            for resource, share in overlap.hidden_share.items():
                shown.append(in_unit(overlap.busy_us[resource]))
                shown.append(None if share is None else f"{share:.0%}")
            return shown

        columns = [column for name in RESOURCE_NAMES.values() for column in (f">{name}", ">hidden")]
        rows = table(
            ("", ">total", *columns),
            map(cells, overlaps),
            title=f"{unit} that each resource was busy, and how much of that others hid",
        )
        lines = [
            line for text in (self.headline, self.title) for line in textwrap.wrap(text, WIDTH)
        ]
        drawn = [] if self.picture is None else ["", f"drew {self.picture}"]
        return "\n".join([*lines, "", rows, *drawn])


def shown_us(longest_us: float) -> tuple[Any, str]:
    """How times up to this one are shown: a function from us to a text, and the unit."""
    if longest_us <= LONGEST_IN_US:
        return lambda time_us: f"{time_us:,.0f}", "us"
    digits = 1 if longest_us < 10 * LONGEST_IN_US else 0
    return lambda time_us: f"{time_us / 1e3:,.{digits}f}", "ms"


def of_trace(path: Path, given: tuple[Chain, int] | None = None) -> TimelineReport:
    """A trace of `monta bench --trace`.

    Args:
        path: its file.
        given: which chain to draw, in how many chunks; None for the fastest of ours.

    Raises:
        ValueError: the file is missing or wrong, or has no such row.
    """
    trace = Trace.load(path)
    stock = next((row for row in trace.timelines if row.name == STOCK), None)
    ours = {row.name: row for row in trace.timelines if not row.name.startswith("stock ")}
    if given is not None:
        name = pipeline_name(given[0].name, given[1])
        require(name in ours, f"{path}: rows", name, f"be {one_of(name, ours)}")
        ours = {name: ours[name]}
    if not ours:
        raise ValueError(f"{path}: has no row of a chain, must be recorded with --chains")
    fastest = min(ours.values(), key=lambda row: row.total_us)
    return TimelineReport(title=trace.title, stock=stock, ours=fastest, rows=trace.timelines)


def of_prediction(request: PlanRequest, given: tuple[Chain, int] | None = None) -> TimelineReport:
    """The cost model's timeline of a layout.

    Args:
        request: what is planned.
        given: a chain and its number of chunks; None for the planner's choice.

    Raises:
        ValueError: no chain can run.
    """
    settings: dict[str, Any] = {}
    if given is not None:
        settings |= {"chains": (given[0].name,), "num_chunks": (given[1],)}
    planned = plan_request(request, **settings)
    plan, layout, shape = planned.plan, planned.layout, planned.plan.shape
    ours = predict(shape, planned.cluster, CHAINS[plan.chain], plan.num_chunks)
    stock = predict(shape, planned.cluster, ALLTOALL, 1)._replace(name=STOCK)
    return TimelineReport(
        title=(
            f"predicted for {planned.model.name} on {planned.cluster.name}: TP {layout.tp}, "
            f"EP {layout.ep}, ETP {layout.etp}, PP {layout.pp} on "
            f"{counted(layout.world_size, 'rank')}, {counted(shape.tokens_per_rank, 'token')} "
            "per rank"
        ),
        stock=None if plan.chain == ALLTOALL.name else stock,
        ours=ours,
        rows=(stock, ours),
    )


def predict(shape: Shape, cluster: Cluster, chain: Chain, num_chunks: int) -> Timeline:
    """The schedule from which a chain is priced.

    It prices the busiest rank of every stage, so one track stands for all ranks.
    """
    priced = price(shape, cluster, chain, num_chunks)
    spans: list[Span] = []
    for task, times in zip(priced.tasks, priced.times, strict=True):
        work = priced.works[task.work]
        run = Span(
            pass_name=work.pass_name,
            stage=work.stage,
            chunk=task.chunk,
            operation=task.operation,
            resource=work.resource,
            start_us=times.start_us,
            end_us=times.end_us,
        )
        if work.resource != "host":
            spans.append(run)
        if task.launch_us > 0:
            begin_us = times.launched_us - task.launch_us
            spans.append(run._replace(resource="host", start_us=begin_us, end_us=times.launched_us))
    passes: dict[str, tuple[float, float]] = {}
    for span in spans:
        start_us, end_us = passes.get(span.pass_name, (span.start_us, span.end_us))
        passes[span.pass_name] = min(start_us, span.start_us), max(end_us, span.end_us)
    track = Track(name="busiest rank", passes=passes, spans=tuple(spans))
    return Timeline(name=pipeline_name(chain.name, num_chunks), tracks=(track,))


def named_chain(name: str | None, num_chunks: int | None) -> tuple[Chain, int] | None:
    """The chain of --chain and its number of chunks; None where none is named.

    Raises:
        ValueError: it cannot run in so many chunks, or only a number is given.
    """
    if name is None:
        require(num_chunks is None, "--num-chunks", num_chunks, "be left out without --chain")
        return None
    return CHAINS[name], chunks_of(CHAINS[name], num_chunks, "--num-chunks")
