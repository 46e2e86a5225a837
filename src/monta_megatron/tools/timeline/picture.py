"""Pictures of timelines: bars by resource, pass by pass, or stock above a chain.

Pass by pass, every rank's resources are coloured by chunk; dispatch and combine are side by side,
their backward passes below. A comparison draws one rank of stock alltoall above one of a chain, on
one axis of time, with passes laid end to end, and enlarges the chain's first pass below. A picture
is as wide as a code host shows a page, so that nothing in it is scaled down there. Needs matplotlib
(the `plot` extra).
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from monta_megatron.common.units import counted
from monta_megatron.exchange.recording import Span
from monta_megatron.tools import pictures
from monta_megatron.tools.timeline.spans import RESOURCES_AND_HOST, Timeline, Track, rows_of

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
class Lane:
    """A line of a picture.

    Attributes:
        label: the name of a resource, at its left; empty below the first row of a resource.
        spans: its spans by pass.
    """

    label: str
    spans: Mapping[str, Sequence[Span]]


def rows_of_track(track: Track) -> list[Lane]:
    """Its resources in order, with more rows where spans overlap; none for an idle resource."""
    rows: list[Lane] = []
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
            rows.append(Lane(label=label, spans=dict(zip(passes, parts, strict=True))))
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
        span: to draw.
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
    """Entries of a legend: the meaning of each colour, and the hatching of waits."""
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
        for row in (Lane(label=track.name, spans={}), *rows_of_track(track))
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


def _scale(axis: Any, rows: Sequence[Lane], limits: tuple[float, float]) -> None:
    """The scale of a panel, which all panels share."""
    labelled = [at for at, row in enumerate(rows) if row.spans and row.label]
    axis.set_xlim(*limits)
    axis.set_ylim(len(rows) - 0.3, -0.8)
    axis.set_yticks(labelled, [rows[at].label for at in labelled])


COMPARED_ROW_INCHES, ZOOM_ROW_INCHES = 0.17, 0.24
# Height of titles, axes and the legend.
FRAME_INCHES = 1.9
# Above a track's resources, in heights of a row: its name, and the names of its passes.
LINES_ABOVE = 3.4
BAND_COLOURS = ("#eef1f5", "#f8f9fb")
STOCK = "stock alltoall"
# A smaller gap has no room for a text.
SMALLEST_GAP = 0.2


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two timelines of one exchange.

    Attributes:
        stock: of the stock dispatcher.
        ours: of the chain that is compared with it.
        about: model, cluster and layout, predicted or recorded: one line for each.
    """

    stock: Timeline
    ours: Timeline
    about: Sequence[str]

    @cached_property
    def total_us(self) -> tuple[float, float]:
        """Time of all passes of stock and of ours, without the gaps between them."""
        stock_us, ours_us = (_ends_us(end_to_end(each))[-1] for each in (self.stock, self.ours))
        return stock_us, ours_us

    @property
    def ratio(self) -> float:
        """Speedup of ours over stock."""
        stock_us, ours_us = self.total_us
        return stock_us / ours_us

    @property
    def headline(self) -> str:
        """Headline of the picture, in a line."""
        stock, ours = (time_on_axis(time_us, max(self.total_us)) for time_us in self.total_us)
        return f"{self.ratio:.2f}x {STOCK}: {ours} instead of {stock} per MoE layer and micro-batch"


def end_to_end(timeline: Timeline) -> Timeline:
    """The same, where a pass starts on its first rank when the one before has ended on its last."""
    shifts_us: dict[str, float] = {}
    end_us = 0.0
    for pass_name in dict.fromkeys(span.pass_name for span in timeline.tracks[0].spans):
        spans = [
            span for track in timeline.tracks for span in track.spans if span.pass_name == pass_name
        ]
        shifts_us[pass_name] = end_us - min(span.start_us for span in spans)
        end_us = shifts_us[pass_name] + max(span.end_us for span in spans)
    tracks = (
        replace(track, spans=tuple(span.shifted(shifts_us[span.pass_name]) for span in track.spans))
        for track in timeline.tracks
    )
    return replace(timeline, tracks=tuple(tracks))


