"""Process groups worked by hand, and runs timed with a fake clock; no launch is needed."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from monta_megatron.tools.calibrate import run as groups_of_cluster
from test_cluster_file import SHAPE, points_on

from monta_megatron.calibration import timer
from monta_megatron.calibration.tasks import Pair, Point, Repeated, Sample
from monta_megatron.calibration.timer import Timer


@pytest.mark.parametrize(
    ("rank", "groups"),
    [
        (
            0,
            {
                ("inter", 2): [0, 4],
                ("inter", 4): [0, 2, 4, 6],
                ("inter", 8): [0, 1, 2, 3, 4, 5, 6, 7],
                ("intra", 1): [0],
                ("intra", 2): [0, 1],
                ("intra", 4): [0, 1, 2, 3],
            },
        ),
        (
            7,
            {
                ("inter", 2): [3, 7],
                ("inter", 4): [1, 3, 5, 7],
                ("inter", 8): [0, 1, 2, 3, 4, 5, 6, 7],
                ("intra", 1): [7],
                ("intra", 2): [6, 7],
                ("intra", 4): [4, 5, 6, 7],
            },
        ),
    ],
)
def test_groups_by_hand(
    rank: int, groups: dict[tuple[str, int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 nodes of 4 ranks: some local ranks of both nodes, or neighbours on one node."""
    monkeypatch.setattr(groups_of_cluster.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(groups_of_cluster, "new_local_group", lambda ranks, *_: ranks)
    made = groups_of_cluster.make_groups(SHAPE, (0, 0, 0, 0, 1, 1, 1, 1))
    assert {key: group.process_group for key, group in made.items()} == groups
    for key, group in made.items():
        assert (group.size, group.rank) == (len(groups[key]), groups[key].index(rank))
        assert group.nodes == tuple(rank // 4 for rank in groups[key])


class Clock:
    """Stands in for the `time` module; it advances only while one of its operations runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.starts: dict[str, Callable[[], Callable[[], object]]] = {}

    def perf_counter(self) -> float:
        return self.now_s

    process_time = thread_time = perf_counter

    def set(self, task: Point, launch_us: float, wait_us: float) -> None:
        """Let a task take so long to be started, and then to end."""

        def start() -> Callable[[], object]:
            self.now_s += launch_us / 1e6
            return wait

        def wait() -> None:
            self.now_s += wait_us / 1e6

        self.starts[task.name] = start

    def timer(self, ranks_per_core: float = 1.0) -> Timer:
        """A timer of what was set."""
        group: Any = SimpleNamespace(size=lambda: 2)
        device = torch.device("cpu")
        return Timer(group, device, lambda task: self.starts[task.name], ranks_per_core, 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A launch of two ranks, where the other one does exactly what this one does."""
    clock = Clock()

    def all_reduce(values: torch.Tensor, op: object, group: object) -> None:
        if op == timer.dist.ReduceOp.SUM:
            values *= 2

    monkeypatch.setattr(timer, "time", clock)
    monkeypatch.setattr(timer.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(timer.torch.cuda, "synchronize", lambda: None)
    return clock


def points_of(operation: str) -> list[Point]:
    return [point for point in points_on("cpu") if point.operation == operation]


def test_a_run_takes_the_time_of_one_of_its_repeats(clock: Clock) -> None:
    exchange, copy = points_of("alltoall")[0], points_of("copy")[0]
    clock.set(exchange, 10.0, 90.0)
    clock.set(copy, 20.0, 0.0)
    timer = clock.timer()
    alone = timer.run(exchange, repeats=2)
    assert (alone.us, alone.launch_us) == pytest.approx((100, 10))
    # The halves of a pair are timed with all of their repeats, alone and together.
    once = Repeated(point=exchange, repeats=1, other="memory")
    copies = Repeated(point=copy, repeats=3, other="inter")
    assert timer.run(copies).us == pytest.approx(60)
    assert timer.run(Pair(first=once, second=copies)).us == pytest.approx(160)


def test_a_mixed_run_takes_the_time_that_a_core_is_busy(clock: Clock) -> None:
    """Two ranks share the core, so it is busy for twice the mean of their times."""
    copy, find = points_of("copy")[0], points_of("find")[0]
    clock.set(copy, 20.0, 5.0)
    clock.set(find, 30.0, 0.0)
    samples = clock.timer(ranks_per_core=2.0).run_mixed([(copy, 2), (find, 1)])
    assert [sample.task for sample in samples] == [copy.name_of_first, copy.name, find.name]
    assert [sample.us for sample in samples] == pytest.approx([50, 50, 60])
    assert [sample.launch_us for sample in samples] == pytest.approx([40, 40, 60])


def test_rounds_end_by_the_time_that_all_ranks_share(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own clock this rank would start another round, and wait for the others forever."""

    def slower_elsewhere(values: torch.Tensor, op: object, group: object) -> None:
        values[-1] += 10

    monkeypatch.setattr(timer.dist, "all_reduce", slower_elsewhere)
    exchange = points_of("alltoall")[0]
    clock.set(exchange, 10.0, 90.0)
    samples: list[Sample] = []
    clock.timer().rounds([(exchange, 1e6)], Counter(), 5.0, samples.append)
    assert len(samples) == 1


def test_sizes_grow_together(clock: Clock) -> None:
    """An exchange at 1 us per byte and a copy at 0.1 ns: by size, whatever each takes."""
    exchanges, copies = points_of("allgather")[:4], points_of("copy")[:4]
    for point, us_per_byte in [(e, 1.0) for e in exchanges] + [(c, 1e-4) for c in copies]:
        clock.set(point, 0.0, us_per_byte * point.num_bytes)
    taken: list[Point] = []
    kept_us = {copies[0].name: 7.0}
    times_us = clock.timer().first_runs(
        [*exchanges, *copies], kept_us, lambda point, us: taken.append(point)
    )
    assert list(times_us) == taken == sorted(taken, key=lambda point: point.num_bytes)
    assert set(taken) == {*exchanges, *copies} and times_us[copies[0]] == 7.0
