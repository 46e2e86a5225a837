"""From samples to a cluster file, by hand; and the record that a killed calibration leaves."""

from dataclasses import replace
from pathlib import Path

import pytest
from linear_pipeline import Stage, operation_of
from monta_megatron.calibration.fitting import (
    Machine,
    _collective_start,
    doubts_of,
    excess_of,
    fit,
    make_cluster,
    slowdowns,
)
from monta_megatron.calibration.points import (
    NUM_SIZES,
    NodeShape,
    all_points,
    choose_pairs,
    series_of_cluster,
)
from monta_megatron.tools.calibrate.record import Record, alone

from monta_megatron.calibration.tasks import (
    COUNTS,
    MESSAGE_ROW_BYTES,
    PASSES,
    PASSES_IN_CHUNKS,
    Pair,
    Point,
    Sample,
)
from monta_megatron.planner.cluster_file import dump_measured, load_cluster
from monta_megatron.planner.curves import Curve
from monta_megatron.planner.schedule import Work, simulate

SHAPE = NodeShape(num_nodes=2, ranks_per_node=4)
MACHINE = Machine(
    name="by hand",
    num_nodes=2,
    ranks_per_node=4,
    nics_per_node=1,
    memory_gb_per_rank=None,
    on_cpu=True,
    counts_to_host_us=0.0,
    source="by hand",
)
LAUNCH_US = 20.0


def points_on(device: str) -> list[Point]:
    """Those of a cluster of this shape."""
    return all_points(series_of_cluster(SHAPE), NUM_SIZES[device])


def time_us(point: Point) -> float:
    """100 us and 1e8 bytes per second."""
    return 100 + point.num_bytes / 1e2


def samples_of(points: list[Point]) -> list[Sample]:
    """Three of each, of which one is far off."""
    return [
        Sample(task=point.name, us=LAUNCH_US + time_us(point) * noise, launch_us=LAUNCH_US)
        for point in points
        for noise in (1.0, 1.0, 30.0)
    ]


def test_a_point_counts_the_bytes_that_leave_a_rank() -> None:
    # 2 nodes of 4 ranks: by resource and group size, the number of peers reached through it.
    peers = {("inter", 2): 1, ("inter", 4): 2, ("inter", 8): 4, ("intra", 2): 1, ("intra", 4): 3}
    collectives = [p for p in points_on("cpu") if p.is_collective]
    assert {(point.resource, point.group_size) for point in collectives} == set(peers)
    for point in collectives:
        to_peer_bytes = MESSAGE_ROW_BYTES * point.num_rows
        assert point.num_bytes == to_peer_bytes * peers[point.resource, point.group_size]


def test_the_second_of_a_pair_ends_long_before_or_after() -> None:
    def second_over_first(pair: Pair) -> float:
        second, first_us = pair.second, time_us(pair.first.point)
        return second.repeats * time_us(second.point) / first_us

    points = points_on("cpu")
    for contenders in choose_pairs({point: time_us(point) for point in points}):
        assert second_over_first(contenders.short) < 0.7
        assert second_over_first(contenders.long) > 1.5


def test_cluster_file_holds_medians_and_can_be_read(tmp_path: Path) -> None:
    """What host and operation take adds up to what was measured."""
    points = points_on("cpu")
    pairs = choose_pairs({point: time_us(point) for point in points})
    # Two rounds, the second one twice as slow throughout, and as much slower together.
    together = [
        Sample(task=task.name, us=us * slower, launch_us=LAUNCH_US)
        for contenders in pairs
        for task, us in zip(
            contenders.tasks, (20_000.0, 10_000.0, 24_000.0, 40_000.0, 52_500.0), strict=True
        )
        for slower in (1, 2)
    ]
    # The first of two in a row, of which caches hold nothing.
    first_in_row = [
        Sample(task=p.name_of_first, us=LAUNCH_US + time_us(p) + more_us, launch_us=LAUNCH_US)
        for operation, more_us in (("alltoall", 30.0), ("copy", 10.0), ("sum", 11.0), ("find", 7.0))
        for p in points
        if p.operation == operation and p.num_bytes < 100_000
    ]
    on_host = [
        Sample(task=task.name, us=us, launch_us=us)
        for task, us in ((COUNTS, 600.0), (PASSES, 1000.0), (PASSES_IN_CHUNKS, 1224.0))
    ]
    made = make_cluster(
        MACHINE, points, pairs, samples_of(points) + first_in_row + together + on_host
    )
    path = tmp_path / "cluster.yaml"
    path.write_text(dump_measured(made))
    cluster = load_cluster(path)
    assert cluster == made
    assert {entry.pair for entry in cluster.contention} == {
        ("inter", "intra"),
        ("inter", "memory"),
        ("intra", "memory"),
    }
    assert {(entry.factor, entry.factor_of_second) for entry in cluster.contention} == {(1.25, 2.0)}
    assert cluster.launch.collective_us == LAUNCH_US
    # Once per dispatch; four passes of four stages, 7 more chunks: 224 us = 4 x 4 x 7 x 2 us, and
    # of each pass in one chunk 250 us, of which its stages take 4 x 2.
    launch = cluster.launch
    assert (launch.counts_us, launch.stage_us, launch.pass_us) == (600, 2, 242)
    assert (launch.first_collective_us, launch.first_find_us) == (30, 7)
    assert 10 <= launch.first_copy_us <= 11
    for curve in cluster.curves:
        in_memory = LAUNCH_US if curve.resource == "memory" else 0.0
        assert curve.fit is not None
        assert curve.fit.rate.gbytes_per_s == pytest.approx(0.1, rel=0.01)
        assert curve.fit.alpha_us == pytest.approx(100 + in_memory, rel=0.05)