def draw_comparison(comparison: Comparison, path: Path) -> None:
    """Write the PNG.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.patches import Patch

    stock, ours = (end_to_end(each).tracks[0] for each in (comparison.stock, comparison.ours))
    stock_us, ours_us = comparison.total_us
    longest_us = max(stock_us, ours_us)
    first_pass = ours.spans[0].pass_name
    enlarged = replace(
        ours, spans=tuple(span for span in ours.spans if span.pass_name == first_pass)
    )
    stock_rows, our_rows, enlarged_rows = map(rows_of_track, (stock, ours, enlarged))
    ours_at = 2 * LINES_ABOVE + len(stock_rows)
    heights = COMPARED_ROW_INCHES * (ours_at + len(our_rows)), ZOOM_ROW_INCHES * len(enlarged_rows)
    colours = colours_of(ours.spans)
    grey = dict.fromkeys([span.chunk for span in stock.spans], pictures.STOCK_COLOUR)

    with pictures.figure(path, (WIDTH_INCHES, FRAME_INCHES + sum(heights)), DPI) as figure:
        overview, zoom = figure.subplots(2, height_ratios=heights)
        figure.suptitle(comparison.headline, fontsize=POINTS + 3, weight="bold")
        drawn = f"; {ours.name} drawn" if len(comparison.ours.tracks) > 1 else ""
        overview.set_title("\n".join(comparison.about) + drawn, fontsize=POINTS)

        rows_at = {LINES_ABOVE: stock_rows, ours_at: our_rows}
        us_per_inch = _set_scale(overview, rows_at, longest_us)
        for at, rows, name, total_us, colour_of in (
            (LINES_ABOVE, stock_rows, STOCK, stock_us, grey),
            (ours_at, our_rows, comparison.ours.name, ours_us, colours),
        ):
            total = time_on_axis(total_us, longest_us)
            _name(overview, at - LINES_ABOVE + 0.35, f"{name}: {total}")
            _draw_passes(overview, at, rows, us_per_inch)
            _draw_rows(overview, at, rows, colour_of, us_per_inch)
        if longest_us - ours_us > SMALLEST_GAP * longest_us:
            _draw_gap(overview, ours_at + len(our_rows) / 2, ours_us, stock_us)

        enlarged_us = max(span.end_us for span in enlarged.spans)
        us_per_inch = _set_scale(zoom, {0: enlarged_rows}, enlarged_us)
        _draw_rows(zoom, 0, enlarged_rows, colours, us_per_inch)
        title = f"{first_pass.replace('_', ' ')} of {comparison.ours.name}, enlarged"
        zoom.set_title(title, fontsize=POINTS, weight="bold", loc="left")

        entries = [Patch(facecolor=pictures.STOCK_COLOUR, label=STOCK)]
        entries += legend_of(colours, [*stock.spans, *ours.spans])
        figure.legend(handles=entries, loc="outside lower center", ncols=6)


def _ends_us(timeline: Timeline) -> list[float]:
    """When passes end that are laid end to end, in order; the last is the total."""
    ends_us: dict[str, float] = {}
    for track in timeline.tracks:
        for span in track.spans:
            ends_us[span.pass_name] = max(span.end_us, ends_us.get(span.pass_name, 0.0))
    return sorted(ends_us.values())


def _set_scale(axis: Any, rows_at: Mapping[float, Sequence[Lane]], longest_us: float) -> float:
    """Scale an axis, and name the rows that begin at these heights; returns us per inch."""
    labels = {at + n: row.label for at, rows in rows_at.items() for n, row in enumerate(rows)}
    shown = {height: label for height, label in labels.items() if label}
    axis.set_yticks(list(shown), list(shown.values()))
    axis.set_xlim(0, 1.005 * longest_us)
    axis.set_ylim(max(labels) + 0.7, min(min(labels), 0) - 0.7)
    show_times(axis, longest_us, "the exchange began")
    return 1.005 * longest_us / (WIDTH_INCHES - NAMES_INCHES)


def _draw_rows(
    axis: Any, at: float, rows: Sequence[Lane], colours: Colours, us_per_inch: float
) -> None:
    """Draw the bars of rows of which the first is at this height."""
    for number, row in enumerate(rows):
        for spans in row.spans.values():
            for span in spans:
                draw_bar(axis, at + number, span, colours[span.chunk], us_per_inch)


def _draw_passes(axis: Any, at: float, rows: Sequence[Lane], us_per_inch: float) -> None:
    """Draw a band behind each pass of the rows, with the passes' names if there is room for all."""
    from matplotlib.patches import Rectangle

    ends_us = {}
    for pass_name in rows[0].spans:
        spans = [span for row in rows for span in row.spans[pass_name]]
        ends_us[pass_name] = min(s.start_us for s in spans), max(s.end_us for s in spans)
    has_room = all(
        max(map(len, pass_name.split("_"))) * LETTER_INCHES * us_per_inch < end_us - start_us
        for pass_name, (start_us, end_us) in ends_us.items()
    )
    for number, (pass_name, (start_us, end_us)) in enumerate(ends_us.items()):
        corner = start_us, at - LINES_ABOVE + 1
        axis.add_patch(
            Rectangle(
                corner,
                end_us - start_us,
                len(rows) + LINES_ABOVE - 1.5,
                facecolor=BAND_COLOURS[number % 2],
                zorder=0,
            )
        )
        if has_room:
            middle_us, height = (start_us + end_us) / 2, at - 1.5
            centred = {"ha": "center", "va": "center", "linespacing": 0.95}
            axis.text(
                middle_us, height, pass_name.replace("_", "\n"), fontsize=SMALL_POINTS, **centred
            )


def _name(axis: Any, height: float, name: str) -> None:
    axis.text(0, height, name, va="center", fontsize=POINTS, weight="bold")


def _draw_gap(axis: Any, height: float, ours_us: float, stock_us: float) -> None:
    """Draw how much earlier ours has ended, in the room beside it."""
    arrow = {"arrowstyle": "<->", "color": pictures.PICK_COLOUR, "linewidth": 1.5}
    axis.annotate("", (stock_us, height), (ours_us, height), arrowprops=arrow)
    text = f"{time_on_axis(stock_us - ours_us, stock_us)} less"
    centred = {"ha": "center", "va": "bottom", "weight": "bold", "color": pictures.PICK_COLOUR}
    axis.text((ours_us + stock_us) / 2, height - 0.3, text, fontsize=POINTS + 1, **centred)
