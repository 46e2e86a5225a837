"""How busy each resource was, and for how much of that time another one was busy too."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from monta_megatron.planner.curves import TIERS
from monta_megatron.tables import table
from monta_megatron.timeline.spans import LANE_NAMES, LANES, Lane, Span, Timeline

# Above this the table shows ms.
LONGEST_IN_US = 100_000.0

Interval = tuple[float, float]


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
        work = {lane: _busy(spans, lane) for lane in LANES}
        for lane in LANES:
            busy_us[lane] += _length(work[lane]) / len(tracks)
        for lane in TIERS:
            others = _union(
                interval for other in TIERS if other != lane for interval in work[other]
            )
            both = _length(work[lane]) + _length(others) - _length(_union([*work[lane], *others]))
            hidden_us[lane] += both / len(tracks)
    every = [span for spans in tracks for span in spans]
    return Overlap(
        source=timeline.source,
        walk=walk,
        total_us=max(span.end_us for span in every) - min(span.start_us for span in every),
        busy_us=busy_us,
        hidden_share={lane: _share(hidden_us[lane], busy_us[lane]) for lane in TIERS},
    )


def _busy(spans: Sequence[Span], lane: Lane) -> list[Interval]:
    return _union(
        (span.start_us, span.end_us)
        for span in spans
        if span.lane == lane and span.action != "wait"
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
