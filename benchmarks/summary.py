"""Figures over many points: regret, prediction errors, `auto` against stock; tables and pictures.

Regret is the median time of a pick over that of the fastest chain, timed side by side. No torch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeAlias

from monta_megatron.chains import CHAINS
from monta_megatron.common.flags import DTYPE_BYTES
from monta_megatron.common.units import counted
from monta_megatron.tools import pictures
from monta_megatron.tools.bench.report import Row

# The phase that the planner optimises.
PHASE = "forward_backward"
# A smaller ratio to stock is a loss, not noise.
LOSS_BELOW = 0.97

STOCK_STYLE = {"color": pictures.STOCK_COLOUR, "linewidth": 2.0, "marker": "s"}
AUTO_STYLE = {"color": "#e07b39", "linewidth": 2.5, "marker": "o"}
# Distinguishable for people with red-green colour blindness, too.
COLOURS = ("#332288", "#88ccee", "#44aa99", "#117733", "#aa4499", "#222222")
# The relative error that the dashed lines mark.
ERROR_BAND = 0.25

# A chain and its number of chunks.
Key: TypeAlias = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One point: candidates timed side by side, forward and backward, for the exchange alone.

    Attributes:
        rows: stock's and ours.
        settings: of the benchmark.
        nodes: node of every rank of the launch.
        inter_rate_ratio: factor by which the cluster file's rate was scaled; None without a file.
    """

    rows: tuple[Row, ...]
    settings: Mapping[str, Any]
    nodes: Sequence[int]
    inter_rate_ratio: float | None

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
        """Our measured times, by chain and number of chunks."""
        times_ms: dict[Key, list[float]] = {}
        for row in self.ours:
            times_ms.setdefault((row.chain, row.num_chunks), []).append(row.median_ms)
        return {key: mean(of_key) for key, of_key in times_ms.items()}

    @property
    def pick(self) -> Key | None:
        """The choice of `auto`; None where it did not run, or had one chain alone."""
        if self.auto is None or len(self.times_ms) == 1:
            return None
        return self.auto.chain, self.auto.num_chunks

    @property
    def fastest(self) -> Key:
        """The fastest of our chains."""
        return min(self.times_ms, key=self.times_ms.__getitem__)

    @property
    def regret(self) -> float | None:
        """The pick's time over the fastest chain's; None without a pick."""
        return self.pick and self.times_ms[self.pick] / self.times_ms[self.fastest]

    def predicted_ms(self, key: Key) -> float | None:
        """The time that the planner predicts; None without a cluster file."""
        return next(row.predicted_ms for row in self.ours if (row.chain, row.num_chunks) == key)

    def errors(self, chain: str) -> list[float]:
        """Predicted over measured, minus 1, for each number of chunks of a chain."""
        return [
            predicted_ms / ms - 1
            for key, ms in sorted(self.times_ms.items())
            for predicted_ms in [self.predicted_ms(key)]
            if key[0] == chain and predicted_ms is not None
        ]


# What makes one point differ from another.
FACTORS: Mapping[str, Callable[[Measured], str]] = {
    "ranks by node": lambda point: ", ".join(map(str, point.nodes)),
    "TP, EP, ETP": lambda point: f"{point.stock.tp}, {point.stock.ep}, {point.stock.etp}",
    "Mbit/s": lambda point: or_dash(point.stock.inter_mbit, "g"),
    "experts": lambda point: str(point.settings["experts"]),
    "top-k": lambda point: str(point.stock.top_k),
    "routing": lambda point: point.stock.routing,
    "tokens": lambda point: f"{point.stock.tokens:,}",
    "H": lambda point: f"{point.settings['hidden']:,}",
    "dtype": lambda point: str(point.settings["dtype"]),
    "rate over calibrated": lambda point: or_dash(point.inter_rate_ratio, ".3g"),
}


