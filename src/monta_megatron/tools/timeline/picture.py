"""Timelines as a picture: a panel per pass, every rank's resources, coloured by chunk.

Dispatch and combine are side by side, their backward passes below.

Needs matplotlib (the `plot` extra).
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from monta_megatron.common.quantities import counted
from monta_megatron.tools import pictures
from monta_megatron.tools.timeline.spans import (
    RESOURCES_AND_HOST,
    Span,
    Timeline,
    Track,
    rows_of,
)

WIDTH_INCHES, ROW_INCHES, DPI = 13.0, 0.19, 110
COLUMNS = 2
# The average width of a letter in a bar.
LETTER_INCHES, LETTER_POINTS = 0.056, 6.5
WHOLE_COLOUR, WAIT_COLOUR = "#b8b8b8", "#8c8c8c"
# Of red, green and blue.
LIGHTNESS = (0.299, 0.587, 0.114)
# Above this many us the axis shows ms.
LONGEST_IN_US = 20_000.0


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A line of the picture.

    Attributes:
        label: the name of a resource, at its left, or of a track, above its resources.
        spans: its spans by pass; None in the line that names a track.
    """

    label: str
    spans: Mapping[str, Sequence[Span]] | None


def draw(timelines: Sequence[Timeline], title: str, path: Path, max_ranks: int) -> None:
    """Write the PNG.

    Args:
        timelines: drawn one above the other, on the same scale. In every panel 0 is where the
            first chunk of the pass starts; what has to come before it lies to the left.
        title: what is shown; the number of ranks left out is added to it.
        path: path of the PNG.
        max_ranks: how many ranks of each timeline to draw.

    Raises:
        ValueError: the file cannot be written.
    """
    rows = [
        row
        for timeline in map(_aligned, timelines)
        for track in timeline.tracks[:max_ranks]
        for row in _rows(track)
    ]
    spans = [span for row in rows if row.spans for part in row.spans.values() for span in part]
    low, high = min(span.start_us for span in spans), max(span.end_us for span in spans)
    us_per_inch = 1.01 * (high - low) / (WIDTH_INCHES / COLUMNS - 0.6)
    passes = list(dict.fromkeys(span.pass_name for span in spans))
    num_panels = math.ceil(len(passes) / COLUMNS)
    height_inches = 0.8 + num_panels * (0.7 + ROW_INCHES * len(rows))
    left_out = sum(len(timeline.tracks[max_ranks:]) for timeline in timelines)
    if left_out:
        title += f"; {counted(left_out, 'more rank')} not drawn"

    with pictures.figure(path, (WIDTH_INCHES, height_inches), DPI) as figure:
        panels = figure.subplots(num_panels, COLUMNS, sharex=True, sharey=True, squeeze=False)
        colours = _colours(spans)
        for axis, pass_name in zip(panels.flat, passes, strict=False):
            for position, row in enumerate(rows):
                for span in row.spans.get(pass_name, ()) if row.spans else ():
                    _draw_span(axis, position, span, colours, us_per_inch)
                if row.spans is None:
                    _name_track(axis, position, row.label)
            axis.set_title(pass_name.replace("_", " "), fontsize=9)
            axis.tick_params(labelsize=7, left=False)
            axis.grid(axis="x")
            axis.set_axisbelow(True)
        _scale(panels, rows, (low, low + 1.01 * (high - low)))
        figure.legend(handles=_legend(colours, spans), loc="outside lower center", ncols=11)
        figure.suptitle("\n".join(textwrap.wrap(title, 150)))


def _aligned(timeline: Timeline) -> Timeline:
    """The timeline with each pass's times relative to the start of its first chunk on any rank."""
    starts: dict[str, float] = {}
    for track in timeline.tracks:
        for span in track.spans:
            if span.chunk is not None:
                starts[span.pass_name] = min(
                    span.start_us, starts.get(span.pass_name, span.start_us)
                )
    tracks = (
        replace(track, spans=tuple(span.shifted(-starts[span.pass_name]) for span in track.spans))
        for track in timeline.tracks
    )
    return replace(timeline, tracks=tuple(tracks))


