"""The picture of a timeline: stock's passes above ours, by resource, and a pass of ours enlarged.

One rank is drawn. Stock and ours share an axis of time. A picture is as wide as a code host shows a
page, so that nothing in it is scaled down there. Needs matplotlib (the `plot` extra).
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from monta_megatron.tools import pictures
from monta_megatron.tools.timeline.report import TimelineReport, shown_us
from monta_megatron.tools.trace import RESOURCES_AND_HOST, Span, Timeline, lanes_of

# 1,000 pixels at 120 dots per inch; twice as many are drawn.
WIDTH_INCHES, DPI = 8.3, 240
POINTS, SMALL_POINTS = 8.5, 7.5
# The average width of a small letter, and the room for names at the left of the bars.
LETTER_INCHES, NAMES_INCHES = 0.065, 0.75
LETTERS_OF_HEADLINE, LETTERS_OF_TITLE = 110, 105
LANE_INCHES, BAR_HEIGHT, EDGED_INCHES = 0.21, 0.85, 0.02
# Of a panel besides its lanes: title and axis; of the figure: headline and legend.
PANEL_INCHES, FRAME_INCHES = 0.5, 1.0
WHOLE_COLOUR = "#b8b8b8"
BAND_COLOURS = ("#eef1f5", "#f8f9fb")
# Of red, green and blue.
LIGHTNESS = (0.299, 0.587, 0.114)

# By chunk; None where something is done for all chunks at once.
Colours = Mapping[int | None, Any]


class Panel(NamedTuple):
    """Lanes of one rank under a title, with times since its start.

    Attributes:
        title: of the panel.
        lanes: (name of the resource, its spans); a resource whose spans overlap has several lanes.
        bands: name -> start and end of each pass.
        longest_us: end of the axis.
        colours: by chunk.
    """

    title: str
    lanes: Sequence[tuple[str, Sequence[Span]]]
    bands: Mapping[str, tuple[float, float]]
    longest_us: float
    colours: Colours

    @property
    def top(self) -> float:
        """Upper end of the axis in lanes: with bands, above two lines of text."""
        return -2.2 if self.bands else -0.6

    @property
    def height_inches(self) -> float:
        """Height of the lanes, the names of the passes, the title and the axis."""
        return LANE_INCHES * (len(self.lanes) - self.top) + PANEL_INCHES


def panel_of(
    timeline: Timeline,
    title: str,
    longest_us: float,
    colours: Colours,
    only_pass: str | None = None,
) -> Panel:
    """A panel of a timeline's first rank; of one pass, if it is named."""
    track = timeline.tracks[0]
    spans = [span for span in track.spans if only_pass in (None, span.pass_name)]
    start_us = timeline.start_us if only_pass is None else track.passes[only_pass][0]
    spans = [
        span._replace(start_us=span.start_us - start_us, end_us=span.end_us - start_us)
        for span in spans
    ]
    lanes = [
        (name if number == 0 else "", lane)
        for resource, name in RESOURCES_AND_HOST.items()
        for number, lane in enumerate(lanes_of([s for s in spans if s.resource == resource]))
    ]
    bands: dict[str, tuple[float, float]] = {}
    for span in spans if only_pass is None else ():
        # The host may come to a pass while the one before it runs.
        if span.resource != "host":
            begin_us, end_us = bands.get(span.pass_name, (span.start_us, span.end_us))
            bands[span.pass_name] = min(begin_us, span.start_us), max(end_us, span.end_us)
    return Panel(title, lanes, bands, longest_us, colours)


