"""Runs timed with a fake clock, and the groups and messages of a rank; no launch is needed."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from test_fit import LAYOUT

from monta_megatron.calibration import command, timer
from monta_megatron.calibration.tasks import (
    MIN_SIZES,
    NUM_COPIES,
    PASSES,
    Pair,
    Point,
    Task,
    points_of,
)
from monta_megatron.calibration.timer import TRIAL_REPEATS, Timer
from monta_megatron.common.text import Progress
from monta_megatron.exchange.collectives import PeerGroup


class Clock:
    """Stands in for the `time` module; it advances only while one of its operations runs.

    Attributes:
        runs: tasks in the order in which they were started.
        elsewhere_s: by how much the clock of the other rank is ahead.
    """

    def __init__(self) -> None:
        self.now_s = self.elsewhere_s = 0.0
        self.runs: list[Task] = []

    def perf_counter(self) -> float:
        return self.now_s

    process_time = thread_time = perf_counter

    def timer(
        self, times_us: dict[Task, tuple[float, float]], budget_s: float, ranks_per_core: float = 1
    ) -> Timer:
        """A timer on one of two ranks, of tasks that take so long to be started and then to end."""

        def starter(task: Task) -> Callable[[], Callable[[], object]]:
            launch_us, wait_us = times_us[task]

            def start() -> Callable[[], object]:
                self.runs.append(task)
                self.now_s += launch_us / 1e6
                return wait

            def wait() -> None:
                self.now_s += wait_us / 1e6

            return start

        group: Any = SimpleNamespace(size=lambda: 2)
        return Timer(
            group=group,
            device=torch.device("cpu"),
            starter=starter,
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
    return clock


PROGRESS = Progress()
PROGRESS.phase("", 0)


def curve_of(*key: object) -> list[Point]:
    return [point for point in points_of(LAYOUT, "cpu") if point.curve == key]


RAILS, COPIES = curve_of("inter", "alltoall", 2), curve_of("memory", "copy", 1)
# The smallest of each.
RAIL, COPY = RAILS[0], COPIES[0]


def test_a_sample_is_the_mean_of_its_repeats(clock: Clock) -> None:
    timer = clock.timer({RAIL: (10.0, 90.0)}, budget_s=1.0)
    assert timer.run_sizes([RAIL], PROGRESS) == [RAIL]
    # The first run is not timed.
    assert clock.runs == [RAIL] * 3
    assert timer.samples[RAIL] == [pytest.approx((100, 10))]


def test_a_core_is_busy_with_the_ranks_that_share_it(clock: Clock) -> None:
    """Two ranks share the core, so it is busy for twice the mean of their times."""
    times_us = dict.fromkeys((COPY, RAIL), (20.0, 5.0))
    timer = clock.timer(times_us, budget_s=1.0, ranks_per_core=2.0)
    timer.run_sizes([COPY, RAIL], PROGRESS)
    assert timer.samples[COPY] == [pytest.approx((50, 40))]
    # Between nodes the network is waited for.
    assert timer.samples[RAIL] == [pytest.approx((25, 20))]


def test_a_device_is_timed_by_its_own_clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 5 us that the host launches in 10 each, behind fills that take longer."""
    device_s: list[float] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            # The device begins when it has done the fills, and is behind the host from there on.
            device_s.append(1.0 + 5e-6 * len(clock.runs))

        def synchronize(self) -> None:
            clock.now_s = device_s[-1]

        def elapsed_time(self, end: "Event") -> float:
            return (device_s[-1] - device_s[-2]) * 1e3

    monkeypatch.setattr(timer.torch.cuda, "Event", Event)
    monkeypatch.setitem(timer.COLD_BYTES, "cuda", 1)
    of_rank = clock.timer({COPY: (10.0, 0.0)}, budget_s=1.0)
    assert of_rank._run(COPY, "device", repeats=4) == pytest.approx((5, 10))
    of_rank.device = torch.device("cuda")
    assert [of_rank._clock(task) for task in (COPY, Pair(RAIL, COPY), PASSES)] == [
        *("device", "device", "wall")
    ]


def test_a_pair_takes_each_alone_and_both_together(clock: Clock) -> None:
    """A collective of 100 us, of which 90 are hidden, beside 2 and then 8 copies of 25 us."""
    pair, times_us = Pair(RAIL, COPY), {RAIL: (10.0, 90.0), COPY: (25.0, 0.0)}
    timer = clock.timer(times_us, budget_s=0.0, ranks_per_core=2.0)
    assert timer.run_rounds([pair], PROGRESS) == 1
    runs: list[Task] = []
    for copies in ([COPY] * 2, [COPY] * 8):
        runs += [RAIL, *[COPY] * TRIAL_REPEATS, *copies, RAIL, *copies]
    assert clock.runs == runs
    # By the fake clock nothing runs at once, which is one after the other.
    assert timer.excesses[pair] == [pytest.approx([1.0, 1.0])]


