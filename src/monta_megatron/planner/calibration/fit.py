"""The line through measured points, which a calibration writes beside them."""

import numpy as np

from monta_megatron.common.units import Rate
from monta_megatron.planner.curves import Fit


def fit(sizes_bytes: tuple[int, ...], times_us: tuple[float, ...]) -> Fit | None:
    """The line that a calibration writes next to its points; None if times do not grow with size.

    Every point has the same weight relative to its time: a plain fit would follow the largest
    size alone.
    """
    beta, alpha = np.polyfit(sizes_bytes, times_us, 1, w=1 / np.array(times_us)).tolist()
    # Equal times may get a slope from rounding.
    if beta <= 0 or len(set(times_us)) == 1:
        return None
    alpha = max(alpha, 0.0)
    points = zip(sizes_bytes, times_us, strict=True)
    residual = max(abs(alpha + beta * size - time) / time for size, time in points)
    return Fit(alpha_us=alpha, rate=Rate(1e-3 / beta), largest_residual=residual)
