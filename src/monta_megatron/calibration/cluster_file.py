"""From samples to a cluster: curves with their fits, launch times, contention factors. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from monta_megatron.calibration.points import COUNTS, WALKS, Pair, Point
from monta_megatron.calibration.record import Sample
from monta_megatron.chains.lanes import FORWARD_BACKWARD
from monta_megatron.planner.cluster import Cluster, Contention, Launch
from monta_megatron.planner.curves import Curve, fit


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is known of a cluster without measuring.

    Attributes:
        name: as users call it.
        num_nodes: sets of ranks joined by the fast tier.
        ranks_per_node: ranks in each.
        nics_per_node: network interfaces that the ranks of a node share.
        memory_gb_per_rank: 1e9 bytes of a GPU; None on CPU ranks, which share the host's.
        copies_block_host: ranks are CPUs.
        counts_to_host_us: a copy of some integers to the host, with the wait for it.
        source: when and with what it was measured.
    """

    name: str
    num_nodes: int
    ranks_per_node: int
    nics_per_node: int
    memory_gb_per_rank: float | None
    copies_block_host: bool
    counts_to_host_us: float
    source: str


def make_cluster(
    machine: Machine, points: Sequence[Point], pairs: Sequence[Pair], samples: Sequence[Sample]
) -> Cluster:
    """Medians of all samples as a cluster."""
    by_task: dict[str, list[Sample]] = {}
    for sample in samples:
        by_task.setdefault(sample.task, []).append(sample)
    times_us = {task: median(each.us for each in found) for task, found in by_task.items()}
    launches_us = {
        task: median(each.launch_us for each in found) for task, found in by_task.items()
    }
    launch = _launch(machine, points, launches_us, times_us)
    return Cluster(
        name=machine.name,
        num_nodes=machine.num_nodes,
        ranks_per_node=machine.ranks_per_node,
        nics_per_node=machine.nics_per_node,
        kind="measured",
        source=machine.source,
        launch=launch,
        memory_gb_per_rank=machine.memory_gb_per_rank,
        copies_block_host=machine.copies_block_host,
        curves=_curves(machine, points, times_us, launch),
        contention=tuple(_contention(machine, pair, times_us) for pair in pairs),
    )


def _launch(
    machine: Machine,
    points: Sequence[Point],
    launches_us: Mapping[str, float],
    times_us: Mapping[str, float],
) -> Launch:
    """The least that an operation takes the host; what more it takes at some size is in curves."""

    def least(*operations: str) -> float:
        found = [launches_us[p.name] for p in points if p.operation in operations]
        return round(min(found), 1)

    # Where copies run on the host, their time is no launch.
    blocks = machine.copies_block_host
    return Launch(
        collective_us=least("alltoall", "allgather"),
        copy_us=0.0 if blocks else least("copy"),
        sum_us=0.0 if blocks else least("sum"),
        find_us=0.0 if blocks else least("find"),
        counts_to_host_us=round(machine.counts_to_host_us, 1),
        counts_us=round(max(times_us[COUNTS.name] - machine.counts_to_host_us, 0.0), 1),
        walk_us=round(times_us[WALKS.name] / len(FORWARD_BACKWARD), 1),
        kind="measured",
        source=machine.source,
    )


def _curves(
    machine: Machine, points: Sequence[Point], times_us: Mapping[str, float], launch: Launch
) -> tuple[Curve, ...]:
    launches_us = {"sum": launch.sum_us, "find": launch.find_us}
    by_curve: dict[tuple[str, str, int], list[Point]] = {}
    for point in points:
        by_curve.setdefault((point.tier, point.operation, point.group_size), []).append(point)
    curves = []
    for group in (by_curve[key] for key in sorted(by_curve)):
        first = group[0]
        launch_us = launch.collective_us
        if not first.is_collective:
            launch_us = launches_us.get(first.operation, launch.copy_us)
        sizes = tuple(point.num_bytes for point in group)
        times = tuple(round(times_us[point.name] - launch_us, 1) for point in group)
        curves.append(
            Curve(
                operation=first.operation,
                tier=first.tier,
                group_size=first.group_size,
                sizes_bytes=sizes,
                times_us=times,
                kind="measured",
                source=machine.source,
                fit=fit(sizes, times),
            )
        )
    return tuple(curves)


def _contention(machine: Machine, pair: Pair, times_us: Mapping[str, float]) -> Contention:
    both_us, first_us = times_us[pair.name], times_us[pair.first.name]
    factor = factor_of(both_us, first_us, times_us[pair.second.name] * pair.repeats)
    return Contention(
        pair=(pair.first.tier, pair.second.tier),
        factor=round(factor, 3),
        kind="measured",
        source=f"{pair.name}; {machine.source}",
    )


def factor_of(both_us: float, first_us: float, second_us: float) -> float:
    """By how much two operations slow each other.

    While both run each is slowed by f; when the shorter one is done the longer one goes on alone:
    both = f * shorter + longer - shorter. Hand-worked: 2 ms and 3 ms alone, 4 ms together: f = 1.5.
    From 1, where they do not feel each other, to 2, which is one after the other; what lies beyond
    is noise, or two operations that nobody should put together, and the schedule knows no worse.
    """
    shorter_us, longer_us = sorted((first_us, second_us))
    return min(max(1 + (both_us - longer_us) / shorter_us, 1.0), 2.0)
