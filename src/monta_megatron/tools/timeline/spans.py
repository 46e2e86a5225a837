"""Tracks of spans by rank and resource, and how long resources were busy at once.

A track is one rank, or the one rank that the cost model prices for all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from monta_megatron.common.rules import Text
from monta_megatron.common.tables import table
from monta_megatron.exchange.recording import Span
from monta_megatron.planner.curves import RESOURCE_NAMES

# With their names in tables and pictures, in their order there.
RESOURCES_AND_HOST: Mapping[str, str] = {**RESOURCE_NAMES, "host": "host"}
# The resolution of the clocks; smaller differences are rounding.
RESOLUTION_US = 1e-3


def pipeline_name(chain: str, num_chunks: int) -> str:
    """The text for a chain with a number of chunks."""
    return f"{chain} in 1 chunk" if num_chunks == 1 else f"{chain} in {num_chunks} chunks"


@dataclass(frozen=True, kw_only=True)
class Track:
    """The spans of one rank.

    Attributes:
        name: the name to show.
        spans: its spans, in no particular order.
    """

    name: Text
    spans: tuple[Span, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans of all ranks.

    Attributes:
        source: where it comes from.
        name: that ran.
        tracks: one per rank, or one for all ranks if predicted.
    """

    source: Literal["recorded", "predicted"]
    name: Text
    tracks: tuple[Track, ...]


def rows_of(spans: Sequence[Span]) -> list[list[Span]]:
    """One resource's spans in as few rows as possible without overlap, the first filled first."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_us, span.end_us)):
        for row in rows:
            if row[-1].end_us <= span.start_us + RESOLUTION_US:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


# Above this the table shows ms.
LONGEST_IN_US = 100_000.0


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Overlap of the resources in one pass, or in all of them.

    Attributes:
        name: that ran.
        source: recorded or predicted.
        pass_name: its name, or "all".
        total_us: from the first start to the last end on any rank, gaps between passes left out.
        busy_us: resource or host -> time in which it worked, the mean over ranks. A collective
            counts from its start until it has finished, including its waits for peers; the host's
            waits do not count.
        hidden_share: resource -> share of its busy time in which another resource worked too; None
            where it was never busy. The host is left out: its work is launching.
    """

    name: str
    source: str
    pass_name: str
    total_us: float
    busy_us: dict[str, float]
    hidden_share: dict[str, float | None]


def overlaps(timeline: Timeline) -> list[Overlap]:
    """Pass by pass, then all of them together."""
    spans = [span for track in timeline.tracks for span in track.spans]
    names = dict.fromkeys(span.pass_name for span in spans)
    shown = {name: at for at, name in enumerate(RESOURCES_AND_HOST)}
    times = {name: _times_of(timeline, name) for name in names}
    total_us, busy_us, hidden_us = zip(*times.values(), strict=True)
    times["all"] = sum(total_us), np.sum(busy_us, axis=0), np.sum(hidden_us, axis=0)
    return [
        Overlap(
            name=timeline.name,
            source=timeline.source,
            pass_name=name,
            total_us=total_us,
            busy_us={resource: float(busy_us[at]) for resource, at in shown.items()},
            hidden_share={
                resource: float(hidden_us[at] / busy_us[at]) if busy_us[at] > 0 else None
                for resource, at in shown.items()
                if resource != "host"
            },
        )
        for name, (total_us, busy_us, hidden_us) in times.items()
    ]


def overlap_table(rows: Sequence[Overlap]) -> str:
    """Busy times and the share that was hidden; in ms where us would be too wide."""
    return table(overlap_columns(rows), overlap_rows(rows), title=overlap_title(rows))


def overlap_title(rows: Sequence[Overlap]) -> str:
    """Title of `overlap_rows`."""
    unit = "ms" if _in_ms(rows) else "us"
    return f"{rows[0].name}: {rows[0].source} {unit}, and % hidden behind others"


def overlap_columns(rows: Sequence[Overlap]) -> tuple[str, ...]:
    """The heading of each column."""
    return ("pass", ">total", *(f">{RESOURCES_AND_HOST[name]}" for name in [*_shown(rows), "host"]))


def _shown(rows: Sequence[Overlap]) -> list[str]:
    """The resources of a timeline."""
    return [name for name in rows[0].busy_us if name != "host"]


def overlap_rows(rows: Sequence[Overlap]) -> list[list[str]]:
    """The passes under `overlap_columns`."""
    in_ms = _in_ms(rows)

    def time(time_us: float) -> str:
        return f"{time_us / 1e3:,.1f}" if in_ms else f"{time_us:,.0f}"

    def hidden(share: float | None) -> str:
        return f"{'-' if share is None else f'{share:.0%}':>4}"

    return [
        [
            row.pass_name.replace("_", " "),
            time(row.total_us),
            *(
                f"{time(row.busy_us[resource])} {hidden(row.hidden_share[resource])}"
                for resource in _shown(rows)
            ),
            time(row.busy_us["host"]),
        ]
        for row in rows
    ]


def _in_ms(rows: Sequence[Overlap]) -> bool:
    return max(row.total_us for row in rows) > LONGEST_IN_US


def _times_of(
    timeline: Timeline, pass_name: str
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """A pass's total time, [resources and host] busy times, and [resources] hidden times, in us."""
    tracks = [
        [span for span in track.spans if span.pass_name == pass_name] for track in timeline.tracks
    ]
    busy_us: NDArray[np.float64] = np.zeros(len(RESOURCES_AND_HOST))
    hidden_us: NDArray[np.float64] = np.zeros(len(RESOURCE_NAMES))
    for spans in tracks:
        # Between two neighbouring ends of spans nothing changes.
        ends_us = np.unique([(span.start_us, span.end_us) for span in spans])
        lengths_us = np.diff(ends_us) / len(tracks)
        # [resources and host, ends - 1]; the host comes last.
        works = np.array([_works(spans, resource, ends_us) for resource in RESOURCES_AND_HOST])
        busy_us += works @ lengths_us
        hidden_us += (works[:-1] & (works[:-1].sum(axis=0) > 1)) @ lengths_us
    every = [span for spans in tracks for span in spans]
    total_us = max(span.end_us for span in every) - min(span.start_us for span in every)
    return total_us, busy_us, hidden_us


def _works(spans: Sequence[Span], resource: str, ends_us: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether a resource, or the host, works between one end and the next: [ends] -> [ends - 1]."""
    works = np.zeros(len(ends_us) - 1, dtype=np.bool_)
    for span in spans:
        if span.resource == resource and span.action != "wait":
            works |= (span.start_us <= ends_us[:-1]) & (ends_us[1:] <= span.end_us)
    return works
