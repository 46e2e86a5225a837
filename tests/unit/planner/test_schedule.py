"""Schedules: by hand to the microsecond, against the recurrence, and between their bounds."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import pytest
from linear_pipeline import Stage, operation_of, work_of

from monta_megatron.chains.program import Policy, Resource, with_waits
from monta_megatron.planner import schedule as program_schedule
from monta_megatron.planner.curves import RESOURCES
from monta_megatron.planner.price import Work
from monta_megatron.planner.schedule import Factor, Task


class Schedule(NamedTuple):
    """[stages][C] when each was launched, started and ended."""

    launched_us: tuple[tuple[float, ...], ...]
    starts_us: tuple[tuple[float, ...], ...]
    ends_us: tuple[tuple[float, ...], ...]

    @property
    def total_us(self) -> float:
        return max((us for ends in self.ends_us for us in ends), default=0.0)


def simulate(stages: Sequence[Stage], factor: Factor, copies_block_host: bool = False) -> Schedule:
    """Run stages one after the other on each chunk, each on a stream or in a group of its own."""
    policy: Policy = "host" if copies_block_host else "streams"
    keys = sorted(
        (chunk + stage.depth, number, chunk)
        for number, stage in enumerate(stages)
        for chunk in range(len(stage.work.times_us))
    )
    numbers = {(stage, chunk): at for at, (_, stage, chunk) in enumerate(keys)}
    needs = [[] if stage == 0 else [numbers[stage - 1, chunk]] for _, stage, chunk in keys]
    operations = [
        operation_of(at, stage, chunk, stages) for at, (_, stage, chunk) in enumerate(keys)
    ]
    tasks = [
        Task(
            work=each.series,
            chunk=each.chunk,
            operation=each.number,
            resource=each.resource,
            us=stages[each.series].work.times_us[each.chunk],
            launch_us=stages[each.series].work.launch_us,
            after=each.after,
            launch_after=each.launch_after,
            copies_at_launch=each.host == "starts",
        )
        for each in with_waits(operations, needs, policy)
    ]
    found = program_schedule.simulate(tasks, factor)
    return Schedule(
        *(
            tuple(
                tuple(
                    getattr(found[numbers[number, chunk]], field)
                    for chunk in range(len(stage.work.times_us))
                )
                for number, stage in enumerate(stages)
            )
            for field in ("launched_us", "start_us", "end_us")
        )
    )


def lower_bound_us(works: Sequence[Work]) -> float:
    """A time that no schedule beats: the busiest resource, whose operations share it, the host."""
    busy_us = {
        resource: sum(sum(work.times_us) for work in works if work.resource == resource)
        for resource in RESOURCES
    }
    return max(*busy_us.values(), sum(work.launch_us * len(work.times_us) for work in works))


def free(first: Resource, second: Resource) -> float:
    """Nothing slows anything."""
    return 1.0


def shared(first: Resource, second: Resource) -> float:
    """Two operations on one resource halve each other; others do not feel each other."""
    return 2.0 if first == second else 1.0


def slowed(first: Resource, second: Resource) -> float:
    """Likewise, but others slow each other by a half."""
    return 2.0 if first == second else 1.5


def works(*stages: tuple[Resource, tuple[float, ...]], launch_us: float = 0.0) -> list[Stage]:
    """Stages with their times, each a step behind the one before it."""
    return [
        Stage(work_of(f"s{depth}", resource, times, launch_us), depth)
        for depth, (resource, times) in enumerate(stages)
    ]


# By hand. Two stages of 10 and 4: chunk c leaves the first at 10 (c + 1) and the second 4 later.
# Of 4 and 10: the second is busy from 4 on. Three stages of 5, 8, 3: 5 + 8 per chunk + 3. Unequal
# chunks 6, 2 and 1, 9: the second stage has chunk 0 from 6 to 7 and chunk 1 from 8 to 17.
@pytest.mark.parametrize(
    ("stages", "total_us"),
    [
        ([(10.0,), (4.0,)], 14.0),
        ([(10.0,) * 2, (4.0,) * 2], 24.0),
        ([(10.0,) * 3, (4.0,) * 3], 34.0),
        ([(10.0,) * 4, (4.0,) * 4], 44.0),
        ([(4.0,) * 4, (10.0,) * 4], 44.0),
        ([(5.0,), (8.0,), (3.0,)], 16.0),
        ([(5.0,) * 2, (8.0,) * 2, (3.0,) * 2], 24.0),
        ([(5.0,) * 3, (8.0,) * 3, (3.0,) * 3], 32.0),
        ([(5.0,) * 4, (8.0,) * 4, (3.0,) * 4], 40.0),
        ([(6.0, 2.0), (1.0, 9.0)], 17.0),
        ([(3.0, 1.0, 2.0), (2.0, 5.0, 1.0), (4.0, 1.0, 6.0)], 17.0),
    ],
)
def test_by_hand(stages: list[tuple[float, ...]], total_us: float) -> None:
    schedule = simulate(works(*zip(RESOURCES, stages, strict=False)), free)
    assert schedule.total_us == pytest.approx(total_us, abs=1e-9)


def test_by_hand_with_contention() -> None:
    # Both stages on one resource, two chunks of 10: chunk 0's second and chunk 1's first share it
    # from 10 to 30, each at half its rate; then chunk 1's second runs alone.
    schedule = simulate(works(("memory", (10.0, 10.0)), ("memory", (10.0, 10.0))), shared)
    assert schedule.ends_us == ((10.0, 30.0), (30.0, 40.0))

    # A factor of 1.5: chunk 0's second (6 alone) beside chunk 1's first (10 alone) from 10 on. It
    # takes 9 and ends at 19; by then 6 of the other's 10 are done, and 4 more run alone.
    schedule = simulate(works(("inter", (10.0, 10.0)), ("intra", (6.0, 6.0))), slowed)
    assert schedule.ends_us[0] == pytest.approx((10.0, 23.0))
    assert schedule.ends_us[1] == pytest.approx((19.0, 29.0))


def test_by_hand_with_launches() -> None:
    # Program order: s0 c0, then s0 c1 and s1 c0, then s1 c1, launched at 3, 6, 9 and 12. s0 c0
    # runs from 3 to 5, s0 c1 from 6 to 8; s1 c0 waits for its launch at 9, s1 c1 for 12.
    schedule = simulate(works(("inter", (2.0, 2.0)), ("intra", (1.0, 1.0)), launch_us=3.0), free)
    assert schedule.starts_us == ((3.0, 6.0), (9.0, 12.0))
    assert schedule.total_us == 13.0


def test_by_hand_where_copies_block_the_host() -> None:
    # A collective of 10, then a copy of 4, two chunks. The host starts both collectives, which
    # share the network until 20; then it copies one chunk after the other until 28.
    stages = works(("inter", (10.0, 10.0)), ("memory", (4.0, 4.0)))
    assert simulate(stages, shared, copies_block_host=True).total_us == 28.0
    # A second chunk of 4 is done at 8, but its turn comes after the first: at 14, copied by 22.
    stages = works(("inter", (10.0, 4.0)), ("memory", (4.0, 4.0)))
    assert simulate(stages, shared, copies_block_host=True).ends_us == ((14.0, 8.0), (18.0, 22.0))
    # A copy of 15 before each collective of 10: the host copies chunk 1 while chunk 0 is on its
    # way, but cannot launch chunk 0's collective before its copy, nor two copies at once.
    stages = works(("memory", (15.0, 15.0)), ("inter", (10.0, 10.0)))
    stages = [stage._replace(depth=0) for stage in stages]
    schedule = simulate(stages, shared, copies_block_host=True)
    assert schedule.ends_us == ((15.0, 30.0), (25.0, 40.0))
    # A launch of 2 is the host's work too: the second one takes 3 beside the first collective,
    # which has done 2 of its 10 by then, at 5. Both halve each other until 21, when the second has
    # 2 left.
    stages = works(("inter", (10.0, 10.0)), launch_us=2.0)
    schedule = simulate(stages, slowed, copies_block_host=True)
    assert schedule.launched_us == schedule.starts_us == ((2.0, 5.0),)
    assert schedule.ends_us == ((21.0, 23.0),)
    # Two copies in a row never run at once, though they would not feel each other.
    stages = works(("memory", (5.0, 5.0)), ("memory", (5.0, 5.0)))
    assert simulate(stages, free, copies_block_host=True).total_us == 20.0
    assert simulate(stages, free).total_us == 15.0


def random_works(draw: Random, launches: bool) -> list[Stage]:
    num_stages, num_chunks = draw.randint(1, 6), draw.randint(1, 9)
    depth, found = 0, []
    for stage in range(num_stages):
        resource = draw.choice(RESOURCES)
        times = tuple(draw.choice([0.0, draw.uniform(0, 50)]) for _ in range(num_chunks))
        found.append(
            Stage(
                work_of(str(stage), resource, times, draw.uniform(0, 9) if launches else 0.0), depth
            )
        )
        depth += draw.randint(0, 1)
    return found


def random_factor(draw: Random) -> Factor:
    """Of any size; operations on one resource share it."""
    factors: dict[tuple[Resource, Resource], float] = {}
    for index, first in enumerate(RESOURCES):
        for second in RESOURCES[: index + 1]:
            factor = draw.choice([1.0, 1.2, 1.7, 2.0, 3.0, draw.uniform(1, 4)])
            factor = 2.0 if first == second else factor
            factors[first, second] = factors[second, first] = factor
    return lambda first, second: factors[first, second]


def recurrence_us(times_us: Sequence[Sequence[float]]) -> list[list[float]]:
    """ends[s][c] = max(ends[s - 1][c], ends[s][c - 1]) + times[s][c]."""
    ends: list[list[float]] = []
    for times in times_us:
        row: list[float] = []
        for chunk, time in enumerate(times):
            before = max(row[-1] if row else 0.0, ends[-1][chunk] if ends else 0.0)
            row.append(before + time)
        ends.append(row)
    return ends


def test_without_contention_it_is_the_recurrence() -> None:
    draw = Random(0)
    for _ in range(1_000):
        stages = random_works(draw, launches=False)
        expected = recurrence_us([stage.work.times_us for stage in stages])
        schedule = simulate(stages, free)
        for ends, row in zip(schedule.ends_us, expected, strict=True):
            assert ends == pytest.approx(row, abs=1e-6)


@pytest.mark.parametrize("copies_block_host", [False, True])
def test_between_the_busiest_resource_and_one_after_the_other(copies_block_host: bool) -> None:
    draw = Random(1)
    for case in range(1_000):
        stages = random_works(draw, launches=case % 2 == 0)
        factor = random_factor(draw)
        total_us = simulate(stages, factor, copies_block_host).total_us
        works = [stage.work for stage in stages]
        assert total_us >= lower_bound_us(works) * (1 - 1e-9)
        assert total_us <= sum(work.alone_us for work in works) * (1 + 1e-9)


def test_nothing_to_do() -> None:
    assert simulate([], free).total_us == 0.0
    assert lower_bound_us([]) == 0.0
