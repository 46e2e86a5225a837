"""Pictures of a report; needs matplotlib (the `plot` extra)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monta_megatron.common.units import counted
from monta_megatron.tools import pictures
from monta_megatron.tools.bench.report import Row

COLOURS = {
    "Megatron": pictures.STOCK_COLOUR,
    "monta": "#2f7ebc",
    "monta, the planner's pick": pictures.PICK_COLOUR,
}


def plot_report(report: dict[str, Any], folder: Path) -> list[Path]:
    """Draw bars by chain, one picture per scope, and return the files that were written."""
    from matplotlib.patches import Patch

    rows = [Row(**row) for row in report["rows"]]
    written = []
    for scope in dict.fromkeys(row.scope for row in rows):
        of_scope = [row for row in rows if row.scope == scope]
        phases = list(dict.fromkeys(row.phase for row in of_scope))
        num_bars = len(of_scope) // len(phases)
        path = folder / f"{scope}.png"
        size_inches = (1 + 5.5 * len(phases), 1.6 + 0.32 * num_bars)
        with pictures.figure(path, size_inches) as figure:
            axes = figure.subplots(1, len(phases), sharey=True, squeeze=False)[0]
            for axis, phase in zip(axes, phases, strict=True):
                _bars(axis, phase, [row for row in of_scope if row.phase == phase])
            # The panels share their y axis, so inverting one inverts them all.
            axes[0].invert_yaxis()
            kinds = dict.fromkeys(_kind(row) for row in of_scope)
            figure.legend(
                handles=[Patch(color=COLOURS[kind], label=kind) for kind in kinds],
                loc="outside lower center",
                ncols=len(kinds),
            )
            figure.suptitle(_title(report["meta"], scope), fontsize=9)
        written.append(path)
    return written


def _bars(axis: Any, phase: str, rows: Sequence[Row]) -> None:
    """Medians with their spread, and how many times faster than stock they are."""
    positions = range(len(rows))
    spreads = [
        [row.median_ms - row.p10_ms for row in rows],
        [row.p90_ms - row.median_ms for row in rows],
    ]
    axis.barh(
        positions,
        [row.median_ms for row in rows],
        xerr=spreads,
        color=[COLOURS[_kind(row)] for row in rows],
        error_kw={"elinewidth": 1, "ecolor": "#404040"},
    )
    for position, row in enumerate(rows):
        axis.annotate(
            f"{row.ratio_to_alltoall:.2f}x",
            (row.p90_ms, position),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(positions, [row.name for row in rows], fontsize=8)
    axis.margins(x=0.15)
    axis.set_xlabel("ms (10th to 90th percentile); times faster than megatron alltoall", fontsize=8)
    axis.set_title(phase.replace("_", " + "))


def _kind(row: Row) -> str:
    if row.dispatcher == "megatron":
        return "Megatron"
    return "monta, the planner's pick" if row.chosen else "monta"


def _title(meta: dict[str, Any], scope: str) -> str:
    layout, layer = meta["layout"], meta["layer"]
    where = meta["machine"]["gpu"] or f"CPU ranks, {meta['machine']['processor']}"
    cluster = meta["emulated_cluster"]
    if cluster is not None:
        where += f", emulated at {cluster['inter_mbit']:g} Mbit/s"
    return (
        f"{scope}: {counted(layout['nodes'], 'node')} x "
        f"{counted(layout['ranks_per_node'], 'rank')}, TP {layout['tp']}, EP {layout['ep']}, "
        f"ETP {layout['etp']}, {layer['experts']} experts, top-{layer['top_k']},\n"
        f"H {layer['hidden']}, {counted(layer['tokens'], 'token')} per rank, {layer['dtype']}, "
        f"{layer['routing']} routing\n{where}"
    )
