"""What a calibration times, and the costs that follow from planted samples: worked by hand."""

from dataclasses import replace

import pytest

from monta_megatron.calibration.fit import (
    Samples,
    excess_of,
    fit_contention,
    fit_curves,
    fit_host_costs,
    medians_of,
    slowdowns,
)
from monta_megatron.calibration.tasks import (
    CHUNKED_PASSES,
    MESSAGE_ROW_BYTES,
    MIN_SIZES,
    PASSES,
    Point,
    Sample,
    choose_pairs,
    etp_sizes,
    points_of,
)
from monta_megatron.core import Layout
from monta_megatron.planner.schedule import Task, simulate

# 2 nodes of 4 ranks.
LAYOUT = Layout(ep=8, etp=1, num_local_experts=1, rank=0, nodes=(0, 0, 0, 0, 1, 1, 1, 1))
LAUNCH_US, PEER_US, COUNTING_US = 20.0, 3.0, 300.0


def planted_us(point: Point) -> float:
    """100 us and 1e8 bytes per second."""
    return 100 + point.num_bytes / 1e2


def samples_of(points: list[Point]) -> Samples:
    """Three of each task, of which one takes far longer and one far shorter.

    Passes put rows in order: 4 operations in one chunk, 4 x 2 x 8 with a copy before that in 8. The
    host enqueues 10 for those (two that find ids, two of each pass) and 152, for 10 us each; a
    stage takes it 2 us besides, a pass 240. Counting comes before, with 10 or 12 operations.
    """
    us_of = {PASSES: 4 * 240.0 + 4 * 2 + 10 * 10, CHUNKED_PASSES: 4 * 240.0 + 64 * 2 + 152 * 10}
    planted = {task: Sample(us + COUNTING_US, COUNTING_US) for task, us in us_of.items()}
    start_us = {point: LAUNCH_US + PEER_US * (point.group_size - 1) for point in points}
    planted |= {point: Sample(planted_us(point), start_us[point]) for point in points}
    return {
        task: [Sample(us * noise, launch_us * noise) for noise in (30.0, 1.0, 0.1)]
        for task, (us, launch_us) in planted.items()
    }


def test_a_point_counts_the_bytes_that_leave_a_rank() -> None:
    # By resource and group size, the number of peers reached through it.
    peers = {("inter", 2): 1, ("inter", 4): 2, ("inter", 8): 4, ("intra", 2): 1, ("intra", 4): 3}
    points = points_of(LAYOUT, "cpu")
    collectives = [point for point in points if point.resource != "memory"]
    assert {(point.resource, point.group_size) for point in collectives} == set(peers)
    for point in collectives:
        to_peer_bytes = MESSAGE_ROW_BYTES * point.num_rows
        assert point.num_bytes == to_peer_bytes * peers[point.resource, point.group_size]
    # A single node has no network.
    of_node = points_of(replace(LAYOUT, ep=4, nodes=(0,) * 4), "cuda")
    assert {point.resource for point in of_node} == {"intra", "memory"}
    assert [etp_sizes(ranks) for ranks in (1, 8, 12)] == [[1], [1, 2, 4, 8], [1, 2, 4, 12]]


def test_curves_are_the_planted_ones() -> None:
    points = points_of(LAYOUT, "cuda")
    samples = samples_of(points)
    host = fit_host_costs(samples, "fused", "by hand")
    curves = fit_curves(medians_of(points, samples, "fused", host))
    found = {
        (curve.resource, curve.operation, curve.group_size, size): us
        for curve in curves
        for size, us in zip(curve.sizes_bytes, curve.times_us, strict=True)
    }
    assert found == {
        (*point.curve, point.num_bytes): round(planted_us(point), 1) for point in points
    }


def test_host_time_of_cpu_ranks_is_not_counted_twice() -> None:
    """What a collective takes adds up to what was measured; copies are in their curves."""
    points = points_of(LAYOUT, "cpu")
    samples = samples_of(points)
    host = fit_host_costs(samples, "host", source="by hand")
    for curve in fit_curves(medians_of(points, samples, "host", host)):
        less_us = LAUNCH_US + PEER_US * (curve.group_size - 1) if curve.resource != "memory" else 0
        expected = [round(100 + size / 1e2 - less_us, 1) for size in curve.sizes_bytes]
        assert list(curve.times_us) == pytest.approx(expected)
    assert (host.collective_us, host.collective_peer_us) == (LAUNCH_US, PEER_US)
    assert host.operation_us == 0
    assert (host.stage_us, host.pass_us) == (2, 240)
    assert (host.counts_us, host.counts_to_host_us) == (COUNTING_US, 0)


