"""How busy each resource was, and for how much of that time another one was busy too."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monta_megatron.common.tables import table
from monta_megatron.planner.curves import RESOURCES
from monta_megatron.tools.timeline.spans import (
    SPAN_RESOURCE_NAMES,
    SPAN_RESOURCES,
    Span,
    SpanResource,
    Timeline,
)

# Above this the table shows ms.
LONGEST_IN_US = 100_000.0


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How far the resources overlapped in one pass, or in all of them.

    Attributes:
        source: recorded or predicted.
        pass_name: its name, or "all".
        total_us: from the first start to the last end on any rank, gaps between passes left out.
        busy_us: lane -> time in which it worked, the mean over ranks. A collective counts from its
            start until it has finished, including its waits for peers; the host's waits do not
            count.
        hidden_share: resource -> share of its busy time in which another resource worked too; None
            where it was never busy. The host is left out: its work is launching.
    """

    source: str
    pass_name: str
    total_us: float
    busy_us: dict[str, float]
    hidden_share: dict[str, float | None]


def overlaps(timeline: Timeline) -> list[Overlap]:
    """Pass by pass, then all of them together."""
    passes = dict.fromkeys(span.pass_name for track in timeline.tracks for span in track.spans)
    by_pass = [_of_pass(timeline, pass_name) for pass_name in passes]
    busy_us: dict[str, float] = {
        resource: sum(each.busy_us[resource] for each in by_pass) for resource in SPAN_RESOURCES
    }
    hidden_us = {
        resource: sum(
            (each.hidden_share[resource] or 0.0) * each.busy_us[resource] for each in by_pass
        )
        for resource in RESOURCES
    }
    total = Overlap(
        source=timeline.source,
        pass_name="all",
        total_us=sum(each.total_us for each in by_pass),
        busy_us=busy_us,
        hidden_share={
            resource: _share(hidden_us[resource], busy_us[resource]) for resource in RESOURCES
        },
    )
    return [*by_pass, total]


def overlap_table(rows: Sequence[Overlap]) -> str:
    """Busy times and the share that was hidden; in ms where us would be too wide."""
    unit, us_per_unit, decimals = "us", 1.0, 0
    if max(row.total_us for row in rows) > LONGEST_IN_US:
        unit, us_per_unit, decimals = "ms", 1e3, 1

    def time(time_us: float) -> str:
        return f"{time_us / us_per_unit:,.{decimals}f}"

    def hidden(share: float | None) -> str:
        return f"{'-' if share is None else f'{share:.0%}':>4}"

    return table(
        [
            "pass_name",
            ">total",
            *(f">{SPAN_RESOURCE_NAMES[resource]}" for resource in SPAN_RESOURCES),
        ],
        [
            [
                row.pass_name.replace("_", " "),
                time(row.total_us),
                *(
                    f"{time(row.busy_us[resource])} {hidden(row.hidden_share[resource])}"
                    for resource in RESOURCES
                ),
                time(row.busy_us["host"]),
            ]
            for row in rows
        ],
        title=f"{rows[0].source}, {unit}, and the share hidden behind another resource",
    )


def _of_pass(timeline: Timeline, pass_name: str) -> Overlap:
    tracks = [
        [span for span in track.spans if span.pass_name == pass_name] for track in timeline.tracks
    ]
    busy_us: dict[str, float] = dict.fromkeys(SPAN_RESOURCES, 0.0)
    hidden_us: dict[str, float] = dict.fromkeys(RESOURCES, 0.0)
    for spans in tracks:
        # Between two neighbouring ends of spans nothing changes.
        ends_us = np.unique([(span.start_us, span.end_us) for span in spans])
        lengths_us = np.diff(ends_us) / len(tracks)
        works = {resource: _works(spans, resource, ends_us) for resource in SPAN_RESOURCES}
        for resource in SPAN_RESOURCES:
            busy_us[resource] += float(lengths_us[works[resource]].sum())
        for resource in RESOURCES:
            beside = np.any([works[other] for other in RESOURCES if other != resource], axis=0)
            hidden_us[resource] += float(lengths_us[works[resource] & beside].sum())
    every = [span for spans in tracks for span in spans]
    return Overlap(
        source=timeline.source,
        pass_name=pass_name,
        total_us=max(span.end_us for span in every) - min(span.start_us for span in every),
        busy_us=busy_us,
        hidden_share={
            resource: _share(hidden_us[resource], busy_us[resource]) for resource in RESOURCES
        },
    )


def _works(
    spans: Sequence[Span], resource: SpanResource, ends_us: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Whether a lane works between one end and the next: [ends] -> [ends - 1]."""
    works = np.zeros(len(ends_us) - 1, dtype=np.bool_)
    for span in spans:
        if span.resource == resource and span.action != "wait":
            works |= (span.start_us <= ends_us[:-1]) & (ends_us[1:] <= span.end_us)
    return works


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
