"""Report of a benchmark: rows, their tables, and where it was measured. No torch."""

import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from monta_megatron.common import tables
from monta_megatron.common.presets import commit, machine, versions
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.integration.options import AUTO
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.bench.traffic import routing_name

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
        picked_untuned, picked_observed: where `auto` was tuned, whether the planner picks it among
            the others before any traffic was seen, and for the traffic that was observed.
        experts_pipelined: whether the experts run in the pipeline; None where none are computed.
        expert_ms: what a timer took instead of the experts, or None; see `timed_experts`.
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
    picked_untuned: bool = False
    picked_observed: bool = False
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
    routing = f"routing: {report['meta']['layer']['routing']}"
    blocks = [table(rows), routing, "\n".join(left_out), prediction_table(rows)]
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
            "routing": routing_name(settings),
        },
        # The rate that was set, and the measured rates of network and node.
        "emulated_cluster": None if emulated is None else asdict(emulated),
        "seed": settings.seed,
        "repeats": settings.repeats,
        "warmup": settings.warmup,
        "skipped": skipped,
    }