def test_host_time_of_a_gpu_s_operations() -> None:
    """A copy is an allocation and a launch; a collective allocates and calls NCCL."""
    samples = samples_of(points_of(LAYOUT, "cuda"))
    host = fit_host_costs(samples, "fused", source="by hand")
    assert (host.operation_us, host.collective_us, host.collective_peer_us) == (10, 10, PEER_US)
    assert (host.counts_us, host.counts_to_host_us) == (COUNTING_US - 10 * 10, 20)


def test_noise_in_all_runs_of_a_task() -> None:
    """A size that takes longer than the next takes as long; a falling line costs nothing more."""
    points = points_of(LAYOUT, "cuda")[:3]
    samples = {**samples_of(points_of(LAYOUT, "cuda")), points[1]: [Sample(1e6, LAUNCH_US)]}
    samples[CHUNKED_PASSES] = [Sample(COUNTING_US + 100.0, COUNTING_US)]
    host = fit_host_costs(samples, "fused", source="by hand")
    (curve,) = fit_curves(medians_of(points, samples, "fused", host))
    first_us, _, last_us = map(planted_us, points)
    assert curve.times_us == (round(first_us, 1), round(last_us, 1), round(last_us, 1))
    assert (host.stage_us, host.pass_us) == (0, 242)


@pytest.mark.parametrize("us_per_byte", [1e-5, 1e-3, 1e-1])
def test_pairs_are_those_of_chains_at_any_rate(us_per_byte: float) -> None:
    """Rails beside gathers of a node, and both beside copies."""
    times_us = {point: 20 + point.num_bytes * us_per_byte for point in points_of(LAYOUT, "cpu")}
    pairs = choose_pairs(times_us)
    halves = [(pair.first.curve, pair.second.curve) for pair in pairs]
    rails, node, copy = ("inter", "alltoall", 2), ("intra", "allgather", 4), ("memory", "copy", 1)
    assert halves == [(rails, node), (rails, copy), (node, copy)]
    # With as few sizes as a calibration may have.
    curves = [[point for point in times_us if point.curve == key] for key in (rails, node, copy)]
    fewest = [point for curve in curves for point in curve[:MIN_SIZES]]
    assert len(choose_pairs({point: times_us[point] for point in fewest})) == len(pairs)


def test_excess_of_two_together() -> None:
    """Hidden, half hidden, one after the other; less and more than these are noise."""
    for both_us, excess in ((3000, 0.0), (4000, 0.5), (5000, 1.0), (2900, 0.0), (9000, 1.0)):
        assert excess_of(2000, 3000, both_us) == excess_of(3000, 2000, both_us) == excess


@pytest.mark.parametrize("first", [1.0, 1.1, 1.5, 1.9, 2.0])
@pytest.mark.parametrize("second", [1.0, 1.1, 1.5, 1.9, 2.0])
def test_slowdowns_from_the_schedule_they_give(first: float, second: float) -> None:
    """What the planner's schedule makes of two operations is solved for what it was made with."""
    factors = {("inter", "memory"): first, ("memory", "inter"): second}

    def excess(first_us: float, second_us: float) -> float:
        tasks = [
            Task(resource=resource, us=us, launch_us=0.0)
            for resource, us in (("inter", first_us), ("memory", second_us))
        ]
        ends_us = simulate(tasks, lambda *pair: factors.get(pair, 2.0))
        return excess_of(first_us, second_us, max(ends_us))

    solved = slowdowns(excess(20.0, 5.0), excess(5.0, 20.0))
    assert solved == pytest.approx((first, second))


def test_contention_takes_the_median_of_the_rounds() -> None:
    """0.4 and 0.625 are 1.25 and 2; noise gives slowdowns from 1 to 2 too."""
    pairs = choose_pairs({point: planted_us(point) for point in points_of(LAYOUT, "cpu")})
    rounds = [(0.4, 0.0), (0.4, 0.625), (1.0, 0.625)]
    found = fit_contention(dict.fromkeys(pairs, rounds))
    names = (("network", "node_link"), ("network", "memory"), ("node_link", "memory"))
    assert found == tuple(
        row for one, other in names for row in ((one, other, 1.25), (other, one, 2.0))
    )
    noise = [slowdowns(*of) for of in ((0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0))]
    assert noise == [(1.0, 1.0), (2.0, 2.0), (2.0, 1.0), (1.0, 2.0)]
