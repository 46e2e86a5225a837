"""Figures over many points: `auto` against stock, regret, errors of predictions.

Regret is the median time of a pick over that of the fastest chain, timed side by side. No torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from monta_megatron.chains import CHAINS
from monta_megatron.common.text import counted
from monta_megatron.tools import pictures
from monta_megatron.tools.bench.report import Row

# The phase that the planner optimises.
PHASE = "forward_backward"
# A smaller ratio to stock is a loss, not noise.
LOSS_BELOW = 0.97
# Distinguishable for people with red-green colour blindness, too.
COLOURS = ("#332288", "#88ccee", "#44aa99", "#117733", "#aa4499", "#222222")
# The relative error that the dashed lines mark.
ERROR_BAND = 0.25

# A chain and its number of chunks.
Key: TypeAlias = tuple[str, int]


def key_of(row: Row) -> Key:
    """What ran."""
    return row.chain, row.num_chunks


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One point: candidates timed side by side, forward and backward, for the exchange alone.

    Attributes:
        rows: stock's and ours.
        meta: of the report.
    """

    rows: Sequence[Row]
    meta: Mapping[str, Any]

    @property
    def ours(self) -> list[Row]:
        """The rows of our chains."""
        return [row for row in self.rows if row.dispatcher == "monta"]

    @property
    def stock(self) -> Row:
        """Megatron's alltoall."""
        return next(row for row in self.rows if row.dispatcher == "megatron")

    @property
    def auto(self) -> Row | None:
        """The row of `auto`, if it ran."""
        return next((row for row in self.ours if row.chosen), None)

    @property
    def times_ms(self) -> dict[Key, float]:
        """Measured times of our chains; the mean where `auto` ran one of them once more."""
        keys = [key_of(row) for row in self.ours]
        return {key: mean(row.median_ms for row in self.ours if key_of(row) == key) for key in keys}

    @property
    def fastest(self) -> Key:
        """The fastest of our chains."""
        return min(self.times_ms, key=self.times_ms.__getitem__)

    @property
    def regret(self) -> float | None:
        """Time of auto's pick over the fastest chain's; None without `auto` or an alternative."""
        if self.auto is None or len(self.times_ms) == 1:
            return None
        return self.times_ms[key_of(self.auto)] / self.times_ms[self.fastest]

    @property
    def errors(self) -> dict[Key, float]:
        """Predicted over measured, minus 1; nothing without a cluster file."""
        return {
            key_of(row): row.predicted_ms / self.times_ms[key_of(row)] - 1
            for row in self.ours
            if row.predicted_ms is not None
        }


# What makes one point differ from another.
FACTORS: Mapping[str, Callable[[Measured], str]] = {
    "ranks by node": lambda point: ", ".join(map(str, point.meta["nodes"])),
    "TP, EP, ETP": lambda point: f"{point.stock.tp}, {point.stock.ep}, {point.stock.etp}",
    "Mbit/s": lambda point: "-" if (rate := point.stock.inter_mbit) is None else f"{rate:g}",
    "experts": lambda point: str(point.meta["settings"]["experts"]),
    "top-k": lambda point: str(point.stock.top_k),
    "routing": lambda point: point.stock.routing,
    "tokens": lambda point: f"{point.stock.tokens:,}",
    "H": lambda point: f"{point.meta['settings']['hidden']:,}",
    "dtype": lambda point: str(point.meta["settings"]["dtype"]),
    "rate over calibrated": lambda point: (
        f"{point.meta['inter_rate_ratio']:.3g}" if point.meta["settings"]["cluster"] else "-"
    ),
}


