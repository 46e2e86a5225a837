"""Pictures of a report and of many; needs matplotlib (the `plot` extra)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from monta_megatron.chains import CHAINS
from monta_megatron.common.flags import DTYPE_BYTES
from monta_megatron.common.units import counted
from monta_megatron.integration.options import AUTO
from monta_megatron.tools import pictures
from monta_megatron.tools.bench.report import Row
from monta_megatron.tools.bench.summary import FACTORS, Measured, measured_points

COLOURS = {
    "Megatron": pictures.STOCK_COLOUR,
    "monta": "#2f7ebc",
    "monta, the planner's pick": pictures.PICK_COLOUR,
}
STOCK_STYLE = {"color": pictures.STOCK_COLOUR, "linewidth": 2.0, "marker": "s"}
AUTO_STYLE = {"color": pictures.PICK_COLOUR, "linewidth": 2.5, "marker": "o"}
# The relative error that the dashed lines mark.
ERROR_BAND = 0.25


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


def plot_sweep(reports: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw time against size, and predicted against measured, where there are points for them.

    Returns:
        The files that were written.
    """
    points = measured_points(reports)
    written = []
    by_size = points_by_size(points)
    if len(by_size) > 1:
        written.append(_draw(folder / "time_by_size.png", _time_by_size, by_size))
    if any(point.errors(chain) for point in points for chain in CHAINS):
        written.append(_draw(folder / "predicted.png", _predicted, points))
    return written


def points_by_size(points: Sequence[Measured]) -> list[Measured]:
    """The largest set of points that differ in nothing but their size, ordered by size."""
    sets: dict[tuple[str, ...], dict[int, Measured]] = {}
    for point in points:
        key = tuple(
            value_of(point) for name, value_of in FACTORS.items() if name not in ("tokens", "H")
        )
        sets.setdefault(key, {})[size_bytes(point)] = point
    largest = max(sets.values(), key=len, default={})
    return [largest[size] for size in sorted(largest)]


def size_bytes(point: Measured) -> int:
    """Bytes of the hidden rows that a rank brings."""
    row = point.stock
    return row.tokens * row.hidden * DTYPE_BYTES[row.dtype]


def _draw(path: Path, draw: Callable[[Any, Sequence[Measured]], None], points: Any) -> Path:
    with pictures.figure(path, (7.5, 5)) as figure:
        axis = figure.subplots()
        draw(axis, points)
        pictures.log_ticks(axis)
        axis.grid()
        axis.legend()
    return path


def _time_by_size(axis: Any, points: Sequence[Measured]) -> None:
    """A line for stock, for auto, and for each chain with its best number of chunks."""

    def line(name: str, rows: Sequence[Row | None], **style: Any) -> None:
        times = [
            (size_bytes(point) / 1e6, row.median_ms)
            for point, row in zip(points, rows, strict=True)
            if row is not None
        ]
        if times:
            axis.plot(*zip(*times, strict=True), label=name, **style)

    for chain, colour in pictures.CHAIN_COLOURS.items():
        rows = [
            min(
                (row for row in point.ours if row.chain == chain and row.requested != AUTO),
                key=lambda row: row.median_ms,
                default=None,
            )
            for point in points
        ]
        line(chain, rows, color=colour, linewidth=1.2, marker=".")
    line("megatron alltoall", [point.stock for point in points], **STOCK_STYLE)
    line(AUTO, [point.auto for point in points], **AUTO_STYLE)
    first = points[0].stock
    where = "" if first.inter_mbit is None else f", {first.inter_mbit:g} Mbit/s between nodes"
    axis.set_title(
        f"TP {first.tp}, EP {first.ep}, ETP {first.etp}, {first.experts} experts, top-"
        f"{first.top_k}, {first.routing} routing{where}"
    )
    axis.set_xlabel("hidden rows that a rank brings, MB")
    axis.set_ylabel("dispatch + combine, forward + backward, ms")


def _predicted(axis: Any, points: Sequence[Measured]) -> None:
    """A dot per chain, number of chunks and point."""
    for chain, colour in pictures.CHAIN_COLOURS.items():
        times = [
            (row.median_ms, row.predicted_ms)
            for point in points
            for row in point.ours
            if row.chain == chain and row.requested != AUTO and row.predicted_ms is not None
        ]
        if times:
            axis.plot(
                *zip(*times, strict=True), ".", markersize=7, alpha=0.7, color=colour, label=chain
            )
    # Straight on logarithmic axes too; from a measured time on, as what they go through is shown.
    ms = next(row.median_ms for point in points for row in point.ours)
    axis.axline((ms, ms), (1.1 * ms, 1.1 * ms), color="#404040", linewidth=1)
    for factor in (1 - ERROR_BAND, 1 + ERROR_BAND):
        label = f"{ERROR_BAND:.0%} off" if factor > 1 else None
        line = {"linestyle": "--", "color": "#404040", "linewidth": 0.8, "label": label}
        axis.axline((ms, ms * factor), (1.1 * ms, 1.1 * ms * factor), **line)
    axis.set_title(f"Predicted against measured, {counted(len(points), 'point')}")
    axis.set_xlabel("measured, ms")
    axis.set_ylabel("predicted, ms")
