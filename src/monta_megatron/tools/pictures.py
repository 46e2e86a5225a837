"""Pictures: their style, colours and files, and the picture of a timeline.

matplotlib (the `plot` extra) is looked for here alone, and imported only to draw. A timeline is as
wide as a code host shows a page, so that nothing in it is scaled down there.
"""

import importlib.util
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from monta_megatron.common.files import write_whole
from monta_megatron.tools.timeline import TimelineReport, total_us
from monta_megatron.tools.trace import RESOURCES, STOCK, Span, lanes_of

INSTALL = "pip install matplotlib"

STOCK_COLOUR = "#8c8c8c"

STYLE = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.titlesize": 10,
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "legend.frameon": False,
}


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def figure(path: Path, size_inches: tuple[float, float], dpi: int = 150) -> Iterator[Any]:
    """A matplotlib figure to draw in; it is written as a PNG, whole or not at all.

    Args:
        path: path of the PNG.
        size_inches: width and height in inches.
        dpi: dots per inch.

    Raises:
        OSError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    png = BytesIO()
    with matplotlib.rc_context(STYLE):
        # Made without pyplot, it needs no display and no backend, and is not kept when it is done.
        drawn = Figure(figsize=size_inches, layout="constrained")
        yield drawn
        drawn.savefig(png, dpi=dpi, format="png")
    write_whole(path, png.getvalue())


# Of a timeline, in inches: 1,000 pixels at 120 dots per inch wide; twice as many are drawn.
WIDTH, NAMES_WIDTH, LETTER_WIDTH, EDGED_WIDTH = 8.3, 0.75, 0.065, 0.02
LANE_HEIGHT, PANEL_HEIGHT, FRAME_HEIGHT = 0.21, 0.5, 1.0
TIMELINE_DPI, POINTS, SMALL_POINTS, LETTERS_OF_TITLE = 240, 8.5, 7.5, 105
# In lanes: of a bar, and above all bars, where the names of passes have two lines.
BAR, ABOVE = 0.85, 2.2
WHOLE_COLOUR = "#b8b8b8"
BAND_COLOURS = ("#eef1f5", "#f8f9fb")


class Panel(NamedTuple):
    """Spans of one rank under a title: a row, or one of its passes.

    Attributes:
        title: title of the panel.
        spans: spans of the rank.
        start_us, length_us: start and length of the time axis.
    """

    title: str
    spans: Sequence[Span]
    start_us: float
    length_us: float

    @property
    def height_inches(self) -> float:
        """Height with the title and the axis."""
        return LANE_HEIGHT * (len(lanes_of(self.spans)) + ABOVE) + PANEL_HEIGHT


def draw_timeline(report: TimelineReport, path: Path) -> None:
    """Draw stock's row above ours on one axis of time, and our first pass enlarged.

    One rank is drawn, the first.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.patches import Patch

    length_us = max(report.drawn_us.values())
    panels = []
    for name in report.drawn_us:
        row = report.trace.rows[name]
        spans = [span for span in row if span.rank == 0 and span.resource != "pass"]
        panels.append(Panel(name, spans, min(span.start_us for span in row), length_us))
    colours, pass_name = colours_of(spans), spans[0].pass_name
    spans = [span for span in spans if span.pass_name == pass_name]
    start_us = min(span.start_us for span in spans)
    title = f"{pass_name} of {report.ours}, enlarged"
    panels.append(Panel(title, spans, start_us, total_us(spans)))

    heights = [panel.height_inches for panel in panels]
    with figure(path, (WIDTH, FRAME_HEIGHT + sum(heights)), TIMELINE_DPI) as drawn:
        axes = drawn.subplots(len(panels), height_ratios=heights)
        for axis, panel in zip(axes, panels, strict=True):
            draw_panel(axis, panel, {} if panel.title == STOCK else colours)
        axes[-1].set_xlabel("ms", fontsize=POINTS)
        drawn.suptitle(report.headline, fontsize=POINTS + 1, weight="bold")
        about = f"{report.trace.title}; {report.trace.ranks[0]} drawn"
        axes[0].set_title(textwrap.fill(about, LETTERS_OF_TITLE) + "\n", fontsize=POINTS)
        labels = ["all chunks at once" if chunk is None else f"chunk {chunk}" for chunk in colours]
        patches = [Patch(facecolor=colour) for colour in colours.values()]
        drawn.legend(patches, labels, loc="outside lower center", ncols=6)


