"""Stock alltoall above a chain, on one axis of time, and the chain's first pass enlarged below.

One rank of each is drawn, with its passes laid end to end: what runs between them, such as the
experts, is no part of an exchange.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from monta_megatron.tools import pictures
from monta_megatron.tools.timeline.bars import (
    DPI,
    LETTER_INCHES,
    NAMES_INCHES,
    POINTS,
    SMALL_POINTS,
    WIDTH_INCHES,
    Colours,
    Row,
    colours_of,
    draw_bar,
    legend_of,
    rows_of_track,
    show_times,
    time_on_axis,
)
from monta_megatron.tools.timeline.spans import Timeline

ROW_INCHES, ZOOM_ROW_INCHES = 0.17, 0.24
# What titles, axes and the legend take besides the rows.
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
        """Time of all passes of stock and of ours, without what lies between them."""
        stock_us, ours_us = (_ends_us(end_to_end(each))[-1] for each in (self.stock, self.ours))
        return stock_us, ours_us

    @property
    def ratio(self) -> float:
        """How many times as fast ours is."""
        stock_us, ours_us = self.total_us
        return stock_us / ours_us

    @property
    def headline(self) -> str:
        """What the picture shows, in a line."""
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


def draw(comparison: Comparison, path: Path) -> None:
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
    heights = ROW_INCHES * (ours_at + len(our_rows)), ZOOM_ROW_INCHES * len(enlarged_rows)
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


def _set_scale(axis: Any, rows_at: Mapping[float, Sequence[Row]], longest_us: float) -> float:
    """Scale an axis, and name the rows that begin at these heights; returns us per inch."""
    labels = {at + n: row.label for at, rows in rows_at.items() for n, row in enumerate(rows)}
    shown = {height: label for height, label in labels.items() if label}
    axis.set_yticks(list(shown), list(shown.values()))
    axis.set_xlim(0, 1.005 * longest_us)
    axis.set_ylim(max(labels) + 0.7, min(min(labels), 0) - 0.7)
    show_times(axis, longest_us, "the exchange began")
    return 1.005 * longest_us / (WIDTH_INCHES - NAMES_INCHES)


def _draw_rows(
    axis: Any, at: float, rows: Sequence[Row], colours: Colours, us_per_inch: float
) -> None:
    """Draw the bars of rows of which the first is at this height."""
    for number, row in enumerate(rows):
        for spans in row.spans.values():
            for span in spans:
                draw_bar(axis, at + number, span, colours[span.chunk], us_per_inch)


def _draw_passes(axis: Any, at: float, rows: Sequence[Row], us_per_inch: float) -> None:
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
