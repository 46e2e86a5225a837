"""Figures over many points: regret, errors of predictions, auto against stock. No torch.

Regret is the time of the pick over that of the best chain measured in the same interleaved run; see
`regret`. The pick is what `auto` ran or, where `auto` did not run, what the planner picks among the
chains that did. A chain that ran twice, by name and as `auto`, counts with the mean of both.

In plain Python: pandas would replace a few medians and means, and is a heavy dependency for that.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS
from monta_megatron.integration.options import AUTO
from monta_megatron.tools.bench.regret import (
    LEAST_REPEATS,
    Key,
    Regret,
    regret_by_medians,
    regret_by_repeats,
)
from monta_megatron.tools.bench.report import Row

# The phase that the planner optimises.
PHASE = "forward_backward"
# Where the whole interval of a ratio to stock lies below this, it is a loss, not noise.
LOSS_BELOW = 0.97
# A regret of more than the first is clear where its whole interval lies above the second.
REGRET_ABOVE, REGRET_SURELY_ABOVE = 1.05, 1.03


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
        return {key: mean(row.median_ms for row in rows) for key, rows in self._rows_by_key.items()}

    @property
    def repeats_ms(self) -> dict[Key, NDArray[np.float64]]:
        """[repeats] of each; empty where they are few or were not kept."""
        times_ms = {
            key: np.mean([row.repeats_ms for row in rows], axis=0)
            for key, rows in self._rows_by_key.items()
        }
        are_enough = all(of_one.size >= LEAST_REPEATS for of_one in times_ms.values())
        return times_ms if are_enough else {}

    @property
    def pick(self) -> Key | None:
        """The pick; None where it did not run, or had one chain alone."""
        return self._only_of_several([row for row in self.ours if row.chosen])

    @property
    def regret(self) -> Regret | None:
        """Of the pick; None where there is none to regret."""
        return self._regret_of(self.pick)

    @property
    def untuned_regret(self) -> Regret | None:
        """Of what the planner picks before it has seen any; None where nothing was tuned."""
        return self._regret_of(
            self._only_of_several([row for row in self.ours if row.picked_untuned])
        )

    @property
    def observed_regret(self) -> Regret | None:
        """Of what it picks for the observed traffic, without what was measured; likewise."""
        return self._regret_of(
            self._only_of_several([row for row in self.ours if row.picked_observed])
        )

    @property
    def _rows_by_key(self) -> dict[Key, list[Row]]:
        rows: dict[Key, list[Row]] = {}
        for row in self.ours:
            rows.setdefault((row.chain, row.num_chunks), []).append(row)
        return rows

    def _only_of_several(self, picked: Sequence[Row]) -> Key | None:
        if not picked or len(self._rows_by_key) == 1:
            return None
        return picked[0].chain, picked[0].num_chunks

    def _regret_of(self, pick: Key | None) -> Regret | None:
        if pick is None:
            return None
        repeats_ms = self.repeats_ms
        if repeats_ms:
            return regret_by_repeats(pick, repeats_ms)
        return regret_by_medians(pick, self.times_ms)

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
    untuned = [point.untuned_regret for point in points if point.untuned_regret is not None]
    observed = [point.observed_regret for point in points if point.observed_regret is not None]
    errors = [abs(error) for point in points for chain in CHAINS for error in point.errors(chain)]
    autos = [point.auto for point in points if point.auto is not None]
    plain = [row.ratio_to_alltoall for row in autos if row.chain == "alltoall"]
    return {
        "points": len(points),
        **_regret_figures("regret", regrets),
        **_regret_figures("untuned_regret", untuned),
        **_regret_figures("observed_regret", observed),
        "predictions": len(errors),
        "error_median": median(errors) if errors else None,
        "error_largest": max(errors, default=None),
        "auto_points": len(autos),
        "auto_lost": sum(row.ratio_high < LOSS_BELOW for row in autos),
        "auto_alltoall_points": len(plain),
        "auto_alltoall_ratio_median": median(plain) if plain else None,
    }


def _regret_figures(name: str, regrets: Sequence[Regret]) -> dict[str, Any]:
    ratios = [regret.ratio for regret in regrets]
    return {
        f"{name}_points": len(ratios),
        f"{name}_median": median(ratios) if ratios else None,
        f"{name}_worst": max(ratios, default=None),
        f"{name}_clear": sum(
            regret.ratio > REGRET_ABOVE
            and regret.low is not None
            and regret.low > REGRET_SURELY_ABOVE
            for regret in regrets
        ),
    }


def or_dash(value: float | None, form: str) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else format(value, form)
