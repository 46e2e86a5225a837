#!/usr/bin/env python
"""Draw the README's chart from the table of docs/results.md.

    python scripts/readme_chart.py [FILE]     # default: docs/pictures/auto_by_rate.png

The table holds what was measured: `auto` against Megatron's `alltoall`, in one interleaved run.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monta_megatron.tools import pictures

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results.md"
HEADING = "## `auto` against stock `alltoall`"
# TP, EP, ETP of the 8 ranks.
LAYOUTS = {
    "1, 8, 1": ("monta, auto: EP 8", "#e07b39"),
    "4, 2, 4": ("monta, auto: EP 2 x ETP 4", "#332288"),
}
SHOWN = {"top-k": "8", "routing": "uniform", "tokens": "512"}
RATES = ("200", "500", "1000")
# The README shows it 830 pixels wide: two dots for each.
SIZE_INCHES, DPI = (8.3, 3.7), 200


def results() -> list[dict[str, str]]:
    """The rows of the last table of its section, by the names of their columns."""
    _, _, section = RESULTS.read_text(encoding="utf-8").partition(HEADING)
    *_, table = section.partition("\n## ")[0].strip().split("\n\n")
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    names, _, *rows = lines
    return [dict(zip(names, row, strict=True)) for row in rows]


def ratio(rows: list[dict[str, str]], layout: str, rate: str) -> tuple[float, float, float]:
    """Stock's median over that of `auto`, and how far its 95% interval is below and above.

    Of what was measured of a layout at a rate, it is the largest hidden size.
    """
    wanted = {**SHOWN, "TP, EP, ETP": layout, "Mbit/s": rate}
    found = [row for row in rows if wanted.items() <= row.items()]
    row = max(found, key=lambda row: int(row["H"].replace(",", "")))
    median, (low, high) = float(row["times faster"]), map(float, row["95% interval"].split(" to "))
    return median, median - low, high - median


def draw(axis: Any, rows: list[dict[str, str]]) -> None:
    """Bars by rate: stock's own, then one for each layout."""

    def bars(position: int, heights: Sequence[float], **style: Any) -> Any:
        places = [place + 0.27 * (position - 1) for place in range(len(RATES))]
        return axis.bar(places, heights, width=0.25, **style)

    label = "stock alltoall, same layout"
    bars(0, [1] * len(RATES), color=pictures.STOCK_COLOUR, label=label)
    for position, (layout, (label, colour)) in enumerate(LAYOUTS.items(), 1):
        medians, *spread = zip(*(ratio(rows, layout, rate) for rate in RATES), strict=True)
        error = {"elinewidth": 1.2, "ecolor": "#404040", "capsize": 3}
        drawn = bars(position, medians, yerr=spread, error_kw=error, color=colour, label=label)
        axis.bar_label(drawn, fmt="{:.1f}x", padding=2, fontsize=11, fontweight="bold")
    axis.set_xticks(range(len(RATES)), [f"{int(rate):,} Mbit/s" for rate in RATES], fontsize=11)
    axis.set_xlabel("rate between the nodes", fontsize=11)
    axis.set_ylabel("times as fast as stock", fontsize=11)
    axis.set_ylim(0, 4.9)
    axis.grid(axis="y")
    axis.set_axisbelow(True)
    axis.legend(loc="upper right", ncols=3, fontsize=10, borderaxespad=0)


def main(arguments: list[str]) -> None:
    path = Path(*arguments) if arguments else DOCS / "pictures" / "auto_by_rate.png"
    with pictures.figure(path, SIZE_INCHES, DPI) as figure:
        draw(figure.subplots(), results())
        figure.suptitle(
            "emulated: dispatch and combine of an MoE layer on 2 nodes x 4 CPU ranks\n"
            "top-8 of 64 experts, forward and backward, median of 15 pairs, 95% interval",
            fontsize=11,
        )
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
