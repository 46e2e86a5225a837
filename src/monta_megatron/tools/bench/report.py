"""Report of a benchmark: statistics, rows, tables, pictures, where it was measured. No torch."""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.common import tables
from monta_megatron.common.presets import commit, machine, versions
from monta_megatron.common.units import counted
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.integration.options import AUTO
from monta_megatron.tools import pictures
from monta_megatron.tools.bench.settings import Settings

NUM_RESAMPLES = 2000


def spread(times_ms: NDArray[np.float64]) -> tuple[float, float, float]:
    """The middle 80% of [repeats] times: 10th percentile, median, 90th percentile."""
    p10_ms, median_ms, p90_ms = np.percentile(times_ms, [10, 50, 90]).tolist()
    return p10_ms, median_ms, p90_ms


def ratio_of_medians(base_ms: NDArray[np.float64], times_ms: NDArray[np.float64]) -> float:
    """Speedup of `times_ms` over `base_ms`."""
    return float(np.median(base_ms) / np.median(times_ms))


def ratio_interval(
    base_ms: NDArray[np.float64], times_ms: NDArray[np.float64]
) -> tuple[float, float]:
    """95% interval of `ratio_of_medians`, by bootstrap over the repeats.

    A repeat runs every candidate once, so its times share the machine's state at that moment and
    are drawn together.

    Args:
        base_ms: [repeats].
        times_ms: [repeats], from the same repeats.
    """
    num_repeats = len(times_ms)
    draws = np.random.default_rng(0).integers(num_repeats, size=(NUM_RESAMPLES, num_repeats))
    ratios = np.median(base_ms[draws], axis=1) / np.median(times_ms[draws], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5]).tolist()
    return low, high


COLUMNS = ("chain x chunks", ">ms", ">p10 to p90", ">inter", ">intra", ">limit", ">ratio")
PREDICTION_COLUMNS = ("predicted from the cluster file", "", ">ms", ">measured", ">error")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate in one phase; the field names of `monta bench --json`.

    Attributes:
        dispatcher: "megatron" or "monta".
        chain: our chain, or the name of stock's dispatcher.
        num_chunks: 1 for stock.
        requested: the chain as asked for: "auto" where the planner chose.
        scope: "exchange", or "layer" with the experts computed.
        phase: "forward" (dispatch and combine) or "forward_backward".
        tokens, top_k, routing, experts, hidden, dtype, tp, ep, etp: what was measured.
        inter_mbit: rate that the emulated interfaces were set to, or None.
        median_ms, p10_ms, p90_ms: median and percentiles of the slowest rank's times.
        inter_bytes, intra_bytes: payload that changes node, or rank inside a node, summed over
            ranks, in this phase.
        nic_bytes: what the interfaces between nodes sent, by the kernel's counters, or None.
        pct_of_limit: the least time in which the rows that must cross can cross, in percent of the
            median; None on one node, or where the rate is not known.
        ratio_to_alltoall: stock alltoall's median over this one.
        ratio_low, ratio_high: 95% interval of that ratio.
        step: step of the ablation, or None.
        predicted_ms: the time that the planner predicts, or None.
        chosen: whether it is the pick: what `auto` ran or, without it, what the planner picks.
        experts_pipelined: whether the experts run in the pipeline; None where none are computed.
        expert_ms: what a timer took instead of the experts, or None; see `layer.TimedExperts`.
        repeats_ms: the slowest rank's time in each repeat, in order.
    """

    dispatcher: str
    chain: str
    num_chunks: int
    requested: str
    scope: str
    phase: str
    tokens: int
    top_k: int
    routing: str
    experts: int
    hidden: int
    dtype: str
    tp: int
    ep: int
    etp: int
    inter_mbit: float | None
    median_ms: float
    p10_ms: float
    p90_ms: float
    inter_bytes: int
    intra_bytes: int
    nic_bytes: int | None
    pct_of_limit: float | None
    ratio_to_alltoall: float
    ratio_low: float
    ratio_high: float
    step: int | None = None
    predicted_ms: float | None = None
    chosen: bool = False
    experts_pipelined: bool | None = None
    expert_ms: float | None = None
    repeats_ms: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The name used in tables."""
        stock = self.dispatcher == "megatron"
        name = f"megatron {self.chain}" if stock else f"{self.chain} x{self.num_chunks}"
        name += " with experts" * bool(self.experts_pipelined)
        if self.requested == AUTO:
            return f"{AUTO} {name}"
        step = "" if self.step is None else f", step {self.step}"
        return f"{name}{step}{' *' if self.chosen else ''}"


