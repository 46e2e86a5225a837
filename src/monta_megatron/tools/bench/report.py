"""Report of a benchmark: rows and their tables. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from monta_megatron.common.text import table


class MismatchError(Exception):
    """A candidate differs from stock alltoall; one line for each difference."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One candidate in one phase; the field names of `monta bench --json`.

    Attributes:
        dispatcher: "megatron" or "monta".
        chain: our chain, or the name of stock's dispatcher.
        num_chunks: 1 for stock.
        scope: "exchange", or "layer" with the experts computed.
        phase: "forward" (dispatch and combine) or "forward_backward".
        tokens, top_k, routing, tp, ep, etp: of the benchmark; tokens of a rank.
        inter_mbit: rate that the emulated interfaces were set to, or None.
        median_ms, p10_ms, p90_ms: median and percentiles of the slowest rank's times.
        inter_bytes, intra_bytes: payload that changes node, or rank inside a node, summed over
            ranks, in this phase.
        pct_of_limit: the least time in which the rows that must cross can cross, in percent of the
            median; None on one node, or without an emulated or a given cluster.
        ratio_to_alltoall: stock alltoall's median over this one.
        predicted_ms: the time that the planner predicts, for uniform routing, or None.
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
    p10_ms: float
    p90_ms: float
    inter_bytes: int
    intra_bytes: int
    pct_of_limit: float | None
    ratio_to_alltoall: float
    predicted_ms: float | None = None
    chosen: bool = False

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
        meta: enough to know the measurement, and to run it again.
        rows: the candidates, phase by phase.
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
        notes += [f"left out: {name}: {why}" for name, why in self.meta["skipped"].items()]
        if any(row.routing != "uniform" and row.predicted_ms is not None for row in self.rows):
            notes.append("predicted: for uniform routing, which this is not")
        return "\n\n".join([*tables, *notes])


def _cells(row: Row) -> dict[str, str | None]:
    """The cells of a row by heading."""
    return {
        "chain x chunks": row.name,
        ">ms": _short(row.median_ms),
        ">p10 to p90": f"{_short(row.p10_ms)} to {_short(row.p90_ms)}",
        ">inter": _short(row.inter_bytes / 1e6),
        ">intra": _short(row.intra_bytes / 1e6),
        ">limit": None if row.pct_of_limit is None else f"{row.pct_of_limit:.0f}%",
        ">ratio": f"{row.ratio_to_alltoall:.2f}",
        ">predicted": None if row.predicted_ms is None else _short(row.predicted_ms),
    }


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