@pytest.mark.parametrize(("fused", "num_operations"), [(False, 47), (True, 22)])
def test_no_operation_of_a_gpu_costs_less_than_nothing(fused: bool, num_operations: int) -> None:
    """A small `put` may be over before a `copy` has been launched.

    By Triton kernels, a copy is an allocation and a launch, a put two and one, a sum one, to find
    one and two, to list two and one, to count ten operations: 22.
    """
    points = points_on("cuda")
    pairs = choose_pairs({point: time_us(point) for point in points})
    alone = [task for contenders in pairs for task in contenders.tasks]
    samples = [
        Sample(task=name, us=us, launch_us=us)
        for point in points
        for name, us in [(point.name, 8.0 if point.operation == "put" else 25.0)]
    ]
    for task in (*alone, COUNTS, PASSES, PASSES_IN_CHUNKS):
        samples.append(Sample(task=task.name, us=100.0, launch_us=100.0))
    gpu = replace(MACHINE, on_cpu=False, memory_gb_per_rank=80.0, fused_kernels=fused)
    cluster = make_cluster(gpu, points, pairs, samples)
    assert cluster.policy == ("fused" if fused else "streams")
    # Five of the six by which an operation is priced take 25 us, `put` 8.
    assert cluster.launch.operation_us == pytest.approx(133 / num_operations, abs=0.005)
    # What a collective takes beside the allocation of what it receives.
    assert cluster.launch.collective_us == pytest.approx(25 - cluster.launch.operation_us, abs=0.06)
    assert all(time > 0 for curve in cluster.curves for time in curve.times_us)


def test_a_collective_of_a_gpu_s_host_is_priced_by_its_peers() -> None:
    """Calls take 12 us and 2 for each other rank of the group; CPU ranks have the least of all."""
    points = points_on("cuda")
    launches_us = {
        point.name: 12.0 + 2 * (point.group_size - 1) if point.is_collective else 5.0
        for point in points
    }
    gpu = replace(MACHINE, on_cpu=False, memory_gb_per_rank=80.0)
    start_us, peer_us = _collective_start(gpu, points, launches_us)
    assert (start_us, peer_us) == pytest.approx((12.0, 2.0))
    least_us = min(launches_us[point.name] for point in points if point.is_collective)
    assert _collective_start(MACHINE, points, launches_us) == (least_us, 0.0)
    # No line: a larger group takes no longer.
    alike_us = dict.fromkeys(launches_us, 7.0)
    assert _collective_start(gpu, points, alike_us) == (7.0, 0.0)


def test_the_copy_of_the_counts_is_not_counted_twice() -> None:
    points = points_on("cuda")
    pairs = choose_pairs({point: time_us(point) for point in points})
    alone = [task for contenders in pairs for task in contenders.tasks]
    samples = samples_of(points) + [
        Sample(task=task.name, us=100.0, launch_us=LAUNCH_US)
        for task in (*alone, COUNTS, PASSES, PASSES_IN_CHUNKS)
    ]
    gpu = replace(MACHINE, on_cpu=False, counts_to_host_us=30.0)
    launch = make_cluster(gpu, points, pairs, samples).launch
    assert (launch.counts_to_host_us, launch.counts_us) == (30, 70)


@pytest.mark.parametrize(
    ("both_us", "excess"),
    [
        (3000, 0.0),  # the shorter one hides behind the longer one
        (4000, 0.5),
        (5000, 1.0),  # one after the other
        (2900, 0.0),  # noise
        (9000, 1.0),  # noise
    ],
)
def test_excess_of_two_together(both_us: float, excess: float) -> None:
    assert excess_of(2000, 3000, both_us) == excess_of(3000, 2000, both_us) == excess


