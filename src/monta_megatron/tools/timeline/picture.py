"""A timeline pass by pass: a panel for each, every rank's resources, coloured by chunk.

Dispatch and combine are side by side, their backward passes below.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from monta_megatron.common.units import counted
from monta_megatron.tools import pictures
from monta_megatron.tools.timeline.bars import (
    DPI,
    NAMES_INCHES,
    POINTS,
    WIDTH_INCHES,
    Row,
    colours_of,
    draw_bar,
    legend_of,
    rows_of_track,
    show_times,
)
from monta_megatron.tools.timeline.spans import Timeline

ROW_INCHES = 0.2
COLUMNS = 2
LETTERS_OF_TITLE = 105


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
        # A line that holds the track's name, then its resources.
        for row in (Row(label=track.name, spans={}), *rows_of_track(track))
    ]
    spans = [span for row in rows for part in row.spans.values() for span in part]
    low, high = min(span.start_us for span in spans), max(span.end_us for span in spans)
    us_per_inch = 1.01 * (high - low) / ((WIDTH_INCHES - NAMES_INCHES) / COLUMNS - 0.1)
    passes = list(dict.fromkeys(span.pass_name for span in spans))
    num_panels = math.ceil(len(passes) / COLUMNS)
    height_inches = 0.9 + num_panels * (0.6 + ROW_INCHES * len(rows))
    left_out = sum(len(timeline.tracks[max_ranks:]) for timeline in timelines)
    if left_out:
        title += f"; {counted(left_out, 'more rank')} not drawn"

    with pictures.figure(path, (WIDTH_INCHES, height_inches), DPI) as figure:
        panels = figure.subplots(num_panels, COLUMNS, sharex=True, sharey=True, squeeze=False)
        colours = colours_of(spans)
        for axis, pass_name in zip(panels.flat, passes, strict=False):
            for position, row in enumerate(rows):
                for span in row.spans.get(pass_name, ()):
                    draw_bar(axis, position, span, colours[span.chunk], us_per_inch)
                if not row.spans:
                    _name_track(axis, position, row.label)
            axis.set_title(pass_name.replace("_", " "), fontsize=POINTS)
            show_times(axis, high, "the first chunk started")
            axis.label_outer()
        _scale(panels.flat[0], rows, (low, low + 1.01 * (high - low)))
        figure.legend(handles=legend_of(colours, spans), loc="outside lower center", ncols=6)
        figure.suptitle("\n".join(textwrap.wrap(title, LETTERS_OF_TITLE)), fontsize=POINTS + 1)


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


def _name_track(axis: Any, position: int, name: str) -> None:
    axis.text(
        0.002,
        position + 0.15,
        name,
        transform=axis.get_yaxis_transform(),
        va="center_baseline",
        fontsize=POINTS,
        weight="bold",
    )


def _scale(axis: Any, rows: Sequence[Row], limits: tuple[float, float]) -> None:
    """The scale of a panel, which all panels share."""
    labelled = [at for at, row in enumerate(rows) if row.spans and row.label]
    axis.set_xlim(*limits)
    axis.set_ylim(len(rows) - 0.3, -0.8)
    axis.set_yticks(labelled, [rows[at].label for at in labelled])
