"""Figures over many points: regret, errors of predictions, auto against stock. No torch.

Regret is the time of the planner's pick over that of the fastest chain measured in the same
interleaved run: 1 where the pick is the fastest. The pick is what `auto` ran or, where `auto` did
not run, what the planner picks among the chains that did. A chain that ran twice, by name and as
`auto`, counts with the mean of both.

In plain Python: pandas would replace a few medians and means, and is a heavy dependency for that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, TypeAlias

from monta_megatron.chains import CHAINS
from monta_megatron.integration.options import AUTO
from monta_megatron.tools.bench.report import Row

# A chain and its number of chunks.
Key: TypeAlias = tuple[str, int]

# The phase that the planner optimises.
PHASE = "forward_backward"
# Where the whole interval of a ratio to stock lies below this, it is a loss, not noise.
LOSS_BELOW = 0.97


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One point: what was timed side by side, forward and backward, for the exchange alone.

    Attributes:
        rows: stock's and ours.
        num_nodes: nodes of the launch.
        ranks_per_node: ranks on each.
        inter_rate_ratio: factor by which the cluster file's rate was scaled; None without a file.
        repeats: timed runs of each.
    """

    rows: tuple[Row, ...]
    num_nodes: int
    ranks_per_node: int
    inter_rate_ratio: float | None
    repeats: int

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
        return next((row for row in self.ours if row.requested == AUTO), None)

    @property
    def times_ms(self) -> dict[Key, float]:
        """Our measured times, by chain and number of chunks."""
        rows: dict[Key, list[float]] = {}
        for row in self.ours:
            rows.setdefault((row.chain, row.num_chunks), []).append(row.median_ms)
        return {key: mean(medians_ms) for key, medians_ms in rows.items()}

    @property
    def pick(self) -> Key | None:
        """The planner's pick; None where it did not run, or had one chain alone."""
        chosen = [(row.chain, row.num_chunks) for row in self.ours if row.chosen]
        return chosen[0] if chosen and len(self.times_ms) > 1 else None

    @property
    def best(self) -> Key:
        """The fastest of our chains and numbers of chunks."""
        return min(self.times_ms, key=self.times_ms.__getitem__)

    @property
    def regret(self) -> float | None:
        """At least 1; None where there is no pick to regret."""
        return None if self.pick is None else self.times_ms[self.pick] / self.times_ms[self.best]

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
    "nodes x ranks": lambda point: f"{point.num_nodes} x {point.ranks_per_node}",
    "TP, EP, ETP": lambda point: f"{point.stock.tp}, {point.stock.ep}, {point.stock.etp}",
    "Mbit/s": lambda point: or_dash(point.stock.inter_mbit, "g"),
    "experts": lambda point: str(point.stock.experts),
    "top-k": lambda point: str(point.stock.top_k),
    "routing": lambda point: point.stock.routing,
    "tokens": lambda point: f"{point.stock.tokens:,}",
    "H": lambda point: f"{point.stock.hidden:,}",
    "dtype": lambda point: point.stock.dtype,
    "rate over calibrated": lambda point: or_dash(point.inter_rate_ratio, ".3g"),
}


def measured_points(reports: Sequence[dict[str, Any]]) -> list[Measured]:
    """The points of reports that timed chains forward and backward; no steps of an ablation."""
    points = []
    for report in reports:
        rows = tuple(
            row
            for row in (Row(**fields) for fields in report["rows"])
            if (row.scope, row.phase, row.step) == ("exchange", PHASE, None)
        )
        settings, layout = report["settings"], report["meta"]["layout"]
        if rows:
            points.append(
                Measured(
                    rows=rows,
                    num_nodes=layout["nodes"],
                    ranks_per_node=layout["ranks_per_node"],
                    inter_rate_ratio=settings["inter_rate_ratio"] if settings["cluster"] else None,
                    repeats=settings["repeats"],
                )
            )
    return points


def summarise(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures below the tables; None for those that no point has."""
    points = measured_points(reports)
    regrets = [point.regret for point in points if point.regret is not None]
    errors = [abs(error) for point in points for chain in CHAINS for error in point.errors(chain)]
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
        "auto_lost": sum(row.ratio_high < LOSS_BELOW for row in autos),
        "auto_alltoall_points": len(plain),
        "auto_alltoall_ratio_median": median(plain) if plain else None,
    }


def or_dash(value: float | None, form: str) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else format(value, form)