def test_the_budget_is_a_number_of_runs(clock: Clock) -> None:
    """Passes of 1 s and a collective of 1 s in 12 s, of which each first takes one for itself."""
    times_us = dict.fromkeys((PASSES, RAIL), (0.0, 1e6))
    timer = clock.timer(times_us, budget_s=12.0)
    assert timer.run_rounds([PASSES, RAIL], PROGRESS) == 5 and timer.elapsed_s == 12
    assert {task: len(samples) for task, samples in timer.samples.items()} == {PASSES: 5, RAIL: 5}
    # One that is spent before the first round: each runs once.
    late = clock.timer(times_us, budget_s=1.0)
    assert late.run_rounds([PASSES, RAIL], PROGRESS) == 1
    assert {task: len(samples) for task, samples in late.samples.items()} == {PASSES: 1, RAIL: 1}


def test_rounds_end_by_the_time_that_all_ranks_share(clock: Clock) -> None:
    """2 s have passed here and 10 s on the other rank, which starts no run beyond 8 s.

    By its own clock this rank would start one, and wait for the other rank forever.
    """
    clock.elsewhere_s = 8.0
    timer = clock.timer({RAIL: (0.0, 1e6)}, budget_s=8.0)
    # A run that is not timed, and one that is: how long they take is known.
    timer.run_sizes([RAIL], PROGRESS)
    assert (clock.now_s, timer.elapsed_s, timer.took_s[RAIL]) == (2.0, 10.0, 1.0)
    assert timer.run_rounds([RAIL], PROGRESS) == 1 and len(clock.runs) == 2


def test_large_sizes_wait_for_half_of_the_budget(clock: Clock) -> None:
    """A collective at 1 us per byte and a copy at 0.1 ns: smaller sizes first, whatever they take.

    Of the collective 5,120, 20,480 and 81,920 bytes run and the next would take 0.3 s.
    """
    times_us: dict[Task, tuple[float, float]] = {
        **{point: (0.0, 1.0 * point.num_bytes) for point in RAILS},
        **{point: (0.0, 1e-4 * point.num_bytes) for point in COPIES},
    }
    timer = clock.timer(times_us, budget_s=0.5)
    assert timer.run_sizes([*RAILS, *COPIES], PROGRESS) == [*RAILS[:MIN_SIZES], *COPIES]
    taken = [point.num_bytes for point in timer.samples if isinstance(point, Point)]
    assert taken == sorted(taken)
    assert len(clock.timer(times_us, budget_s=100.0).run_sizes(RAILS, PROGRESS)) == len(RAILS)


@pytest.mark.parametrize(
    ("rank", "inter", "intra"),
    [
        (0, [[0, 4], [0, 2, 4, 6], [*range(8)]], [[0], [0, 1], [0, 1, 2, 3]]),
        (7, [[3, 7], [1, 3, 5, 7], [*range(8)]], [[7], [6, 7], [4, 5, 6, 7]]),
    ],
)
def test_groups_by_hand(
    rank: int, inter: list[list[int]], intra: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 nodes of 4 ranks: some ranks of both nodes, or neighbours on one node."""
    monkeypatch.setattr(command.collectives, "new_local_group", lambda ranks, *_: list(ranks))
    monkeypatch.setattr(command.collectives, "peer_group", lambda name, group, nodes: group)
    found = command.make_groups(replace(LAYOUT, rank=rank))
    assert found == {
        (resource, len(ranks)): ranks
        for resource, groups in (("inter", inter), ("intra", intra))
        for ranks in groups
    }


@pytest.mark.parametrize(
    ("resource", "operation", "receive", "send"),
    [
        ("inter", "alltoall", [3, 3], [3, 3]),
        # A gather inside a node has unequal parts: of this rank, 4 rows.
        ("intra", "allgather", [4, 3], [4, 4]),
        ("inter", "allgather", [3, 3], [3, 3]),
    ],
)
def test_messages_by_hand(
    resource: Any, operation: Any, receive: Any, send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = mock.Mock()
    name = {"allgather": "start_all_gather", "alltoall": "start_all_to_all"}[operation]
    monkeypatch.setattr(timer, name, start)
    any_group: Any = None
    group = PeerGroup(name="", process_group=any_group, size=2, rank=0, nodes=(0, 1))
    starter = timer.starter_of({(resource, 2): group}, torch.device("cpu"), fused=False)
    starter(Point(operation, resource, group_size=2, num_rows=3, row_bytes=16))()
    output, message, *rows = start.call_args.args
    assert rows == [receive, send, group]
    sent = send[0] if operation == "allgather" else sum(send)
    assert (len(output), len(message)) == (sum(receive), sent)


@pytest.mark.parametrize(("operation", "value"), [("copy", 1), ("sum", NUM_COPIES)])
def test_rows_arrive_in_memory(operation: Any, value: float) -> None:
    starter = timer.starter_of({}, torch.device("cpu"), fused=False)
    point = Point(operation, "memory", group_size=1, num_rows=5, row_bytes=4096)
    results: Any = starter(point)()()
    assert results[-1].shape == (5, 1024) and torch.all(results[-1] == value)
