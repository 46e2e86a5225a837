"""A picture of several plans; needs matplotlib (the `plot` extra)."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from monta_megatron.planner.plan import Plan
from monta_megatron.tools import pictures

# Letters of the title in a line.
TITLE_WIDTH = 80


def plot_plans(
    values: Sequence[float], plans: Sequence[Plan], label: str, title: str, path: Path
) -> None:
    """Draw time against what sets the plans apart, a line per chain, the choice ringed.

    Args:
        values: by plan, the value of the factor in which the plans differ.
        plans: one plan for each of them.
        label: what the values are.
        title: what all plans have in common.
        path: path of the PNG.
    """
    with pictures.figure(path, (7, 4.2)) as figure:
        axis = figure.subplots()
        for number, (chain, colour) in enumerate(pictures.CHAIN_COLOURS.items()):
            times_us = [plan.best_us()[chain] for plan in plans]
            if any(time is not None for time in times_us):
                shown = [math.nan if time is None else time for time in times_us]
                # Thinner lines on top, so that chains with the same time are both visible.
                style = {"linewidth": 3 - 0.4 * number, "markersize": 7 - 0.8 * number}
                axis.plot(values, shown, "o-", color=colour, label=chain, **style)
        axis.plot(
            values,
            [plan.predicted_us for plan in plans],
            "o",
            markersize=11,
            markerfacecolor="none",
            markeredgecolor=pictures.PICK_COLOUR,
            markeredgewidth=2,
            label="the planner's choice",
        )
        pictures.log_ticks(axis)
        axis.set_xticks(values)
        axis.set_xticks([], minor=True)
        axis.set(xlabel=label, ylabel="us, predicted")
        axis.grid()
        axis.legend()
        figure.suptitle(textwrap.fill(title, TITLE_WIDTH))
