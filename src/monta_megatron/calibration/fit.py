"""From samples to the costs of a cluster: curves, host costs, contention. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import TypeAlias

from monta_megatron.calibration import tasks
from monta_megatron.calibration.tasks import Pair, Point, Sample, Task
from monta_megatron.chains.program import COLLECTIVES, DISPATCH, FORWARD_BACKWARD, Policy
from monta_megatron.planner.cluster import Contention, HostCosts
from monta_megatron.planner.curves import NAMES, Curve, rising
from monta_megatron.planner.traffic import num_host_operations

Samples: TypeAlias = Mapping[Task, Sequence[Sample]]
# No time of a curve may be 0.
MIN_US = 0.1


@dataclass(frozen=True, kw_only=True)
class Medians:
    """The points of a curve as they were measured.

    Attributes:
        points: points of one operation, in ascending sizes.
        times_us: median time of each point; noise may make the times fall.
        start_us: host time to start the operation, where it is part of these times.
        num_runs: number of runs of each point.
    """

    points: tuple[Point, ...]
    times_us: tuple[float, ...]
    start_us: float
    num_runs: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the curve, as a cluster file writes it."""
        first = self.points[0]
        return f"{first.operation} {NAMES[first.resource]} {first.group_size}"

    @property
    def curve_us(self) -> tuple[float, ...]:
        """Times without the start, of which none falls and none is below `MIN_US`."""
        times_us = rising(self.times_us)
        return tuple(max(round(us - self.start_us, 1), MIN_US) for us in times_us)


def medians_of(
    points: Sequence[Point], samples: Samples, policy: Policy, host: HostCosts
) -> list[Medians]:
    """The median time of every point, curve by curve.

    On CPU ranks a collective's time contains the host time to start it, which a plan adds itself.

    Args:
        points: timed points, curve by curve in ascending sizes.
        samples: task -> its samples.
        policy: way in which the ranks run an exchange.
        host: host costs fitted to the same samples.
    """
    curves = []
    for (_, operation, group_size), curve_points in groupby(points, lambda point: point.curve):
        sizes = tuple(curve_points)
        is_started = policy == "host" and operation in COLLECTIVES
        start_us = host.collective_us + host.collective_peer_us * (group_size - 1)
        curves.append(
            Medians(
                points=sizes,
                times_us=tuple(median(run.us for run in samples[point]) for point in sizes),
                start_us=start_us if is_started else 0.0,
                num_runs=tuple(len(samples[point]) for point in sizes),
            )
        )
    return curves


def fit_curves(curves: Sequence[Medians]) -> tuple[Curve, ...]:
    """The curves of a cluster file."""
    return tuple(
        Curve(
            operation=curve.points[0].operation,
            resource=curve.points[0].resource,
            group_size=curve.points[0].group_size,
            sizes_bytes=tuple(point.num_bytes for point in curve.points),
            times_us=curve.curve_us,
        )
        for curve in curves
    )


def fit_host_costs(samples: Samples, policy: Policy, source: str) -> HostCosts:
    """Host time to start operations, to count and bind, and around the stages of a pass.

    A difference that noise makes negative counts as 0. Not measured is `stock_counts_us`, which
    keeps the reference's. Groups of one size do not tell a peer's share, which is then 0.

    Args:
        samples: task -> its samples.
        policy: way in which the ranks run an exchange; on CPU ranks the curves hold the time of
            copies.
        source: description of where the samples come from.
    """
    # A copy is an allocation and a launch; a collective allocates what it receives.
    enqueue_us = min(min_start_us(samples, "copy").values()) / 2
    operation_us = 0.0 if policy == "host" else enqueue_us
    starts_us = min_start_us(samples, "alltoall")
    min_size, max_size = min(starts_us), max(starts_us)
    peer_us = max(starts_us[max_size] - starts_us[min_size], 0.0) / max(max_size - min_size, 1)
    collective_us = starts_us[min_size] - peer_us * (min_size - 1) - operation_us
    counts_us = median(sample.launch_us for sample in samples[tasks.PASSES])
    counts_us -= operation_us * num_host_operations("count", DISPATCH, tasks.HOST_ROW, policy)
    numbers, times_us = [], []
    for task in (tasks.PASSES, tasks.CHUNKED_PASSES):
        number, num_enqueued = task.operations(policy)
        us = median(sample.us - sample.launch_us for sample in samples[task])
        numbers.append(number)
        times_us.append(us - enqueue_us * num_enqueued)
    stage_us = max(times_us[1] - times_us[0], 0.0) / (numbers[1] - numbers[0])
    pass_us = (times_us[0] - numbers[0] * stage_us) / len(FORWARD_BACKWARD)
    return HostCosts(
        collective_us=round(max(collective_us, 0.0), 2),
        collective_peer_us=round(peer_us, 2),
        operation_us=round(operation_us, 2),
        # A copy and a wait.
        counts_to_host_us=round(2 * operation_us, 2),
        counts_us=round(max(counts_us, 0.0), 2),
        pass_us=round(max(pass_us, 0.0), 2),
        stage_us=round(stage_us, 2),
        source=source,
    )


def min_start_us(samples: Samples, operation: str) -> dict[int, float]:
    """Group size -> shortest host time to start an operation, over all numbers of bytes."""
    starts_us: dict[int, float] = {}
    for point, runs in samples.items():
        if isinstance(point, Point) and point.operation == operation:
            us = median(sample.launch_us for sample in runs)
            starts_us[point.group_size] = min(us, starts_us.get(point.group_size, us))
    return starts_us


def fit_contention(excesses: Mapping[Pair, Sequence[Sequence[float]]]) -> tuple[Contention, ...]:
    """The factors of every two operations, from the median excesses of their pair."""
    rows: list[Contention] = []
    for pair, runs in excesses.items():
        one, other = NAMES[pair.first.resource], NAMES[pair.second.resource]
        first, second = slowdowns(*(median(values) for values in zip(*runs, strict=True)))
        rows += [(one, other, round(first, 2)), (other, one, round(second, 2))]
    return tuple(rows)


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
