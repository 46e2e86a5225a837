"""From samples to a cluster: curves with their fits, launch times, contention, doubts. No torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import linear_regression, median
from typing import cast

import numpy as np

from monta_megatron.calibration.points import BYTES_PER_ROW
from monta_megatron.calibration.tasks import (
    COUNTS,
    HIDDEN_ROW_BYTES,
    NUM_PASS_CHUNKS,
    NUM_PASS_STAGES,
    PASSES,
    PASSES_IN_CHUNKS,
    Contenders,
    Pair,
    Point,
    Sample,
)
from monta_megatron.chains.program import (
    COLLECTIVES,
    DISPATCH,
    DISPATCH_BACKWARD,
    FORWARD_BACKWARD,
    Kind,
    Pass,
    Policy,
    PricedOperation,
    RowFormat,
)
from monta_megatron.common.units import Rate, counted
from monta_megatron.planner.cluster import FINDS, Cluster, Contention, HostCosts
from monta_megatron.planner.curves import Curve
from monta_megatron.planner.traffic import Around, num_host_operations


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A line through measured points.

    Attributes:
        alpha_us: time at 0 bytes.
        rate: its slope.
        largest_residual: the largest relative distance of a point from the line.
    """

    alpha_us: float
    rate: Rate
    largest_residual: float


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
    line = fit(curve.sizes_bytes, curve.times_us)
    if line is None:
        return "times do not grow with size"
    if line.largest_residual > MOST_OFF_LINE:
        return f"off its line by {line.largest_residual:.0%}"
    return None


# A curve may hold no time of 0.
LEAST_US = 0.1