def measured_points(reports: Sequence[dict[str, Any]]) -> list[Measured]:
    """The points of reports that timed chains forward and backward; none of a study."""
    points = []
    for report in reports:
        rows = tuple(
            row
            for row in (Row(**fields) for fields in report["rows"])
            if (row.scope, row.phase) == ("exchange", PHASE)
        )
        meta = report["meta"]
        if rows and "study" not in report:
            points.append(
                Measured(
                    rows=rows,
                    settings=meta["settings"],
                    nodes=meta["nodes"],
                    inter_rate_ratio=(
                        meta["inter_rate_ratio"] if meta["settings"]["cluster"] else None
                    ),
                )
            )
    return points


def summarise(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures below the tables; None for those that no point has."""
    points = measured_points(reports)
    errors = [abs(error) for point in points for chain in CHAINS for error in point.errors(chain)]
    regrets = [point.regret for point in points if point.regret is not None]
    autos = [point.auto for point in points if point.auto is not None]
    plain = [row.ratio_to_alltoall for row in autos if row.chain == "alltoall"]
    return {
        "points": len(points),
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


def or_dash(value: float | None, form: str) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def summary_lines(reports: Sequence[dict[str, Any]]) -> list[str]:
    """The whole summary in Markdown."""
    points = measured_points(reports)
    lines = [_where(reports)]
    if not points:
        return [*lines, "", f"Nothing was timed {PHASE.replace('_', ' + ')}."]
    same = {name: values for name, values in _factors(points).items() if len(set(values)) == 1}
    shared = "; ".join(f"{name} {values[0]}" for name, values in same.items() if values[0] != "-")
    lines += ["", f"All points, forward + backward: {shared}."]
    figures = summarise(reports)
    if figures["regret_points"]:
        lines += ["", "## Regret", "", *_regret_table(points, figures)]
    if figures["predictions"]:
        lines += ["", "## Errors of the predictions", "", *_error_table(points, figures)]
    if figures["auto_points"]:
        lines += ["", "## auto against stock alltoall", "", *_stock_table(points, figures)]
    return lines


def _where(reports: Sequence[dict[str, Any]]) -> str:
    """Machine, versions and commits."""
    meta = reports[0]["meta"]
    versions, machine = meta["versions"], meta["machine"]
    device = machine["gpu"] or f"{machine['processor']}, {machine['cores']} cores"
    commits = sorted({_short(report["meta"]["commit"]) for report in reports})
    return (
        f"{device}; torch {versions['torch']}, megatron-core {versions['megatron-core']}, "
        f"commit {', '.join(commits)}."
    )


def _short(commit: str | None) -> str:
    """The first 12 digits of a commit, and whether the source was changed."""
    digits, *dirty = (commit or "not known").split("-")
    return "-".join([digits[:12], *dirty])


def _regret_table(points: Sequence[Measured], figures: Mapping[str, Any]) -> list[str]:
    def cells(point: Measured) -> list[str] | None:
        if point.pick is None or point.regret is None:
            return None
        pick_ms, predicted_ms = point.times_ms[point.pick], point.predicted_ms(point.pick)
        return [
            _name(point.pick),
            or_dash(predicted_ms, ".1f"),
            f"{pick_ms:.1f}",
            "-" if predicted_ms is None else f"{predicted_ms / pick_ms - 1:+.0%}",
            _name(point.fastest),
            f"{point.times_ms[point.fastest]:.1f}",
            f"{point.regret:.3f}",
        ]

    head = ["pick", "predicted ms", "ms", "error", "fastest measured", "ms", "regret"]
    return [
        *_markdown(points, head, cells),
        "",
        f"Regret over {counted(figures['regret_points'], 'point')}: median "
        f"{figures['regret_median']:.3f}, worst {figures['regret_worst']:.3f}.",
    ]


def _error_table(points: Sequence[Measured], figures: Mapping[str, Any]) -> list[str]:
    chains = [chain for chain in CHAINS if any(point.errors(chain) for point in points)]

    def cells(point: Measured) -> list[str]:
        errors = (point.errors(chain) for chain in chains)
        return [" / ".join(f"{error:+.0%}" for error in of_chain) or "-" for of_chain in errors]

    return [
        "Predicted over measured, by number of chunks.",
        "",
        *_markdown(points, chains, cells),
        "",
        f"Over {figures['predictions']} predictions, without sign: median "
        f"{figures['error_median']:.0%}, largest {figures['error_largest']:.0%}.",
    ]


def _stock_table(points: Sequence[Measured], figures: Mapping[str, Any]) -> list[str]:
    def cells(point: Measured) -> list[str] | None:
        auto = point.auto
        if auto is None:
            return None
        return [
            f"{auto.chain} x{auto.num_chunks}",
            f"{point.stock.median_ms:.1f}",
            f"{auto.median_ms:.1f}",
            f"{auto.ratio_to_alltoall:.2f}"
            + (" (slower)" if auto.ratio_to_alltoall < LOSS_BELOW else ""),
            f"{auto.p10_ms:.1f} to {auto.p90_ms:.1f}",
            str(point.settings["repeats"]),
        ]

    ending = (
        f"Of {counted(figures['auto_points'], 'point')}, {figures['auto_lost']} have a ratio "
        f"under {LOSS_BELOW}."
    )
    if figures["auto_alltoall_points"]:
        ending += (
            f" Where auto chose alltoall ({figures['auto_alltoall_points']}), the median ratio is "
            f"{figures['auto_alltoall_ratio_median']:.3f}."
        )
    head = ["auto", "stock ms", "auto ms", "times faster", "p10 to p90", "repeats"]
    return [*_markdown(points, head, cells), "", ending]


def _factors(points: Sequence[Measured]) -> dict[str, list[str]]:
    return {name: [value_of(point) for point in points] for name, value_of in FACTORS.items()}


def _markdown(
    points: Sequence[Measured],
    head: Sequence[str],
    cells_of: Callable[[Measured], Sequence[str] | None],
) -> list[str]:
    """A row for each point that has cells, after the factors in which the points differ."""
    varying = {name: values for name, values in _factors(points).items() if len(set(values)) > 1}
    rows = [
        [*(values[position] for values in varying.values()), *cells]
        for position, cells in enumerate(map(cells_of, points))
        if cells is not None
    ]
    head = [*varying, *head]
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


def _name(key: Key) -> str:
    chain, num_chunks = key
    return f"{chain} x{num_chunks}"


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
    settings = point.settings
    size: int = settings["tokens"] * settings["hidden"] * DTYPE_BYTES[settings["dtype"]]
    return size


def _draw(path: Path, draw: Callable[[Any, Sequence[Measured]], None], points: Any) -> Path:
    with pictures.figure(path, (7.5, 5)) as figure:
        axis = figure.subplots()
        draw(axis, points)
        _log_ticks(axis)
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

    for chain, colour in zip(CHAINS, COLOURS, strict=True):
        rows = [
            min(
                (row for row in point.ours if row.chain == chain and not row.chosen),
                key=lambda row: row.median_ms,
                default=None,
            )
            for point in points
        ]
        line(chain, rows, color=colour, linewidth=1.2, marker=".")
    line("megatron alltoall", [point.stock for point in points], **STOCK_STYLE)
    line("auto", [point.auto for point in points], **AUTO_STYLE)
    first = points[0].stock
    where = "" if first.inter_mbit is None else f", {first.inter_mbit:g} Mbit/s between nodes"
    axis.set_title(
        f"TP {first.tp}, EP {first.ep}, ETP {first.etp}, {points[0].settings['experts']} experts, "
        f"top-{first.top_k}, {first.routing} routing{where}"
    )
    axis.set_xlabel("hidden rows that a rank brings, MB")
    axis.set_ylabel("dispatch + combine, forward + backward, ms")


def _predicted(axis: Any, points: Sequence[Measured]) -> None:
    """A dot per chain, number of chunks and point."""
    for chain, colour in zip(CHAINS, COLOURS, strict=True):
        times = [
            (row.median_ms, row.predicted_ms)
            for point in points
            for row in point.ours
            if row.chain == chain and not row.chosen and row.predicted_ms is not None
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


def _log_ticks(axis: Any) -> None:
    """Make both scales logarithmic, labelled at 0.5, 1, 2, 5, 10, ..., as a table shows figures."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    axis.set(xscale="log", yscale="log")
    for line in (axis.xaxis, axis.yaxis):
        line.set_major_locator(LogLocator(subs=(1, 2, 5)))
        line.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
        line.set_minor_formatter("")
