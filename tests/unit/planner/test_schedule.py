"""Schedules: by hand to the microsecond, against the recurrence, and between their bounds."""

from collections.abc import Sequence
from itertools import combinations, count
from typing import Any

import numpy as np
import pytest
from clusters import by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_pipeline import Stage

from monta_megatron.chains.program import Policy, with_waits
from monta_megatron.planner import schedule as program_schedule
from monta_megatron.planner.curves import RESOURCES
from monta_megatron.planner.schedule import Factor, Task

# [stages][C] when each operation ends.
Schedule = list[list[float]]
# Of a chunk, or of a launch.
US = st.just(0.0) | st.floats(0.01, 50)


def simulate(stages: Sequence[Stage], factor: Factor, policy: Policy = "streams") -> Schedule:
    """[stages][C]: stages one after the other on each chunk, each on a stream or in a group."""
    keys = sorted(
        (chunk + stage.depth, number, chunk)
        for number, stage in enumerate(stages)
        for chunk in range(len(stage.times_us))
    )
    numbers = {(stage, chunk): at for at, (_, stage, chunk) in enumerate(keys)}
    needs = [[] if stage == 0 else [numbers[stage - 1, chunk]] for _, stage, chunk in keys]
    operations = [
        stages[stage].operation(at, stage, chunk) for at, (_, stage, chunk) in enumerate(keys)
    ]
    tasks = [
        Task(
            resource=each.resource,
            us=stages[each.series].times_us[each.chunk],
            launch_us=stages[each.series].launch_us,
            after=each.after,
            launch_after=each.launch_after,
            copies_at_launch=each.host == "starts",
        )
        for each in with_waits(operations, needs, policy)
    ]
    ends_us = program_schedule.simulate(tasks, factor)
    return [
        [ends_us[numbers[number, chunk]] for chunk in range(len(stage.times_us))]
        for number, stage in enumerate(stages)
    ]


def total_us(schedule: Schedule) -> float:
    return max((end_us for of_stage in schedule for end_us in of_stage), default=0.0)


@pytest.mark.parametrize("case", by_hand("schedules"), ids=lambda case: str(case["stages"]))
def test_by_hand(case: dict[str, Any]) -> None:
    stages = [
        Stage(resource, tuple(us), case.get("launch_us", 0.0), depth)
        for (resource, us), depth in zip(case["stages"], case.get("depths", count()), strict=False)
    ]
    same, other = case.get("slowdown", (1.0, 1.0))
    schedule = simulate(
        stages, lambda *pair: same if pair[0] == pair[1] else other, case.get("policy", "streams")
    )
    assert total_us(schedule) == pytest.approx(case.get("total_us", total_us(schedule)), abs=1e-9)
    if "end_us" in case:
        assert np.array(schedule) == pytest.approx(np.array(case["end_us"]), abs=1e-9)


@st.composite
def pipelines(draw: st.DrawFn, launch_us: st.SearchStrategy[float]) -> list[Stage]:
    num_chunks, depth = draw(st.integers(1, 9)), 0
    times = st.tuples(*[US] * num_chunks)
    stages = []
    for _ in range(draw(st.integers(1, 6))):
        resource = draw(st.sampled_from(RESOURCES))
        stages.append(Stage(resource, draw(times), draw(launch_us), depth))
        depth += draw(st.integers(0, 1))
    return stages


@settings(deadline=None)
@given(pipelines(launch_us=st.just(0.0)))
def test_without_contention_it_is_the_recurrence(stages: list[Stage]) -> None:
    """ends[s][c] = max(ends[s - 1][c], ends[s][c - 1]) + times[s][c]."""
    expected = [0.0] * len(stages[0].times_us)
    for stage, found in zip(stages, simulate(stages, lambda *_: 1.0), strict=True):
        before = 0.0
        for chunk, us in enumerate(stage.times_us):
            before = expected[chunk] = max(before, expected[chunk]) + us
        assert found == pytest.approx(expected, abs=1e-6)


@settings(max_examples=300, deadline=None)
@given(
    pipelines(launch_us=US),
    st.tuples(*[st.sampled_from((1.0, 1.2, 2.0, 3.0)) | st.floats(1, 4)] * 3),
    st.sampled_from(("streams", "host")),
)
def test_between_the_busiest_resource_and_one_after_the_other(
    stages: list[Stage], factors: tuple[float, ...], policy: Policy
) -> None:
    """By any factors of different resources; operations on one share it."""
    pairs = dict(zip(map(frozenset, combinations(RESOURCES, 2)), factors, strict=True))
    schedule = simulate(stages, lambda *pair: pairs.get(frozenset(pair), 2.0), policy)
    busy_us = [
        sum(sum(each.times_us) for each in stages if each.resource == resource)
        for resource in RESOURCES
    ]
    busy_us.append(sum(each.launch_us * len(each.times_us) for each in stages))
    assert max(busy_us) * (1 - 1e-9) <= total_us(schedule)
    assert total_us(schedule) <= sum(busy_us) * (1 + 1e-9)
