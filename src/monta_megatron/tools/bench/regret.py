"""Regret: what a pick takes over what the best chain takes, measured side by side. No torch.

The fastest of several series is partly the luckiest one, and would look slower if it were measured
again. So the best chain is chosen on the odd repeats, and both are judged on the even ones: a
regret may be under 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from monta_megatron.tools.bench.statistics import ratio_interval, ratio_of_medians

# A chain and its number of chunks.
Key: TypeAlias = tuple[str, int]

# With fewer repeats, the halves would say nothing: the medians of all of them decide.
LEAST_REPEATS = 10


@dataclass(frozen=True, kw_only=True)
class Regret:
    """A pick against the best chain.

    Attributes:
        pick: what was picked.
        best: the best of all that ran.
        pick_ms, best_ms: their medians over the repeats on which they are judged.
        ratio: pick_ms over best_ms.
        low, high: 95% interval of the ratio; None where the repeats are few or were not kept.
    """

    pick: Key
    best: Key
    pick_ms: float
    best_ms: float
    ratio: float
    low: float | None = None
    high: float | None = None


def regret_by_repeats(pick: Key, times_ms: Mapping[Key, NDArray[np.float64]]) -> Regret:
    """The best is chosen on repeats 1, 3, 5, ... and judged on 2, 4, 6, ...

    Args:
        pick: among those that ran.
        times_ms: [repeats] of each, interleaved; at least two repeats.
    """
    best = min(times_ms, key=lambda key: np.median(times_ms[key][0::2]))
    pick_ms, best_ms = times_ms[pick][1::2], times_ms[best][1::2]
    low, high = ratio_interval(pick_ms, best_ms)
    return Regret(
        pick=pick,
        best=best,
        pick_ms=float(np.median(pick_ms)),
        best_ms=float(np.median(best_ms)),
        ratio=ratio_of_medians(pick_ms, best_ms),
        low=low,
        high=high,
    )


def regret_by_medians(pick: Key, medians_ms: Mapping[Key, float]) -> Regret:
    """The best is chosen and judged on the same medians: at least 1.

    Args:
        pick: among those that ran.
        medians_ms: of each.
    """
    best = min(medians_ms, key=medians_ms.__getitem__)
    return Regret(
        pick=pick,
        best=best,
        pick_ms=medians_ms[pick],
        best_ms=medians_ms[best],
        ratio=medians_ms[pick] / medians_ms[best],
    )
