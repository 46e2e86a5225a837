"""Runs timed with a fake clock, and the groups and messages of a rank; no launch is needed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_fit import LAYOUT

from monta_megatron.calibration import command, timer
from monta_megatron.calibration.tasks import (
    LEAST_SIZES,
    NUM_COPIES,
    PASSES,
    Pair,
    Point,
    Task,
    points_of,
)
from monta_megatron.calibration.timer import Timer
from monta_megatron.common.text import Progress
from monta_megatron.core import Layout
from monta_megatron.exchange.collectives import PeerGroup


class Clock:
    """Stands in for the `time` module; it advances only while one of its operations runs.

    Attributes:
        runs: tasks in the order in which they were started.
        elsewhere_s: by how much the other ranks are later.
    """

    def __init__(self) -> None:
        self.now_s = self.elsewhere_s = 0.0
        self.runs: list[Task] = []
        self._times_us: dict[Task, tuple[float, float]] = {}

    def perf_counter(self) -> float:
        return self.now_s

    process_time = thread_time = perf_counter

    def set(self, task: Task, launch_us: float, wait_us: float) -> None:
        """Let a task take so long to be started, and then to end."""
        self._times_us[task] = launch_us, wait_us

    def starter(self, task: Task) -> Callable[[], Callable[[], object]]:
        launch_us, wait_us = self._times_us[task]

        def start() -> Callable[[], object]:
            self.runs.append(task)
            self.now_s += launch_us / 1e6
            return wait

        def wait() -> None:
            self.now_s += wait_us / 1e6

        return start

    def timer(self, budget_s: float, ranks_per_core: float = 1.0) -> Timer:
        """A timer of what was set, on one of two ranks."""
        group: Any = SimpleNamespace(size=lambda: 2)
        return Timer(
            group=group,
            device=torch.device("cpu"),
            starter=self.starter,
            ranks_per_core=ranks_per_core,
            begin_s=0.0,
            budget_s=budget_s,
        )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A launch of two ranks, where the other one does exactly what this one does."""
    clock = Clock()

    def all_reduce(values: torch.Tensor, op: object, group: object) -> None:
        values[-1] += clock.elsewhere_s
        if op == timer.dist.ReduceOp.SUM:
            values *= 2

    monkeypatch.setattr(timer, "time", clock)
    monkeypatch.setattr(timer.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(timer.torch.cuda, "synchronize", lambda: None)
    return clock


PROGRESS = Progress()
PROGRESS.phase("", 0)


def curve_of(*key: object) -> list[Point]:
    return [point for point in points_of(LAYOUT, "cpu") if point.curve == key]


RAILS, COPIES = curve_of("inter", "alltoall", 2), curve_of("memory", "copy", 1)


def test_a_sample_is_the_mean_of_its_repeats(clock: Clock) -> None:
    clock.set(RAILS[0], 10.0, 90.0)
    timer = clock.timer(budget_s=1.0)
    assert timer.run_sizes(RAILS[:1], PROGRESS) == RAILS[:1]
    # The first run is not timed.
    assert clock.runs == RAILS[:1] * 3
    assert timer.samples[RAILS[0]] == [pytest.approx((100, 10))]


def test_a_core_is_busy_with_the_ranks_that_share_it(clock: Clock) -> None:
    """Two ranks share the core, so it is busy for twice the mean of their times."""
    clock.set(COPIES[0], 20.0, 5.0)
    clock.set(RAILS[0], 20.0, 5.0)
    timer = clock.timer(budget_s=1.0, ranks_per_core=2.0)
    timer.run_sizes([COPIES[0], RAILS[0]], PROGRESS)
    assert timer.samples[COPIES[0]] == [pytest.approx((50, 40))]
    # Between nodes the network is waited for.
    assert timer.samples[RAILS[0]] == [pytest.approx((25, 20))]


def test_a_pair_takes_each_alone_and_both_together(clock: Clock) -> None:
    """A collective of 100 us, of which 90 are hidden, beside 2 copies of 20 us on the host."""
    pair = Pair(RAILS[0], COPIES[0], 2)
    clock.set(pair.first, 10.0, 90.0)
    clock.set(pair.second, 20.0, 0.0)
    timer = clock.timer(budget_s=0.0, ranks_per_core=2.0)
    assert timer.run_rounds([pair], PROGRESS) == 1
    assert clock.runs == [pair.first, *[pair.second] * 2, pair.first, *[pair.second] * 2]
    # By the fake clock nothing runs at once: 140 us, which is one after the other.
    assert timer.excesses[pair] == [1.0]


def test_the_budget_is_a_number_of_runs(clock: Clock) -> None:
    """Passes of 1 s and a collective of 1 s in 10 s: 5 rounds of both, or one less."""
    for task in (PASSES, RAILS[0]):
        clock.set(task, 0.0, 1e6)
    timer = clock.timer(budget_s=10.0)
    fewest = timer.run_rounds([PASSES, RAILS[0]], PROGRESS)
    numbers = {task: len(samples) for task, samples in timer.samples.items()}
    assert numbers == {PASSES: 5, RAILS[0]: 5} and fewest == 5
    assert timer.elapsed_s == 10
    # One that is spent before the first round: each runs once.
    late = clock.timer(budget_s=1.0)
    assert late.run_rounds([PASSES, RAILS[0]], PROGRESS) == 1
    assert {task: len(samples) for task, samples in late.samples.items()} == {
        PASSES: 1,
        RAILS[0]: 1,
    }


def test_rounds_end_by_the_time_that_all_ranks_share(clock: Clock) -> None:
    """By its own clock this rank would start another round, and wait for the others forever."""
    clock.elsewhere_s = 10.0
    clock.set(RAILS[0], 10.0, 90.0)
    timer = clock.timer(budget_s=5.0)
    assert timer.run_rounds([RAILS[0]], PROGRESS) == 1 and len(timer.samples[RAILS[0]]) == 1


def test_large_sizes_wait_for_half_of_the_budget(clock: Clock) -> None:
    """A collective at 1 us per byte and a copy at 0.1 ns: smaller sizes first, whatever they take.

    Of the collective 5,120, 20,480 and 81,920 bytes run and the next would take 0.3 s.
    """
    for point in RAILS:
        clock.set(point, 0.0, 1.0 * point.num_bytes)
    for point in COPIES:
        clock.set(point, 0.0, 1e-4 * point.num_bytes)
    timer = clock.timer(budget_s=0.4)
    timed = timer.run_sizes([*RAILS, *COPIES], PROGRESS)
    assert timed == [*RAILS[:LEAST_SIZES], *COPIES]
    taken = list(timer.samples)
    assert taken == sorted(taken, key=lambda point: point.num_bytes)
    assert len(clock.timer(budget_s=100.0).run_sizes(RAILS, PROGRESS)) == len(RAILS)


@pytest.mark.parametrize(
    ("rank", "of_both_nodes", "of_one"),
    [
        (0, [[0, 4], [0, 2, 4, 6], [*range(8)]], [[0], [0, 1], [0, 1, 2, 3]]),
        (7, [[3, 7], [1, 3, 5, 7], [*range(8)]], [[7], [6, 7], [4, 5, 6, 7]]),
    ],
)
def test_groups_by_hand(
    rank: int,
    of_both_nodes: list[list[int]],
    of_one: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2 nodes of 4 ranks: some ranks of both nodes, or neighbours on one node."""
    monkeypatch.setattr(command, "new_local_group", lambda ranks, *_: list(ranks))
    monkeypatch.setattr(command, "peer_group", lambda name, group, nodes: group)
    layout = Layout(ep=8, etp=1, num_local_experts=1, rank=rank, nodes=LAYOUT.nodes)
    groups = {("inter", len(ranks)): ranks for ranks in of_both_nodes}
    groups |= {("intra", len(ranks)): ranks for ranks in of_one}
    assert command.make_groups(layout) == groups


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        (("inter", "alltoall", 2), ([3, 3], [3, 3])),
        # A gather inside a node has unequal parts: of this rank, 4 rows.
        (("intra", "allgather", 2), ([4, 3], [4, 4])),
        (("inter", "allgather", 2), ([3, 3], [3, 3])),
    ],
)
def test_messages_by_hand(
    key: Any, rows: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(output: Any, message: Any, receive: Any, send: Any, group: Any) -> Any:
        sent = send[0] if key[1] == "allgather" else sum(send)
        assert (len(output), len(message)) == (sum(receive), sent)
        started.append((receive, send))
        return SimpleNamespace(wait=lambda: None)

    started: list[Any] = []
    for name in ("start_all_gather", "start_all_to_all"):
        monkeypatch.setattr(timer, name, start)
    resource, operation, size = key
    any_group: Any = None
    group = PeerGroup(name="", process_group=any_group, size=size, rank=0, nodes=(0, 1))
    starter = timer.starter_of({(resource, size): group}, torch.device("cpu"), fused=False)
    starter(Point(operation=operation, resource=resource, group_size=2, num_rows=3, row_bytes=16))()
    assert started == [rows]


@pytest.mark.parametrize(("operation", "value"), [("copy", 1), ("sum", NUM_COPIES)])
def test_rows_arrive_in_memory(operation: Any, value: float) -> None:
    starter = timer.starter_of({}, torch.device("cpu"), fused=False)
    point = Point(operation=operation, resource="memory", group_size=1, num_rows=5, row_bytes=4096)
    wait = starter(point)()
    results: Any = wait()
    assert results[-1].shape == (5, 1024) and torch.all(results[-1] == value)