def table(rows: Sequence[Row]) -> str:
    """One block per scope and phase."""
    return "\n\n".join(
        tables.table(
            COLUMNS,
            [cells(row) for row in rows if (row.scope, row.phase) == (scope, phase)],
            title=f"{scope}, {phase.replace('_', ' + ')} (payload in MB)",
        )
        for scope, phase in dict.fromkeys((row.scope, row.phase) for row in rows)
    )


def cells(row: Row) -> list[str | None]:
    """The row under `COLUMNS`."""
    return [
        row.name,
        _short(row.median_ms),
        f"{_short(row.p10_ms)} to {_short(row.p90_ms)}",
        _short(row.inter_bytes / 1e6),
        _short(row.intra_bytes / 1e6),
        None if row.pct_of_limit is None else f"{row.pct_of_limit:.0f}%",
        f"{row.ratio_to_alltoall:.2f}",
    ]


def prediction_table(rows: Sequence[Row]) -> str:
    """Predicted against measured, where there is a prediction; "" where there is none."""
    predicted = prediction_rows(rows)
    return tables.table(PREDICTION_COLUMNS, predicted) if predicted else ""


def prediction_rows(rows: Sequence[Row]) -> list[list[str]]:
    """The rows that have a prediction, under `PREDICTION_COLUMNS`."""
    return [
        [
            row.name,
            row.phase.replace("_", " + "),
            _short(row.predicted_ms),
            _short(row.median_ms),
            f"{row.predicted_ms / row.median_ms - 1:+.0%}",
        ]
        for row in rows
        if row.predicted_ms is not None
    ]


def report_text(report: dict[str, Any]) -> str:
    """Tables of a report."""
    rows = [Row(**row) for row in report["rows"]]
    left_out = (f"left out: {name}: {why}" for name, why in report["meta"]["skipped"].items())
    data = f"routing: {report['meta']['layer']['routing']}"
    blocks = [table(rows), data, "\n".join(left_out), prediction_table(rows)]
    return "\n\n".join(filter(None, blocks))


def print_report(report: dict[str, Any], as_json: bool) -> None:
    """Print tables; with JSON on standard output, on standard error."""
    print(report_text(report), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        tables.print_json(report)


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def describe(
    settings: Settings,
    nodes: Sequence[int],
    emulated: EmulatedCluster | None,
    skipped: dict[str, str],
    gpu: str | None,
) -> dict[str, Any]:
    """The `meta` of a report: enough to know the measurement, and to run it again."""
    return {
        "versions": versions(),
        "machine": {**machine(), "gpu": gpu},
        "command": shlex.join(["monta", *sys.argv[1:]]),
        "commit": commit(),
        "layout": {
            "world_size": settings.world_size,
            "nodes": len(set(nodes)),
            "ranks_per_node": max(Counter(nodes).values()),
            "tp": settings.tp,
            "ep": settings.ep,
            "etp": settings.etp,
        },
        "layer": {
            "experts": settings.num_experts,
            "top_k": settings.topk,
            "hidden": settings.hidden,
            "ffn_hidden": settings.ffn_hidden,
            "tokens": settings.tokens,
            "dtype": settings.dtype,
            "routing": settings.routing,
        },
        # The rate that was set, and the measured rates of network and node.
        "emulated_cluster": None if emulated is None else asdict(emulated),
        "seed": settings.seed,
        "repeats": settings.repeats,
        "warmup": settings.warmup,
        "skipped": skipped,
    }


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
