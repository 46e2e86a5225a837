"""Process groups worked by hand, and runs timed with a fake clock; no launch is needed."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from test_cluster_file import SHAPE

from monta_megatron.tools.calibrate import measure, operations
from monta_megatron.tools.calibrate.points import NUM_SIZES, Pair, Point, Repeated, all_points
from monta_megatron.tools.calibrate.record import Sample


@pytest.mark.parametrize(
    ("rank", "groups"),
    [
        (
            0,
            {
                ("inter", 1): [0, 4],
                ("inter", 2): [0, 2, 4, 6],
                ("inter", 4): [0, 1, 2, 3, 4, 5, 6, 7],
                ("intra", 1): [0],
                ("intra", 2): [0, 1],
                ("intra", 4): [0, 1, 2, 3],
            },
        ),
        (
            7,
            {
                ("inter", 1): [3, 7],
                ("inter", 2): [1, 3, 5, 7],
                ("inter", 4): [0, 1, 2, 3, 4, 5, 6, 7],
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
    monkeypatch.setattr(operations.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(operations, "new_local_group", lambda ranks, name: ranks)
    made = operations.make_groups(SHAPE, (0, 0, 0, 0, 1, 1, 1, 1))
    assert {key: group.process_group for key, group in made.items()} == groups
    for key, group in made.items():
        assert (group.size, group.rank) == (len(groups[key]), groups[key].index(rank))
        assert group.nodes == tuple(rank // 4 for rank in groups[key])


class Clock:
    """Stands in for the `time` module; it advances only while one of its operations runs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    process_time = thread_time = monotonic = perf_counter

    def operation(self, launch_us: float, wait_us: float) -> Callable[[], Callable[[], object]]:
        """A function that starts an operation, as `measure` takes it."""

        def start() -> Callable[[], object]:
            self.now_s += launch_us / 1e6
            return wait

        def wait() -> None:
            self.now_s += wait_us / 1e6

        return start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A launch of two ranks, where the other one does exactly what this one does."""
    clock = Clock()

    def all_reduce(values: torch.Tensor, op: object = None) -> None:
        if op is None:
            values *= 2

    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(measure, "wait_for_all", lambda: None)
    monkeypatch.setattr(measure.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(measure.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    return clock


def point_of(operation: str) -> Point:
    return next(p for p in all_points(SHAPE, NUM_SIZES["cpu"]) if p.operation == operation)


def test_a_run_takes_the_time_of_one_of_its_repeats(clock: Clock) -> None:
    exchange, copy = point_of("alltoall"), point_of("copy")
    starts = {exchange.name: clock.operation(10.0, 90.0), copy.name: clock.operation(20.0, 0.0)}
    alone = measure.run(exchange, starts, repeats=2)
    assert (alone.us, alone.launch_us) == pytest.approx((100, 10))
    # The halves of a pair are timed with all of their repeats, alone and together.
    once = Repeated(point=exchange, repeats=1, other="memory")
    copies = Repeated(point=copy, repeats=3, other="inter")
    assert measure.run(copies, starts).us == pytest.approx(60)
    assert measure.run(Pair(first=once, second=copies), starts).us == pytest.approx(160)


def test_a_mixed_run_takes_the_time_that_a_core_is_busy(clock: Clock) -> None:
    """Two ranks share the core, so it is busy for twice the mean of their times."""
    copy, find = point_of("copy"), point_of("find")
    starts = {copy.name: clock.operation(20.0, 5.0), find.name: clock.operation(30.0, 0.0)}
    samples = measure.run_mixed([(copy, 2), (find, 1)], starts, ranks_per_core=2.0)
    assert [sample.task for sample in samples] == [copy.name_of_first, copy.name, find.name]
    assert [sample.us for sample in samples] == pytest.approx([50, 50, 60])
    assert [sample.launch_us for sample in samples] == pytest.approx([40, 40, 60])


def test_the_first_rank_says_when_rounds_end(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own clock this rank would start another round, and wait for the others forever."""
    monkeypatch.setattr(measure, "_first_rank_says", lambda here: True)
    exchange = point_of("alltoall")
    starts = {exchange.name: clock.operation(10.0, 90.0)}
    samples: list[Sample] = []
    measure.measure_rounds([exchange], starts, [1e6], 1.0, Counter(), math.inf, samples.append)
    assert len(samples) == 1