@pytest.mark.parametrize("first", [1.0, 1.1, 1.5, 1.9, 2.0])
@pytest.mark.parametrize("second", [1.0, 1.1, 1.5, 1.9, 2.0])
def test_slowdowns_from_the_schedule_they_give(first: float, second: float) -> None:
    """What the schedule makes of two operations is solved for what it was made with."""
    if 1 / first + 1 / second < 1:
        pytest.skip("slower than one after the other")
    factors = {("inter", "memory"): first, ("memory", "inter"): second}

    def excess(first_us: float, second_us: float) -> float:
        works = [
            Work(stage="first", resource="inter", times_us=(first_us,)),
            Work(stage="second", resource="memory", times_us=(second_us,)),
        ]
        stages = [operation_of(at, at, 0, [Stage(work, 0) for work in works]) for at in range(2)]
        both_us = simulate(stages, works, lambda *pair: factors.get(pair, 2.0)).total_us
        return excess_of(first_us, second_us, both_us)

    solved = slowdowns(excess(20.0, 5.0), excess(5.0, 20.0))
    assert solved == pytest.approx((first, second))


def test_noise_gives_slowdowns_too() -> None:
    assert slowdowns(0.0, 0.0) == (1.0, 1.0)
    assert slowdowns(1.0, 1.0) == (2.0, 2.0)
    # The first one stands still beside the second one: more than the schedule knows.
    assert slowdowns(1.0, 0.0) == (2.0, 1.0)
    assert slowdowns(0.0, 1.0) == (1.0, 2.0)


def test_record_goes_on_where_it_ended(tmp_path: Path) -> None:
    """A line that a kill has cut short is measured again."""
    path, sample = tmp_path / "c.yaml.partial", Sample(task="a", us=2.0, launch_us=1.0)
    record = Record.open(path, {"num_nodes": 2})
    record.add_first("a", 2.5)
    record.add(sample)
    with path.open("a") as file:
        file.write('{"task": "b", "us"')
    again = Record.open(path, {"num_nodes": 2})
    assert (again.first_us, again.samples) == ({"a": 2.5}, [sample])
    again.add(sample)
    assert Record.open(path, {"num_nodes": 2}).samples == [sample, sample]


def test_doubts_are_kept_in_the_file(tmp_path: Path) -> None:
    points = points_on("cpu")
    host_work = [
        Sample(task=task.name, us=100.0, launch_us=LAUNCH_US)
        for task in (COUNTS, PASSES, PASSES_IN_CHUNKS)
        for _ in range(3)
    ]
    samples = [*samples_of(points), *host_work]
    made = make_cluster(MACHINE, points, [], samples)
    assert made.doubts == (
        "calibrated in 3 rounds, medians need 5: give a calibration more seconds",
    )
    assert make_cluster(MACHINE, points, [], samples * 2).doubts == ()
    path = tmp_path / "c.yaml"
    path.write_text(dump_measured(made))
    assert load_cluster(path).doubts == made.doubts


@pytest.mark.parametrize(
    ("times_us", "said"),
    [
        ((100.0, 110.0, 130.0, 170.0), None),
        ((100.0, 95.0, 130.0, 170.0), None),
        ((100.0, 400.0, 120.0, 170.0), "70% less time for more bytes, at 3,000"),
        ((100.0, 100.0, 100.0, 100.0), "times do not grow with size"),
        ((100.0, 110.0, 120.0, 900.0), "off its line by "),
    ],
)
def test_a_poor_curve(times_us: tuple[float, ...], said: str | None) -> None:
    sizes = (1000, 2000, 3000, 4000)
    curve = Curve(
        operation="alltoall",
        resource="inter",
        group_size=8,
        sizes_bytes=sizes,
        times_us=times_us,
        kind="measured",
        source="by hand",
        fit=fit(sizes, times_us),
    )
    doubts = list(doubts_of(5, [curve]))
    if said is None:
        assert doubts == []
    else:
        (line,) = doubts
        assert line.startswith(f"poor curve: alltoall, inter, 8 ranks: {said}")


def test_two_calibrations_of_one_file(tmp_path: Path) -> None:
    """The second is refused while the first lasts; a record that it kept is gone on with later."""
    path = tmp_path / "c.yaml.partial"
    with alone(path):
        record = Record.open(path, {"num_nodes": 2})
        with (
            pytest.raises(ValueError, match="is being written by another calibration"),
            alone(path),
        ):
            pass
        record.add(Sample(task="a", us=2.0, launch_us=1.0))
    with alone(path):
        assert len(Record.open(path, {"num_nodes": 2}).samples) == 1
        path.unlink()
    with alone(path):
        assert path.read_bytes() == b""
    assert not path.exists()


def test_record_of_another_cluster_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml.partial"
    Record.open(path, {"num_nodes": 2})
    with pytest.raises(ValueError, match="num_nodes: got 2, must be 4 as here; remove it"):
        Record.open(path, {"num_nodes": 4})
    path.write_text("no record\n")
    with pytest.raises(ValueError, match="is no record of a calibration; remove it"):
        Record.open(path, {"num_nodes": 2})