def colours_of(spans: Sequence[Span]) -> dict[int | None, Any]:
    """A colour for each chunk, and for None, on all of which black text can be read."""
    import matplotlib

    chunks = sorted({span.chunk for span in spans if span.chunk is not None})
    shades = matplotlib.colormaps["viridis"](np.linspace(0.45, 1, len(chunks)))
    colours: dict[int | None, Any] = dict(zip(chunks, shades, strict=True))
    if any(span.chunk is None for span in spans):
        colours[None] = WHOLE_COLOUR
    return colours


def draw_panel(axis: Any, panel: Panel, colours: Mapping[int | None, Any]) -> None:
    """Draw a bar for each span, and a band behind each pass, on a matplotlib axis in ms.

    Args:
        axis: axis to draw on.
        panel: panel to draw.
        colours: chunk -> colour; other spans have stock's colour.
    """
    inches_per_ms = (WIDTH - NAMES_WIDTH) / (panel.length_us / 1e3)
    lanes = lanes_of(panel.spans)
    axis.set_title(panel.title, fontsize=POINTS, weight="bold", loc="left")
    axis.set_xlim(0, 1.005 * panel.length_us / 1e3)
    axis.set_ylim(len(lanes) - 0.4, -ABOVE)
    first_lanes = {lane[0].resource: at for at, lane in reversed(list(enumerate(lanes)))}
    axis.set_yticks(list(first_lanes.values()), [RESOURCES[name] for name in first_lanes])
    axis.tick_params(labelsize=POINTS, left=False)
    axis.grid(axis="x")
    axis.set_axisbelow(True)

    def write(begin_ms: float, length_ms: float, at: float, names: Sequence[str]) -> None:
        """Write the first of the names for which there is room."""
        letters = length_ms * inches_per_ms / LETTER_WIDTH
        fitting = (name for name in names if max(map(len, name.splitlines())) <= letters)
        style = {"ha": "center", "va": "center_baseline", "fontsize": SMALL_POINTS}
        axis.text(begin_ms + length_ms / 2, at, next(fitting, ""), **style)

    passes: dict[str, list[Span]] = {}
    for span in panel.spans:
        # The host may come to a pass while the one before it runs.
        if span.resource != "host":
            passes.setdefault(span.pass_name, []).append(span)
    for number, (pass_name, spans) in enumerate(passes.items()):
        begin_ms = (min(span.start_us for span in spans) - panel.start_us) / 1e3
        length_ms, name = total_us(spans) / 1e3, pass_name.replace("_", " ")
        axis.axvspan(begin_ms, begin_ms + length_ms, facecolor=BAND_COLOURS[number % 2], zorder=0)
        write(begin_ms, length_ms, -1.3, (name, name.replace(" ", "\n")))
    for at, spans in enumerate(lanes):
        bars = [
            ((span.start_us - panel.start_us) / 1e3, (span.end_us - span.start_us) / 1e3)
            for span in spans
        ]
        axis.broken_barh(
            bars,
            (at - BAR / 2, BAR),
            facecolors=[colours.get(span.chunk, STOCK_COLOUR) for span in spans],
            edgecolor="white",
            # An edge would cover a bar as thin as itself.
            linewidths=[0.3 * (length_ms * inches_per_ms > EDGED_WIDTH) for _, length_ms in bars],
        )
        for span, bar in zip(spans, bars, strict=True):
            # Of "alltoall between nodes", the lane says what the first word leaves out.
            short = () if span.chunk is None else (span.stage.split()[0],)
            write(*bar, at, (span.stage, *short))