def draw(report: TimelineReport, path: Path) -> None:
    """Write the PNG.

    Raises:
        ValueError: the file cannot be written.
    """
    from matplotlib.patches import Patch

    stock, ours = report.stock, report.ours
    longest_us = max(row.total_us for row in (stock, ours) if row is not None)
    colours = colours_of(ours.tracks[0].spans)
    first_pass, (begin_us, end_us) = next(iter(ours.tracks[0].passes.items()))
    enlarged = f"{first_pass} of {ours.name}, enlarged"
    panels = [
        panel_of(ours, ours.name, longest_us, colours),
        panel_of(ours, enlarged, end_us - begin_us, colours, first_pass),
    ]
    if stock is not None:
        grey = dict.fromkeys((span.chunk for span in stock.tracks[0].spans), pictures.STOCK_COLOUR)
        panels.insert(0, panel_of(stock, stock.name, longest_us, grey))
    heights = [panel.height_inches for panel in panels]
    size = WIDTH_INCHES, FRAME_INCHES + sum(heights)
    with pictures.figure(path, size, DPI) as figure:
        axes = figure.subplots(len(panels), height_ratios=heights)
        for axis, panel in zip(axes, panels, strict=True):
            draw_panel(axis, panel)
        for axis in axes[:-2]:
            # That of ours has the same times.
            axis.set_xlabel("")
            axis.tick_params(labelbottom=False)
        where, _, what = report.title.partition(": ")
        about = f"{where}; {ours.tracks[0].name} drawn", what
        lines = [line for text in about for line in textwrap.wrap(text, LETTERS_OF_TITLE)]
        headline = "\n".join(textwrap.wrap(report.headline, LETTERS_OF_HEADLINE))
        figure.suptitle(headline, fontsize=POINTS + 1, weight="bold")
        axes[0].set_title("\n".join([*lines, ""]), fontsize=POINTS)
        figure.legend(
            handles=[
                Patch(
                    facecolor=colour,
                    label="all chunks at once" if chunk is None else f"chunk {chunk}",
                )
                for chunk, colour in colours.items()
            ],
            loc="outside lower center",
            ncols=6,
        )


def colours_of(spans: Sequence[Span]) -> Colours:
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


def draw_panel(axis: Any, panel: Panel) -> None:
    """Draw the bars of a panel, and a band behind each pass."""
    us_per_inch = panel.longest_us / (WIDTH_INCHES - NAMES_INCHES)
    axis.set_title(panel.title, fontsize=POINTS, weight="bold", loc="left")
    axis.set_xlim(0, 1.005 * panel.longest_us)
    axis.set_ylim(len(panel.lanes) - 0.4, panel.top)
    named = {at: name for at, (name, _) in enumerate(panel.lanes) if name}
    axis.set_yticks(list(named), list(named.values()))
    unit = shown_us(panel.longest_us)[1]
    in_us = {"us": 1, "ms": 1e3}[unit]
    axis.xaxis.set_major_formatter(lambda us, position: f"{us / in_us:,g}")
    axis.set_xlabel(unit, fontsize=POINTS)
    axis.tick_params(labelsize=POINTS, left=False)
    axis.grid(axis="x")
    axis.set_axisbelow(True)
    for number, (pass_name, (start_us, end_us)) in enumerate(panel.bands.items()):
        axis.axvspan(start_us, end_us, facecolor=BAND_COLOURS[number % 2], zorder=0)
        name = pass_name.replace("_", " ")
        names = [name, name.replace(" ", "\n")]
        _write(axis, (start_us, end_us), -1.3, names, us_per_inch, "black")
    for position, (_, spans) in enumerate(panel.lanes):
        for span in spans:
            draw_bar(axis, position, span, panel.colours[span.chunk], us_per_inch)


def draw_bar(axis: Any, position: float, span: Span, colour: Any, us_per_inch: float) -> None:
    """Draw a span, with the stage's name where there is room for it.

    Args:
        axis: a matplotlib axis of times in us and lanes.
        position: height of its middle; lanes are 1 apart.
        span: to draw.
        colour: of the bar.
        us_per_inch: scale of the axis.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    corner = span.start_us, position - BAR_HEIGHT / 2
    length_us = span.end_us - span.start_us
    # A white edge would cover a bar as thin as itself.
    edge = "white" if length_us / us_per_inch > EDGED_INCHES else colour
    axis.add_artist(
        Rectangle(corner, length_us, BAR_HEIGHT, facecolor=colour, edgecolor=edge, linewidth=0.3)
    )
    is_dark = np.dot(to_rgb(colour), LIGHTNESS) < 0.5
    # Of "alltoall between nodes", the lane says what the first word leaves out.
    names = [span.stage] if span.chunk is None else [span.stage, span.stage.split()[0]]
    times_us = span.start_us, span.end_us
    _write(axis, times_us, position, names, us_per_inch, "white" if is_dark else "black")


def _write(
    axis: Any,
    times_us: tuple[float, float],
    position: float,
    names: Sequence[str],
    us_per_inch: float,
    colour: str,
) -> None:
    """Write the first of the names for which there is room between two times."""
    letters = int((times_us[1] - times_us[0]) / us_per_inch / LETTER_INCHES)
    for name in names:
        if max(map(len, name.splitlines())) <= letters:
            axis.text(
                sum(times_us) / 2,
                position,
                name,
                ha="center",
                va="center_baseline",
                fontsize=SMALL_POINTS,
                color=colour,
            )
            return
