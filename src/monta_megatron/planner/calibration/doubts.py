"""What a calibration says against itself: too few rounds, curves that show noise. No torch."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from monta_megatron.common.units import counted
from monta_megatron.planner.curves import Curve

# A median of fewer is one run's luck.
LEAST_ROUNDS = 5
# Curves of a calibration with time enough are up to 0.3 off their line, and fall by up to 0.06.
MOST_OFF_LINE, MOST_FALL = 0.6, 0.2


def doubts_of(rounds: int, curves: Iterable[Curve]) -> Iterator[str]:
    """One line for each thing that makes the costs doubtful.

    Args:
        rounds: the fewest times that any operation was timed.
        curves: the result.
    """
    if rounds < LEAST_ROUNDS:
        yield (
            f"calibrated in {counted(rounds, 'round')}, medians need "
            f"{LEAST_ROUNDS}: give a calibration more seconds"
        )
    for curve in curves:
        fault = _fault_of(curve)
        if fault is not None:
            ranks = counted(curve.group_size, "rank")
            yield f"poor curve: {curve.operation}, {curve.resource}, {ranks}: {fault}"


def _fault_of(curve: Curve) -> str | None:
    falls = [1 - after / before for before, after in pairwise(curve.times_us)]
    if max(falls) > MOST_FALL:
        size = curve.sizes_bytes[falls.index(max(falls)) + 1]
        return f"{max(falls):.0%} less time for more bytes, at {size:,}"
    if curve.fit is None:
        return "times do not grow with size"
    if curve.fit.largest_residual > MOST_OFF_LINE:
        return f"off its line by {curve.fit.largest_residual:.0%}"
    return None
