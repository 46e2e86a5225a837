"""Fit the constants of configs/estimate/assumptions.yaml that are marked as fitted.

    python benchmarks/fit_estimate.py

It reads the rows of configs/estimate/published.yaml with `judged: false` and no others, begins at
START, changes one constant at a time while the sum of squares falls, and prints what it comes to;
the file is edited by hand. A constant's distance from where it starts costs a little, so that one
that the rows say nothing of stays: a ratio of DISTANCE weighs as much as a row that is 10% off.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from validate import Checked, Predictor

from monta_megatron.planner.assumptions import SHARES, Assumption, read_assumptions

# (name, where) -> what was expected before the first fit.
START: dict[tuple[str, str | None], float] = {
    ("gemm_efficiency", None): 0.65,
    ("attention_efficiency", None): 0.5,
    ("alltoall_network_share", "EFA"): 0.35,
    ("deepep_efficiency", None): 0.9,
    ("deepep_pass_us", None): 60,
    ("hybridep_efficiency", None): 0.85,
    ("hybridep_serial", None): 0.5,
    ("hybridep_pass_us", None): 60,
    ("overlap_share", None): 0.8,
    ("host_layer_us", None): 8500,
    ("host_platform_ratio", "AWS p5"): 2,
    ("host_platform_ratio", "AWS p6"): 1.25,
    ("host_latent_ratio", None): 2,
    ("host_serial", None): 0.25,
}
STEPS = (1.15, 1.05, 1.02)
DISTANCE = 1.5
# No kernel reaches the peak.
MOST_SHARE = 0.95


def loss_of(rows: Sequence[Checked]) -> float:
    """Squares of the errors."""
    return sum((row.error_pct / 100) ** 2 for row in rows)


def distance(value: float, start: float) -> float:
    """What it costs to be elsewhere than at the start."""
    return float((0.1 * math.log(value / start) / math.log(DISTANCE)) ** 2)


def fit(entries: tuple[Assumption, ...]) -> tuple[Assumption, ...]:
    """Coordinate descent over the entries that are marked as fitted."""
    start = entries

    def total(candidate: Sequence[Assumption]) -> float:
        held = sum(
            distance(entry.value, first.value)
            for entry, first in zip(candidate, start, strict=True)
            if entry.fitted
        )
        return loss_of(Predictor({}, tuple(candidate)).all_rows(judged=False)) + held

    best = total(entries)
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for position, entry in enumerate(entries):
                if not entry.fitted:
                    continue
                for factor in (step, 1 / step):
                    value = entries[position].value * factor
                    if entry.name.endswith(SHARES) and value > MOST_SHARE:
                        continue
                    moved = replace(entry, value=value)
                    candidate = (*entries[:position], moved, *entries[position + 1 :])
                    loss = total(candidate)
                    if loss < best - 1e-5:
                        entries, best, improved = candidate, loss, True
                        break
    return entries


def main() -> None:
    """Print the constants, as the file has them and as they are fitted."""
    before = read_assumptions()
    start = tuple(
        replace(entry, value=START[entry.name, entry.where]) if entry.fitted else entry
        for entry in before
    )
    for old, new in zip(before, fit(start), strict=True):
        if old.fitted:
            print(f"{old.name:28}{old.where or '':12}{old.value:10.4g} -> {new.value:.3g}")


if __name__ == "__main__":
    main()
