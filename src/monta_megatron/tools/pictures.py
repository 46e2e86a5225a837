"""Style, colours and files of all pictures.

matplotlib (the `plot` extra) is looked for here alone, and imported only to draw.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import Any

from monta_megatron.chains import CHAINS
from monta_megatron.common.files import write_whole

INSTALL = "pip install matplotlib"

STOCK_COLOUR, PICK_COLOUR = "#8c8c8c", "#e07b39"
# Distinguishable for people with red-green colour blindness, too.
COLOURS = ("#332288", "#88ccee", "#44aa99", "#117733", "#aa4499", "#222222")
CHAIN_COLOURS = dict(zip(CHAINS, cycle(COLOURS), strict=False))

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


def check_can_plot(folder: str | None) -> None:
    """Fail before the work, not after it, if its pictures cannot be drawn; make their folder.

    Args:
        folder: value of --plot, or None where nothing is to be drawn.

    Raises:
        ValueError: matplotlib is not installed.
    """
    if folder is None:
        return
    if not can_draw():
        raise ValueError(f"--plot: needs matplotlib: {INSTALL}")
    Path(folder).mkdir(parents=True, exist_ok=True)


@contextmanager
def figure(path: Path, size_inches: tuple[float, float], dpi: int = 150) -> Iterator[Any]:
    """A matplotlib figure to draw in; it is written as a PNG, whole or not at all.

    Args:
        path: path of the PNG.
        size_inches: width and height.
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
