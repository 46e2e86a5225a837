"""What all pictures of timelines share: rows of bars by resource, coloured by chunk, and a legend.

A picture is as wide as a code host shows a page, so that nothing in it is scaled down there. Needs
matplotlib (the `plot` extra).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from monta_megatron.exchange.recording import Span
from monta_megatron.tools.timeline.spans import RESOURCES_AND_HOST, Track, rows_of

# 830 pixels at 100 dots per inch; twice as many are drawn.
WIDTH_INCHES, DPI = 8.3, 200
POINTS, SMALL_POINTS = 8.5, 7.5
# The average width of a small letter, and what names take at the left of the bars.
LETTER_INCHES, NAMES_INCHES = 0.063, 0.75
BAR_HEIGHT = 0.85
WHOLE_COLOUR, WAIT_COLOUR = "#b8b8b8", "#8c8c8c"
# Of red, green and blue.
LIGHTNESS = (0.299, 0.587, 0.114)
# Above this many us a picture shows ms.
LONGEST_IN_US = 20_000.0

Colours = Mapping[int | None, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a picture.

    Attributes:
        label: the name of a resource, at its left; empty below the first row of a resource.
        spans: its spans by pass.
    """

    label: str
    spans: Mapping[str, Sequence[Span]]


def rows_of_track(track: Track) -> list[Row]:
    """Its resources in order, with more rows where spans overlap; none for an idle resource."""
    rows: list[Row] = []
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
            rows.append(Row(label=label, spans=dict(zip(passes, parts, strict=True))))
    return rows


def colours_of(spans: Sequence[Span]) -> dict[int | None, Any]:
    """A colour for each chunk, and for None where something is done for all chunks at once."""
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


def draw_bar(axis: Any, position: float, span: Span, colour: Any, us_per_inch: float) -> None:
    """Draw a span, with the stage's name where there is room for it; waiting is hatched.

    Args:
        axis: a matplotlib axis of times in us and rows.
        position: height of its middle; rows are 1 apart.
        span: what is drawn.
        colour: of the bar.
        us_per_inch: scale of the axis.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    length_us = span.end_us - span.start_us
    bar = Rectangle((span.start_us, position - BAR_HEIGHT / 2), length_us, BAR_HEIGHT)
    if span.action == "wait":
        bar.set(facecolor="none", edgecolor=WAIT_COLOUR, hatch="////", linewidth=0.3)
    else:
        bar.set(facecolor=colour, edgecolor="white", linewidth=0.3)
    axis.add_artist(bar)
    letters = int(length_us / us_per_inch / LETTER_INCHES)
    # For "alltoall between nodes", the row and the legend show what the first word leaves out.
    names = [name for name in (span.stage, span.stage.split()[0]) if len(name) <= letters]
    if span.action != "wait" and names:
        is_dark = np.dot(to_rgb(colour), LIGHTNESS) < 0.5
        axis.text(
            span.start_us + length_us / 2,
            position,
            names[0],
            ha="center",
            va="center_baseline",
            fontsize=SMALL_POINTS,
            color="white" if is_dark else "black",
        )


def show_times(axis: Any, longest_us: float, since: str) -> None:
    """Label an axis of times, in ms where us would have too many digits."""
    in_ms = longest_us > LONGEST_IN_US
    axis.set_xlabel(f"{'ms' if in_ms else 'us'} since {since}", fontsize=POINTS)
    axis.xaxis.set_major_formatter(lambda us, position: f"{us / 1e3 if in_ms else us:,g}")
    axis.tick_params(labelsize=POINTS, left=False)
    axis.grid(axis="x")
    axis.set_axisbelow(True)


def time_on_axis(time_us: float, longest_us: float) -> str:
    """A time with its unit, in that of an axis which ends at `longest_us`."""
    if longest_us > LONGEST_IN_US:
        return f"{time_us / 1e3:,.{1 if longest_us < 10 * LONGEST_IN_US else 0}f} ms"
    return f"{time_us:,.0f} us"


def legend_of(colours: Colours, spans: Sequence[Span]) -> list[Any]:
    """Entries of a legend: what each colour stands for, and the hatching of what waits."""
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
