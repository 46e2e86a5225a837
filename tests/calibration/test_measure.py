"""Process groups worked by hand, and runs timed with a fake clock; no launch is needed."""

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_cluster_file import SHAPE, points_on

from monta_megatron.chains.calibration_tasks import Pair, Point, Repeated, Sample
from monta_megatron.chains.layout import Ctas, Layout
from monta_megatron.exchange.calibration import timer
from monta_megatron.exchange.calibration.timer import Timer
from monta_megatron.planner.calibration.points import series_of_exchange
from monta_megatron.planner.chain_policy import chains_for
from monta_megatron.tools.calibrate import run as groups_of_cluster


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
    budgets: dict[str, int | None] = {}

    def new_local_group(ranks: list[int], name: str, like: object, budget: int | None) -> list[int]:
        budgets[name] = budget
        return ranks

    monkeypatch.setattr(groups_of_cluster, "new_local_group", new_local_group)
    made = groups_of_cluster.make_groups(SHAPE, (0, 0, 0, 0, 1, 1, 1, 1), Ctas(rail=3, node=9))
    assert {key: group.process_group for key, group in made.items()} == groups
    for key, group in made.items():
        assert (group.size, group.rank) == (len(groups[key]), groups[key].index(rank))
        assert group.nodes == tuple(rank // 4 for rank in groups[key])
    # Rails and the node are communicators of our own.
    own = {name: budget for name, budget in budgets.items() if budget is not None}
    assert own == {"monta inter 1": 3, "monta intra 4": 9}


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


@pytest.mark.parametrize(
    ("ep", "etp", "series"),
    [
        # Rails are EP groups here, and nodes are ETP groups.
        (
            2,
            4,
            {
                ("alltoall", "inter", 2, 1),
                ("alltoall", "inter", 8, 4),
                ("allgather", "inter", 8, 4),
                ("alltoall", "intra", 4, 4),
                ("allgather", "intra", 4, 4),
            },
        ),
        (
            4,
            2,
            {
                ("alltoall", "inter", 2, 1),
                ("alltoall", "inter", 4, 2),
                ("alltoall", "inter", 8, 4),
                ("allgather", "inter", 8, 4),
                ("alltoall", "intra", 2, 2),
                ("allgather", "intra", 2, 2),
                ("alltoall", "intra", 4, 4),
                ("allgather", "intra", 4, 4),
            },
        ),
    ],
)
def test_an_exchange_is_measured_in_its_own_groups(
    ep: int, etp: int, series: set[tuple[Any, ...]]
) -> None:
    """2 nodes of 4 ranks."""
    layout = Layout(ep=ep, etp=etp, num_local_experts=1, rank=0, nodes=(0,) * 4 + (1,) * 4)
    found = series_of_exchange(chains_for(layout), layout)
    assert set(found) == series
    for entry, group in found.items():
        members = layout.members(group, layout.rank)
        assert entry.group_size == len(members)
        nodes = [layout.nodes[member] for member in members]
        assert entry.ranks_on_node == nodes.count(nodes[0])


def test_uneven_groups_are_not_measured() -> None:
    layout = Layout(ep=3, etp=1, num_local_experts=1, rank=0, nodes=(0, 0, 1))
    with pytest.raises(ValueError, match="the ranks of its ep groups lie unevenly on the nodes"):
        series_of_exchange(chains_for(layout), layout)


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


def test_sizes_grow_while_there_is_time(clock: Clock) -> None:
    """An exchange at 1 us per byte and a copy at 0.1 ns: the exchange has its two least sizes."""
    exchanges, copies = points_of("allgather")[:6], points_of("copy")
    for point, us_per_byte in [(e, 1.0) for e in exchanges] + [(c, 1e-4) for c in copies]:
        clock.set(point, 0.0, us_per_byte * point.num_bytes)
    timer, taken = clock.timer(), []
    times_us = timer.first_runs(
        [*exchanges, *copies], {}, lambda point, us: taken.append(point), budget_s=0.5
    )
    assert [point for point in exchanges if point in times_us] == exchanges[:2]
    assert [point for point in copies if point in times_us] == copies
    # The exchange takes 5 and 20 ms, and then 82, which is too long for 5 rounds.
    assert timer.elapsed_s < 0.5 and list(times_us) == taken
    assert set(clock.timer().first_runs(exchanges, {}, lambda point, us: None)) == {*exchanges}
