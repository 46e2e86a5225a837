"""From samples to the costs of a cluster: curves, host costs, contention. No torch."""

from collections.abc import Collection, Mapping, Sequence
from statistics import linear_regression, median
from typing import TypeAlias

from monta_megatron.calibration.tasks import (
    NUM_PASS_CHUNKS,
    NUM_PASS_STAGES,
    HostWork,
    Pair,
    Point,
    Sample,
    Task,
)
from monta_megatron.chains.program import COLLECTIVES, FORWARD_BACKWARD, PricedOperation
from monta_megatron.planner.cluster import Contention, HostCosts
from monta_megatron.planner.curves import Curve

Samples: TypeAlias = Mapping[Task, Sequence[Sample]]

# A curve may hold no time of 0.
LEAST_US = 0.1


def fit_curves(samples: Samples, on_cpu: bool) -> tuple[Curve, ...]:
    """The median time of every point that was timed, as curves.

    On CPU ranks without the host time to start a collective, which is part of its time there.

    Args:
        samples: of each task.
        on_cpu: whether ranks are CPU ranks.
    """
    start_us = collective_start(samples, on_cpu)[0] if on_cpu else 0.0
    by_curve: dict[tuple[str, str, int], list[Point]] = {}
    for point in _points(samples):
        by_curve.setdefault(point.curve, []).append(point)
    curves = []
    for points in (by_curve[key] for key in sorted(by_curve)):
        points.sort(key=lambda point: point.num_bytes)
        first = points[0]
        less_us = start_us if first.operation in COLLECTIVES else 0.0
        times_us = (_median_us(samples[point]) - less_us for point in points)
        curves.append(
            Curve(
                operation=first.operation,
                resource=first.resource,
                group_size=first.group_size,
                sizes_bytes=tuple(point.num_bytes for point in points),
                times_us=tuple(max(round(us, 1), LEAST_US) for us in times_us),
            )
        )
    return tuple(curves)


def fit_host_costs(samples: Samples, on_cpu: bool, source: str) -> HostCosts:
    """Host time to start operations, and around the stages of a pass.

    Args:
        samples: of each task.
        on_cpu: whether ranks are CPU ranks, where the time of copies is in their curves.
        source: of the samples.
    """
    # A copy is an allocation and a launch.
    operation_us = 0.0 if on_cpu else min(_launches_us(samples, ("copy",)).values()) / 2
    collective_us, peer_us = collective_start(samples, on_cpu)
    passes_us, chunked_us, counts_us = (
        _median_us(samples[work])
        for work in (HostWork.PASSES, HostWork.CHUNKED_PASSES, HostWork.COUNTS)
    )
    num_passes, num_more_chunks = len(FORWARD_BACKWARD), NUM_PASS_CHUNKS - 1
    stage_us = max((chunked_us - passes_us) / (num_passes * num_more_chunks * NUM_PASS_STAGES), 0.0)
    costs_us = {
        "collective_us": collective_us - operation_us,
        "collective_peer_us": peer_us,
        "operation_us": operation_us,
        # Reading the counts includes their copy to the host.
        "counts_to_host_us": 0.0,
        "counts_us": counts_us,
        "pass_us": passes_us / num_passes - NUM_PASS_STAGES * stage_us,
        "stage_us": stage_us,
    }
    return HostCosts(
        source=source, **{name: round(max(us, 0.0), 2) for name, us in costs_us.items()}
    )


def collective_start(samples: Samples, on_cpu: bool) -> tuple[float, float]:
    """Host time to start a collective: of any, and as much more for each other rank of its group.

    The line through the least time of each group size. On CPU ranks, which start a collective's
    copies themselves, the least time of all.
    """
    least_us = _launches_us(samples, COLLECTIVES)
    if not on_cpu and len(least_us) > 1:
        num_peers = [size - 1 for size in least_us]
        peer_us, start_us = linear_regression(num_peers, list(least_us.values()))
        # Otherwise it is noise: a larger group takes no longer.
        if peer_us > 0 and start_us >= 0:
            return start_us, peer_us
    return min(least_us.values()), 0.0


def fit_contention(
    pairs: Sequence[tuple[Pair, Pair]], excesses: Mapping[Pair, Sequence[float]]
) -> tuple[Contention, ...]:
    """The factors of every two operations, from the median excess of their pairs."""
    entries = []
    for pair in pairs:
        first, second = slowdowns(*(median(excesses[of_length]) for of_length in pair))
        entries.append(
            Contention(
                pair=(pair[0].first.resource, pair[0].second.resource),
                factor=round(first, 2),
                factor_of_second=round(second, 2),
            )
        )
    return tuple(entries)


def excess_of(first_us: float, second_us: float, both_us: float) -> float:
    """Excess time of two operations together over the longer one alone, relative to the shorter.

    0 where the shorter one is hidden, 1 where they might as well run one after the other; anything
    beyond is noise.
    """
    shorter_us, longer_us = sorted((first_us, second_us))
    return min(max((both_us - longer_us) / shorter_us, 0.0), 1.0)


def slowdowns(short_excess: float, long_excess: float) -> tuple[float, float]:
    """By how much two operations slow each other, from their excess in two pairs.

    While both run, the first is slowed by x and the second by y. A short second one takes y times
    as long, and the first loses 1 - 1/x of that: the excess is y (1 - 1/x). With a short first one
    it is x (1 - 1/y). Hand-worked: x = 1.25 and y = 2 give 0.4 and 0.625.

    Args:
        short_excess: excess where the second operation is the shorter one.
        long_excess: excess where it is the longer one.

    Returns:
        x and y, from 1 to 2: at worst as slow as one after the other.
    """
    if short_excess + long_excess >= 2 - 1e-6:
        return 2.0, 2.0
    common = 1 - short_excess * long_excess
    if common >= 2 * (1 - short_excess):
        return 2.0, 1 / (1 - long_excess / 2)
    if common >= 2 * (1 - long_excess):
        return 1 / (1 - short_excess / 2), 2.0
    return common / (1 - short_excess), common / (1 - long_excess)


def _points(samples: Samples) -> list[Point]:
    return [task for task in samples if isinstance(task, Point)]


def _median_us(samples: Sequence[Sample]) -> float:
    return median(sample.us for sample in samples)


def _launches_us(samples: Samples, operations: Collection[PricedOperation]) -> dict[int, float]:
    """The least host time to start one of these operations, by ranks of its group."""
    least_us: dict[int, float] = {}
    for point in _points(samples):
        if point.operation in operations:
            us = median(sample.launch_us for sample in samples[point])
            least_us[point.group_size] = min(us, least_us.get(point.group_size, us))
    return least_us