# Operations that the executor runs as a point does; the rows are those of `operations`.
AS_EXECUTED: dict[PricedOperation, tuple[Kind | Around, Pass]] = {
    "copy": ("pack", DISPATCH),
    "put": ("put", DISPATCH_BACKWARD),
    "sum": ("reduce", DISPATCH_BACKWARD),
    "find": ("find_copies", DISPATCH),
    "count": ("count", DISPATCH),
    "lists": ("lists", DISPATCH),
}
# Likewise, where Triton kernels do the work.
AS_FUSED: dict[PricedOperation, tuple[Kind | Around, Pass]] = {
    **AS_EXECUTED,
    "copy": ("duplicate", DISPATCH),
    "put": ("to_experts", DISPATCH),
}
ROW = RowFormat(hidden_size=HIDDEN_ROW_BYTES // 2, value_bytes=2, prob_bytes=4, sum_bytes=4)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts of a cluster that need no measurement.

    Attributes:
        name: the name that users give it.
        num_nodes: sets of ranks joined by the node link.
        ranks_per_node: ranks in each.
        nics_per_node: network interfaces that the ranks of a node share.
        ranks_per_host: where several hosts make up a node; None where a node is a host.
        memory_gb_per_rank: 1e9 bytes of a GPU; None on CPU ranks, which share the host's.
        on_cpu: whether ranks are CPU ranks.
        counts_to_host_us: time of a copy of some integers to the host, with the wait for it.
        source: when and with what it was measured.
        fused_kernels: Triton kernels did the work of an exchange.
    """

    name: str
    num_nodes: int
    ranks_per_node: int
    nics_per_node: int
    memory_gb_per_rank: float | None
    on_cpu: bool
    counts_to_host_us: float
    source: str
    fused_kernels: bool = False
    ranks_per_host: int | None = None


def make_cluster(
    machine: Machine,
    points: Sequence[Point],
    pairs: Sequence[Contenders],
    samples: Sequence[Sample],
) -> Cluster:
    """A cluster from the medians of all samples.

    Args:
        machine: what is known without them.
        points: that were timed.
        pairs: likewise.
        samples: of all tasks.
    """
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample)
    times_us = {task: median(run.us for run in runs) for task, runs in by_task.items()}
    launches_us = {task: median(run.launch_us for run in runs) for task, runs in by_task.items()}
    curves = _curves(machine, points, times_us, launches_us)
    return Cluster(
        name=machine.name,
        num_nodes=machine.num_nodes,
        ranks_per_node=machine.ranks_per_node,
        nics_per_node=machine.nics_per_node,
        ranks_per_host=machine.ranks_per_host,
        source=machine.source,
        host=_host(machine, points, launches_us, times_us),
        memory_gb_per_rank=machine.memory_gb_per_rank,
        policy="host" if machine.on_cpu else "fused" if machine.fused_kernels else "streams",
        curves=curves,
        contention=tuple(_contention(contenders, by_task) for contenders in pairs),
        doubts=tuple(doubts_of(min(map(len, by_task.values())), curves)),
        calibrated_node=(machine.ranks_per_node, machine.nics_per_node),
    )


def _host(
    machine: Machine,
    points: Sequence[Point],
    launches_us: Mapping[str, float],
    times_us: Mapping[str, float],
) -> HostCosts:
    """Least host time of operations; the rest of their time is in the curves.

    The caches hold an operation's code whatever its size, so one number says how much longer the
    first of several runs takes.
    """
    # Where copies run on the host, their time is not launch time.
    operation_us = 0.0
    if not machine.on_cpu:
        policy: Policy = "fused" if machine.fused_kernels else "streams"
        executed = AS_FUSED if machine.fused_kernels else AS_EXECUTED
        num_operations = sum(num_host_operations(*of, ROW, policy) for of in executed.values())
        starts_us = [_least_us(points, launches_us, operation) for operation in executed]
        operation_us = round(sum(starts_us) / num_operations, 2)

    def first(*operations: str) -> float:
        more_us = [
            times_us[p.name_of_first] - times_us[p.name]
            for p in points
            if p.operation in operations and p.name_of_first in times_us
        ]
        return round(max(median(more_us), 0.0), 1) if more_us else 0.0

    num_passes = len(FORWARD_BACKWARD)
    more_us = times_us[PASSES_IN_CHUNKS.name] - times_us[PASSES.name]
    stage_us = max(more_us / (num_passes * (NUM_PASS_CHUNKS - 1) * NUM_PASS_STAGES), 0.0)
    collective_us, peer_us = _collective_start(machine, points, launches_us)
    return HostCosts(
        collective_us=round(max(collective_us - operation_us, 0.0), 1),
        collective_peer_us=round(peer_us, 2),
        operation_us=operation_us,
        counts_to_host_us=round(machine.counts_to_host_us, 1),
        counts_us=round(max(times_us[COUNTS.name] - machine.counts_to_host_us, 0.0), 1),
        pass_us=round(max(times_us[PASSES.name] / num_passes - NUM_PASS_STAGES * stage_us, 0.0), 1),
        stage_us=round(stage_us, 1),
        first_collective_us=first(*COLLECTIVES),
        first_copy_us=first(*(BYTES_PER_ROW.keys() - FINDS)),
        first_find_us=first(*FINDS),
        source=machine.source,
    )


def _collective_start(
    machine: Machine, points: Sequence[Point], launches_us: Mapping[str, float]
) -> tuple[float, float]:
    """Host time to start a collective: of any, and as much more for each other rank of its group.

    The line through the least time of each group size. On CPU ranks, which start a collective's
    copies themselves, the least time of all, as the rest is in the curves.
    """
    sizes = sorted({point.group_size for point in points if point.is_collective})
    if machine.on_cpu or len(sizes) == 1:
        return _least_us(points, launches_us, *COLLECTIVES), 0.0
    least_us = [
        _least_us([p for p in points if p.group_size == size], launches_us, *COLLECTIVES)
        for size in sizes
    ]
    peer_us, start_us = linear_regression([size - 1 for size in sizes], least_us)
    if peer_us <= 0 or start_us < 0:
        # Noise: a larger group takes no longer.
        return min(least_us), 0.0
    return start_us, peer_us


def _least_us(points: Sequence[Point], launches_us: Mapping[str, float], *operations: str) -> float:
    """The least host time of these operations, at any size."""
    return min(launches_us[point.name] for point in points if point.operation in operations)


def _curves(
    machine: Machine,
    points: Sequence[Point],
    times_us: Mapping[str, float],
    launches_us: Mapping[str, float],
) -> tuple[Curve, ...]:
    """Curves of operations beyond the host's time to start them."""
    by_curve: dict[tuple[str, str, int], list[Point]] = {}
    for point in points:
        by_curve.setdefault((point.resource, point.operation, point.group_size), []).append(point)
    curves = []
    for group in (by_curve[key] for key in sorted(by_curve)):
        first = group[0]
        if first.is_collective:
            start_us, peer_us = _collective_start(machine, points, launches_us)
            launch_us = start_us + peer_us * (first.group_size - 1)
        else:
            launch_us = 0.0 if machine.on_cpu else _least_us(points, launches_us, first.operation)
        sizes = tuple(point.num_bytes for point in group)
        times = tuple(max(round(times_us[p.name] - launch_us, 1), LEAST_US) for p in group)
        curves.append(
            Curve(
                operation=cast("PricedOperation", first.operation),
                resource=first.resource,
                group_size=first.group_size,
                sizes_bytes=sizes,
                times_us=times,
            )
        )
    return tuple(curves)


def _contention(contenders: Contenders, by_task: Mapping[str, Sequence[Sample]]) -> Contention:
    """Takes the excess round by round, as times differ more between rounds than by the excess."""

    def excess(pair: Pair) -> float:
        tasks = (pair.first, pair.second, pair)
        rounds = zip(*(by_task[task.name] for task in tasks), strict=False)
        return median(excess_of(*(sample.us for sample in samples)) for samples in rounds)

    first, second = slowdowns(excess(contenders.short), excess(contenders.long))
    return Contention(
        pair=(contenders.long.first.point.resource, contenders.long.second.point.resource),
        factor=round(first, 3),
        factor_of_second=round(second, 3),
    )


def excess_of(first_us: float, second_us: float, both_us: float) -> float:
    """Excess time of two operations together over the longer one alone, relative to the shorter.

    0 where the shorter one is hidden, 1 where they might as well run one after the other; anything
    beyond is noise and is left out.
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