def measured_points(reports: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """The points of reports that timed chains forward and backward; none of a study."""
    points = []
    for report in reports:
        rows = [Row(**fields) for fields in report["rows"]]
        rows = [row for row in rows if (row.scope, row.phase) == ("exchange", PHASE)]
        if rows and "study" not in report:
            points.append(Measured(rows=rows, meta=report["meta"]))
    return points


def summarise(points: Sequence[Measured]) -> dict[str, Any]:
    """The figures below the tables; None for those that no point has."""
    errors = [abs(error) for point in points for error in point.errors.values()]
    regrets = [point.regret for point in points if point.regret is not None]
    autos = [point.auto for point in points if point.auto is not None]
    plain = [row.ratio_to_alltoall for row in autos if row.chain == "alltoall"]
    return {
        "regret_points": len(regrets),
        "regret_median": median(regrets) if regrets else None,
        "regret_worst": max(regrets, default=None),
        "predictions": len(errors),
        "error_median": median(errors) if errors else None,
        "error_largest": max(errors, default=None),
        "auto_points": len(autos),
        "auto_lost": sum(row.ratio_to_alltoall < LOSS_BELOW for row in autos),
        "auto_alltoall_points": len(plain),
        "auto_alltoall_ratio_median": median(plain) if plain else None,
    }


def summary_text(reports: Sequence[Mapping[str, Any]]) -> str:
    """The whole summary in Markdown."""
    points = measured_points(reports)
    lines = [_where(reports), ""]
    if not points:
        return "\n".join([*lines, f"Nothing was timed {PHASE.replace('_', ' + ')}."])
    same = {name: values[0] for name, values in _factors(points).items() if len(set(values)) == 1}
    shared = "; ".join(f"{name} {value}" for name, value in same.items() if value != "-")
    lines += [f"All points, forward + backward: {shared}."]
    figures = summarise(points)
    if figures["auto_points"]:
        lines += ["", "## auto against stock alltoall", "", *_table(points, _auto_cells), ""]
        lines += [
            f"Of {counted(figures['auto_points'], 'point')}, {figures['auto_lost']} have a ratio "
            f"under {LOSS_BELOW}."
        ]
    if figures["auto_alltoall_points"]:
        lines += [
            f"Where auto chose alltoall ({figures['auto_alltoall_points']}), the median ratio is "
            f"{figures['auto_alltoall_ratio_median']:.3f}."
        ]
    if figures["regret_points"]:
        lines += [
            f"Regret over {counted(figures['regret_points'], 'point')}: median "
            f"{figures['regret_median']:.3f}, worst {figures['regret_worst']:.3f}."
        ]
    if figures["predictions"]:
        lines += ["", "## Errors of the predictions", ""]
        lines += ["Predicted over measured, by number of chunks.", ""]
        lines += [*_table(points, _error_cells), ""]
        lines += [
            f"Over {figures['predictions']} predictions, without sign: median "
            f"{figures['error_median']:.0%}, largest {figures['error_largest']:.0%}."
        ]
    return "\n".join(lines)


def _where(reports: Sequence[Mapping[str, Any]]) -> str:
    """Machine, versions and commits."""
    meta = reports[0]["meta"]
    versions, machine = meta["versions"], meta["machine"]
    device = machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"
    commits = sorted({str(report["meta"]["commit"]) for report in reports})
    return (
        f"{device}; torch {versions['torch']}, megatron-core {versions['megatron-core']}, "
        f"commit {', '.join(commits)}."
    )


def _auto_cells(point: Measured) -> dict[str, str]:
    auto, regret = point.auto, point.regret
    if auto is None:
        return {}
    fastest = "-" if regret is None else "{} x{}".format(*point.fastest)
    return {
        "auto": f"{auto.chain} x{auto.num_chunks}",
        "stock ms": f"{point.stock.median_ms:.1f}",
        "auto ms": f"{auto.median_ms:.1f}",
        "times faster": f"{auto.ratio_to_alltoall:.2f}",
        "spread": auto.spread,
        "fastest measured": fastest,
        "regret": "-" if regret is None else f"{regret:.3f}",
        "repeats": str(point.meta["settings"]["repeats"]),
    }


def _error_cells(point: Measured) -> dict[str, str]:
    by_chain = {
        chain: [f"{error:+.0%}" for key, error in sorted(point.errors.items()) if key[0] == chain]
        for chain in CHAINS
    }
    return {chain: " / ".join(errors) or "-" for chain, errors in by_chain.items()}


def _factors(points: Sequence[Measured]) -> dict[str, list[str]]:
    return {name: [value_of(point) for point in points] for name, value_of in FACTORS.items()}


def _table(points: Sequence[Measured], cells_of: Callable[[Measured], dict[str, str]]) -> list[str]:
    """A row for each point that has cells, after the factors in which the points differ."""
    varying = {name: values for name, values in _factors(points).items() if len(set(values)) > 1}
    rows = [
        {name: values[position] for name, values in varying.items()} | cells
        for position, cells in enumerate(map(cells_of, points))
        if cells
    ]
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def plot_predicted(points: Sequence[Measured], path: Path) -> None:
    """Draw predicted against measured times, a dot per chain, number of chunks and point."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    with pictures.figure(path, (7.5, 5)) as figure:
        axis = figure.subplots()
        for chain, colour in zip(CHAINS, COLOURS, strict=True):
            times = [
                (point.times_ms[key], point.times_ms[key] * (1 + error))
                for point in points
                for key, error in point.errors.items()
                if key[0] == chain
            ]
            if times:
                style = {"markersize": 7, "alpha": 0.7, "color": colour, "label": chain}
                axis.plot(*zip(*times, strict=True), ".", **style)
        # Straight on logarithmic axes too; from a measured time on, as what they go through is
        # shown.
        ms = points[0].ours[0].median_ms
        for error, dashes in ((0, "-"), (-ERROR_BAND, "--"), (ERROR_BAND, "--")):
            ends = [(x, x * (1 + error)) for x in (ms, 1.1 * ms)]
            label = f"{error:.0%} off" if error > 0 else None
            axis.axline(*ends, linestyle=dashes, color="#404040", linewidth=0.8, label=label)
        axis.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms")
        # Labelled at 0.5, 1, 2, 5, 10, ..., as a table shows figures.
        for line in (axis.xaxis, axis.yaxis):
            line.set_major_locator(LogLocator(subs=(1, 2, 5)))
            line.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
            line.set_minor_formatter("")
        axis.set_title(f"Predicted against measured, {counted(len(points), 'point')}")
        axis.grid()
        axis.legend()
