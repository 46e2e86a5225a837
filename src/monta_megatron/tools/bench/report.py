"""Report of a benchmark: rows and their tables. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from monta_megatron.common.files import versions_text
from monta_megatron.common.text import table

# With fewer runs a percentile is hardly more than the shortest or the longest of them.
MIN_FOR_PERCENTILES = 10


class MismatchError(Exception):
    """A candidate differs from stock alltoall; one line for each difference."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate in one phase; the field names of `monta bench --json`.

    Attributes:
        dispatcher: "megatron" or "monta".
        chain: our chain, or the name of stock's dispatcher.
        num_chunks: number of chunks; 1 for stock.
        scope: "exchange", or "layer" with the experts computed.
        phase: "forward" (dispatch and combine) or "forward_backward".
        tokens, top_k, routing, tp, ep, etp: settings of the benchmark; tokens are per rank.
        inter_mbit: rate that the emulated interfaces were set to, or None.
        median_ms, min_ms, max_ms: statistics of single runs, timed by their slowest ranks.
        p10_ms, p90_ms: percentiles of the runs; None for fewer than `MIN_FOR_PERCENTILES` runs.
        inter_bytes, intra_bytes: payload that changes node, or rank inside a node, summed over
            ranks, in this phase.
        pct_of_limit: shortest possible time for the rows that must change node, in percent of the
            median; None on one node, or without an emulated or a given cluster.
        ratio_to_alltoall: speedup over stock alltoall: its median over this one.
        predicted_ms: time that the planner predicts for uniform routing, or None.
        chosen: whether this is what `auto` ran.
    """

    dispatcher: str
    chain: str
    num_chunks: int
    scope: str
    phase: str
    tokens: int
    top_k: int
    routing: str
    tp: int
    ep: int
    etp: int
    inter_mbit: float | None
    median_ms: float
    min_ms: float
    max_ms: float
    p10_ms: float | None
    p90_ms: float | None
    inter_bytes: int
    intra_bytes: int
    pct_of_limit: float | None
    ratio_to_alltoall: float
    predicted_ms: float | None = None
    chosen: bool = False

    @property
    def spread(self) -> str:
        """From the 10th to the 90th percentile, or of all runs where there are too few for that."""
        if self.p10_ms is None or self.p90_ms is None:
            return f"{_short(self.min_ms)} to {_short(self.max_ms)}"
        return f"{_short(self.p10_ms)} to {_short(self.p90_ms)}"

    @property
    def name(self) -> str:
        """The name used in tables."""
        stock = self.dispatcher == "megatron"
        name = f"megatron {self.chain}" if stock else f"{self.chain} x{self.num_chunks}"
        return "auto: " * self.chosen + name


@dataclass(frozen=True, kw_only=True)
class Report:
    """The JSON document of a benchmark.

    Attributes:
        meta: provenance: what identifies the measurement and lets it be repeated.
        rows: one row per candidate, phase by phase.
    """

    meta: Mapping[str, Any]
    rows: Sequence[Row]

    def document(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"meta": self.meta, "rows": [asdict(row) for row in self.rows]}

    def text(self) -> str:
        """A table for each scope and phase."""
        cells: dict[tuple[str, str], list[dict[str, str | None]]] = {}
        for row in self.rows:
            cells.setdefault((row.scope, row.phase), []).append(_cells(row))
        tables = [
            table(
                list(rows[0]),
                [list(row.values()) for row in rows],
                title=f"{scope}, {phase.replace('_', ' + ')} (ms; payload in MB)",
            )
            for (scope, phase), rows in cells.items()
        ]
        notes = list(self.meta["busy"])
        if not self.meta["fused_permutation"]:
            notes.append("stock ran without fused permutation: no Transformer Engine is installed")
        notes += [f"left out: {name}: {why}" for name, why in self.meta["skipped"].items()]
        if any(row.routing != "uniform" and row.predicted_ms is not None for row in self.rows):
            notes.append("predicted: for uniform routing, which this is not")
        return "\n\n".join([*tables, "\n".join([*notes, versions_text(self.meta["versions"])])])


def _cells(row: Row) -> dict[str, str | None]:
    """The cells of a row by heading."""
    return {
        "chain x chunks": row.name,
        ">ms": _short(row.median_ms),
        ">min to max" if row.p10_ms is None else ">p10 to p90": row.spread,
        ">inter": _short(row.inter_bytes / 1e6),
        ">intra": _short(row.intra_bytes / 1e6),
        ">limit": None if row.pct_of_limit is None else f"{row.pct_of_limit:.0f}%",
        ">ratio": f"{row.ratio_to_alltoall:.2f}",
        ">predicted": None if row.predicted_ms is None else _short(row.predicted_ms),
    }


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
