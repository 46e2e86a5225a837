"""How busy each resource was, and for how much of that time another one was busy too."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monta_megatron.common.tables import table
from monta_megatron.planner.curves import TIERS
from monta_megatron.tools.timeline.spans import LANE_NAMES, LANES, Lane, Span, Timeline

# Above this the table shows ms.
LONGEST_IN_US = 100_000.0


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How far the resources overlapped in one walk, or in all of them.

    Attributes:
        source: recorded or predicted.
        walk: its name, or "all".
        total_us: from the first start to the last end on any rank, gaps between walks left out.
        busy_us: lane -> time in which it worked, the mean over ranks. A collective counts from its
            start until it has finished, including its waits for peers; the host's waits do not
            count.
        hidden_share: resource -> share of its busy time in which another resource worked too; None
            where it was never busy. The host is left out: its work is launching.
    """

    source: str
    walk: str
    total_us: float
    busy_us: dict[str, float]
    hidden_share: dict[str, float | None]


def overlaps(timeline: Timeline) -> list[Overlap]:
    """Walk by walk, then all of them together."""
    walks = dict.fromkeys(span.walk for track in timeline.tracks for span in track.spans)
    by_walk = [_of_walk(timeline, walk) for walk in walks]
    busy_us: dict[str, float] = {
        lane: sum(each.busy_us[lane] for each in by_walk) for lane in LANES
    }
    hidden_us = {
        lane: sum((each.hidden_share[lane] or 0.0) * each.busy_us[lane] for each in by_walk)
        for lane in TIERS
    }
    total = Overlap(
        source=timeline.source,
        walk="all",
        total_us=sum(each.total_us for each in by_walk),
        busy_us=busy_us,
        hidden_share={lane: _share(hidden_us[lane], busy_us[lane]) for lane in TIERS},
    )
    return [*by_walk, total]


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
        ["walk", ">total", *(f">{LANE_NAMES[lane]}" for lane in LANES)],
        [
            [
                row.walk.replace("_", " "),
                time(row.total_us),
                *(f"{time(row.busy_us[lane])} {hidden(row.hidden_share[lane])}" for lane in TIERS),
                time(row.busy_us["host"]),
            ]
            for row in rows
        ],
        title=f"{rows[0].source}, {unit}, and the share hidden behind another resource",
    )


def _of_walk(timeline: Timeline, walk: str) -> Overlap:
    tracks = [[span for span in track.spans if span.walk == walk] for track in timeline.tracks]
    busy_us: dict[str, float] = dict.fromkeys(LANES, 0.0)
    hidden_us: dict[str, float] = dict.fromkeys(TIERS, 0.0)
    for spans in tracks:
        # Between two neighbouring ends of spans nothing changes.
        ends_us = np.unique([(span.start_us, span.end_us) for span in spans])
        lengths_us = np.diff(ends_us) / len(tracks)
        works = {lane: _works(spans, lane, ends_us) for lane in LANES}
        for lane in LANES:
            busy_us[lane] += float(lengths_us[works[lane]].sum())
        for lane in TIERS:
            beside = np.any([works[other] for other in TIERS if other != lane], axis=0)
            hidden_us[lane] += float(lengths_us[works[lane] & beside].sum())
    every = [span for spans in tracks for span in spans]
    return Overlap(
        source=timeline.source,
        walk=walk,
        total_us=max(span.end_us for span in every) - min(span.start_us for span in every),
        busy_us=busy_us,
        hidden_share={lane: _share(hidden_us[lane], busy_us[lane]) for lane in TIERS},
    )


def _works(spans: Sequence[Span], lane: Lane, ends_us: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether a lane works between one end and the next: [ends] -> [ends - 1]."""
    works = np.zeros(len(ends_us) - 1, dtype=np.bool_)
    for span in spans:
        if span.lane == lane and span.action != "wait":
            works |= (span.start_us <= ends_us[:-1]) & (ends_us[1:] <= span.end_us)
    return works


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