def _rows(track: Track) -> list[_Row]:
    """The track's name, then its resources in order, with more rows where spans overlap."""
    rows = [_Row(label=track.name, spans=None)]
    passes = dict.fromkeys(span.pass_name for span in track.spans)
    for resource, name in RESOURCES_AND_HOST.items():
        by_pass = [
            rows_of(
                [
                    span
                    for span in track.spans
                    if (span.resource, span.pass_name) == (resource, pass_name)
                ]
            )
            for pass_name in passes
        ]
        for number, parts in enumerate(zip_longest(*by_pass, fillvalue=())):
            label = name if number == 0 else ""
            rows.append(_Row(label=label, spans=dict(zip(passes, parts, strict=True))))
    return rows


def _colours(spans: Sequence[Span]) -> dict[int | None, Any]:
    import matplotlib

    chunks = sorted({span.chunk for span in spans if span.chunk is not None})
    # Without the palest colours, on which text cannot be read.
    scale = matplotlib.colormaps["viridis"]
    colours: dict[int | None, Any] = {
        chunk: scale(0.9 * number / max(len(chunks) - 1, 1)) for number, chunk in enumerate(chunks)
    }
    if any(span.chunk is None for span in spans):
        colours[None] = WHOLE_COLOUR
    return colours


def _draw_span(
    axis: Any, position: int, span: Span, colours: Mapping[int | None, Any], us_per_inch: float
) -> None:
    """Draw a bar, with the stage's name where there is room for it; waiting is hatched."""
    from matplotlib.patches import Rectangle

    length_us = span.end_us - span.start_us
    bar = Rectangle((span.start_us, position - 0.425), length_us, 0.85, linewidth=0.4)
    if span.action == "wait":
        bar.set(facecolor="none", edgecolor=WAIT_COLOUR, hatch="////")
    else:
        bar.set(facecolor=colours[span.chunk], edgecolor="white")
    axis.add_artist(bar)
    letters = int(length_us / us_per_inch / LETTER_INCHES)
    # For "alltoall between nodes", the row and the legend show what the first word leaves out.
    names = [name for name in (span.stage, span.stage.split()[0]) if len(name) <= letters]
    if span.action != "wait" and names:
        is_dark = span.chunk is not None and np.dot(colours[span.chunk][:3], LIGHTNESS) < 0.5
        axis.text(
            span.start_us + length_us / 2,
            position,
            names[0],
            ha="center",
            va="center_baseline",
            fontsize=LETTER_POINTS,
            color="white" if is_dark else "black",
        )


def _name_track(axis: Any, position: int, name: str) -> None:
    axis.text(
        0.002,
        position + 0.15,
        name,
        transform=axis.get_yaxis_transform(),
        va="center_baseline",
        fontsize=8,
        weight="bold",
    )


def _scale(panels: Any, rows: Sequence[_Row], limits: tuple[float, float]) -> None:
    """One scale for all panels, which share their axes."""
    labelled = [at for at, row in enumerate(rows) if row.spans is not None and row.label]
    axis = panels.flat[0]
    axis.set_xlim(*limits)
    axis.set_ylim(len(rows) - 0.3, -0.8)
    axis.set_yticks(labelled, [rows[at].label for at in labelled])
    in_ms = limits[1] > LONGEST_IN_US
    for axis in panels[-1]:
        axis.set_xlabel(f"{'ms' if in_ms else 'us'} since the first chunk started", fontsize=8)
        if in_ms:
            axis.xaxis.set_major_formatter(lambda us, position: f"{us / 1e3:g}")


def _legend(colours: Mapping[int | None, Any], spans: Sequence[Span]) -> list[Any]:
    from matplotlib.patches import Patch

    names = {
        chunk: "all chunks at once" if chunk is None else f"chunk {chunk}" for chunk in colours
    }
    patches = [Patch(facecolor=colour, label=names[chunk]) for chunk, colour in colours.items()]
    if any(span.action == "wait" for span in spans):
        patches.append(
            Patch(facecolor="none", edgecolor=WAIT_COLOUR, hatch="////", label="the host waits")
        )
    return patches
