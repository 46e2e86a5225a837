"""Which measured curves can be believed: judged by their medians, before noise is taken out.

Where others use a machine, times become long and even: sizes take alike, larger ones take less
than smaller ones, or all of a collective seems to be its start.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from monta_megatron.calibration.fit import MIN_US, Medians
from monta_megatron.common.text import counted
from monta_megatron.planner.curves import Rate

# The largest size takes at least so many times as long as the smallest; a curve that is flat has
# measured a start and no rate.
MIN_GROWTH = 2.0
# A size takes at least this fraction of any smaller one's time.
MIN_OF_SMALLER = 0.7
# The rate of an emulated network is known; another one that is so many times off is noise.
MAX_OFF = 10.0


def refusals(curves: Iterable[Medians], nic_share: Rate | None, ranks_per_node: int) -> list[str]:
    """Reasons why curves are refused, one text per refused curve.

    Args:
        curves: measured curves.
        nic_share: rate of a rank's share of its node's interfaces, where an emulator sets it.
        ranks_per_node: number of ranks per node.
    """
    found = []
    for curve in curves:
        rate = nic_share if curve.points[0].resource == "inter" else None
        if rate is not None and curve.points[0].operation == "allgather":
            # A ring crosses once per node, not once per rank on it.
            rate = rate.times(ranks_per_node)
        if (why := _refusal(curve, rate)) is not None:
            found.append(f"{curve.name}: {why}")
    return found


def _refusal(curve: Medians, stated: Rate | None) -> str | None:
    """Reason why a curve is refused, or None.

    Args:
        curve: medians of the curve.
        stated: rate that the emulator states; None where it is not known.
    """
    times_us, sizes = curve.times_us, [f"{point.num_bytes:,} bytes" for point in curve.points]
    if curve.curve_us[-1] <= MIN_US:
        return f"{sizes[-1]} take no longer than to start the operation, {curve.start_us:,.0f} us"
    if times_us[-1] < MIN_GROWTH * times_us[0]:
        ratio = times_us[-1] / times_us[0]
        return (
            f"{sizes[-1]} take {ratio:.2f} times as long as {sizes[0]}, must be {MIN_GROWTH:g} "
            "times or more"
        )
    for number, slowest_us in enumerate(accumulate(times_us[:-1], max), start=1):
        if times_us[number] < MIN_OF_SMALLER * slowest_us:
            smaller = sizes[times_us.index(slowest_us)]
            return (
                f"{sizes[number]} take {times_us[number]:,.0f} us, must be {MIN_OF_SMALLER:g} "
                f"times the {slowest_us:,.0f} us of {smaller}, or more"
            )
    if stated is not None:
        rate = Rate(curve.points[-1].num_bytes * 1e-3 / curve.curve_us[-1])
        ratio = rate.gbytes_per_s / stated.gbytes_per_s
        if not 1 / MAX_OFF < ratio < MAX_OFF:
            return (
                f"its rate is {rate.in_both_units}, must be within {MAX_OFF:g} times of the "
                f"emulated {stated.in_both_units}"
            )
    return None


def marks(curves: Sequence[Medians]) -> list[str]:
    """Reservations about accepted curves, one line each."""
    lines = []
    for curve in curves:
        num_clamped = sum(us <= MIN_US for us in curve.curve_us)
        if num_clamped:
            lines.append(
                f"{curve.name}: {counted(num_clamped, 'size')} of {len(curve.points)} take no "
                f"longer than to start the operation, and count as {MIN_US:g} us"
            )
        num_single = curve.num_runs.count(1)
        if num_single:
            lines.append(
                f"{curve.name}: {counted(num_single, 'size')} of {len(curve.points)} ran once, and "
                "have no median"
            )
    return lines
