"""Speedup of one series of times over another, with its interval."""

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000


def ratio_of_medians(base_ms: NDArray[np.float64], times_ms: NDArray[np.float64]) -> float:
    """Speedup of `times_ms` over `base_ms`."""
    return float(np.median(base_ms) / np.median(times_ms))


def ratio_interval(
    base_ms: NDArray[np.float64], times_ms: NDArray[np.float64]
) -> tuple[float, float]:
    """95% interval of `ratio_of_medians`, by bootstrap over the repeats.

    Times of one repeat share the machine's state at that moment and are drawn together.

    Args:
        base_ms: [repeats].
        times_ms: [repeats], from the same repeats.
    """
    num_repeats = len(times_ms)
    draws = np.random.default_rng(0).integers(num_repeats, size=(NUM_RESAMPLES, num_repeats))
    ratios = np.median(base_ms[draws], axis=1) / np.median(times_ms[draws], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5]).tolist()
    return low, high
