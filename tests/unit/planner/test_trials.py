"""Tuning windows in which the work of a step is drawn anew, as a study and by hand."""

import ast
import inspect
import random
from collections.abc import Iterator
from functools import cache
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import pytest
from test_study import CLUSTERS, planner_of, shapes

from monta_megatron.core import Choice, Shape
from monta_megatron.planner import trials
from monta_megatron.planner.choose import STOCK, Planner
from monta_megatron.planner.trials import Work
from monta_megatron.planner.tuning import MAX_ROUNDS, ROUNDS, TIME_LAG, Tuner, TuningWindow

NUM_DRAWS, TUNE_STEPS = 200, 24
MEAN_TOKENS, SIGMA, MAX_MICRO_BATCHES, NOISE = 4096, 0.5, 8, 0.05
# Between these numbers of tokens prices are interpolated.
GRID = [512 << power for power in range(7)]


class Draw(NamedTuple):
    """A layer that a wrong cluster proposes candidates for, and a right one prices."""

    shape: Shape
    assumed: str
    true: str


def draws() -> Iterator[Draw]:
    cases = [
        Draw(shape, *names)
        for shape in shapes()
        for names in permutations(
            [name for name, of in CLUSTERS.items() if shape.layout.num_nodes <= of.num_nodes], 2
        )
    ]
    yield from random.Random(0).sample(cases, NUM_DRAWS)


class TrueTimes:
    """Microseconds of the choices of one draw, by its true cluster."""

    def __init__(self, draw: Draw) -> None:
        planner = planner_of(draw.shape, draw.true)
        prices = [planner.selection(tokens).prices for tokens in GRID]
        by_choice = [{price.choice: price.total_us for price in priced} for priced in prices]
        self._us = {choice: [us[choice] for us in by_choice] for choice in by_choice[0]}

    def of_exchanges(self, choice: Choice, tokens: np.ndarray) -> np.ndarray:
        return np.interp(tokens, GRID, self._us[choice])


def tokens_of_step(generator: np.random.Generator) -> np.ndarray:
    number = generator.integers(1, MAX_MICRO_BATCHES + 1)
    tokens = MEAN_TOKENS * np.exp(SIGMA * generator.standard_normal(number))
    return np.maximum(tokens.astype(int), 1)


class Tuned(NamedTuple):
    """Result of a window.

    Attributes:
        winner: the winner; None where the planner's pick stays.
        excess: expected time of what runs over that of the best candidate, less 1.
        over_pick: the same over that of the planner's pick.
        num_steps: steps until the result.
    """

    winner: Choice | None
    excess: float
    over_pick: float
    num_steps: int


def tune(planner: Planner, times: TrueTimes, draw_tokens: Any, seed: int) -> Tuned:
    """The real tuner through its first window."""
    generator = np.random.default_rng(seed)
    tuner = Tuner(planner=planner, num_steps=TUNE_STEPS, report=lambda line: None)
    measured_us = list[int]()
    while tuner.result is None:
        tokens = draw_tokens(generator)
        if tuner.step >= TIME_LAG:
            tuner.add_time(measured_us[tuner.timed_step])
        if tuner.window is None:
            tuner.open_window(int(tokens[0]))
        assert tuner.choice is not None
        noise = 1 + NOISE * generator.standard_normal()
        us = times.of_exchanges(tuner.choice, tokens).sum() * noise
        measured_us.append(10 * max(round(us / 10), 1))
        tuner.next_step(tokens.tolist(), others_tune=False)
    assert tuner.window is not None
    sample = np.concatenate([tokens_of_step(np.random.default_rng(n)) for n in range(500)])
    expected_us = cache(lambda choice: times.of_exchanges(choice, sample).mean())
    pick, _ = planner.pick(MEAN_TOKENS)
    runs_us = expected_us(tuner.window.best or pick)
    best_us = min(expected_us(choice) for choice in tuner.window.candidates)
    return Tuned(
        tuner.window.best, runs_us / best_us - 1, runs_us / expected_us(pick) - 1, tuner.step
    )


def test_trials_of_unequal_steps_find_a_choice_near_the_best() -> None:
    """1 to 8 micro-batches of unequal tokens in each step, the same for all candidates."""
    tuned = [
        tune(planner_of(draw.shape, draw.assumed), TrueTimes(draw), tokens_of_step, seed)
        for seed, draw in enumerate(draws())
    ]
    measured = [each for each in tuned if each.winner is not None]
    assert len(tuned) == NUM_DRAWS and len(measured) >= 0.7 * NUM_DRAWS
    assert np.mean([each.excess <= 0.03 for each in measured]) >= 0.95
    assert max(each.over_pick for each in tuned) <= 0.1
    # The first step may have other tokens than the exchange that opened the window. Each further
    # round may begin late: its window was decided, until the last times of the round before came.
    last = MAX_ROUNDS // ROUNDS * TUNE_STEPS + TIME_LAG + 1 + (MAX_ROUNDS - ROUNDS) * TIME_LAG
    assert all(TUNE_STEPS < each.num_steps <= last for each in tuned)


def test_a_window_of_equal_steps_stays_as_long() -> None:
    for seed, draw in list(enumerate(draws()))[:20]:
        times, planner = TrueTimes(draw), planner_of(draw.shape, draw.assumed)
        tuned = tune(planner, times, lambda _: np.full(4, MEAN_TOKENS), seed)
        assert tuned.winner is not None and tuned.num_steps == TUNE_STEPS + TIME_LAG


OTHER = Choice(chain="hierarchical_alltoall", num_chunks=2)
SMALL, LARGE = Work(1, 64, 64), Work(1, 448, 448)


def run_trials(window: TuningWindow, works: list[Work], times_us: list[int | None]) -> None:
    """The trials of the first steps, in turns; None where a rank has no time."""
    for step, (work, us) in enumerate(zip(works, times_us, strict=True)):
        window.add_trial(step, work)
        if us is not None:
            window.add_time(step, us)


def window_of(num_rounds: int) -> TuningWindow:
    """A window of two candidates that has come to its n-th round."""
    window = TuningWindow(candidates={STOCK: 100.0, OTHER: 50.0}, first=0, tokens=64, num_steps=6)
    window.num_rounds, window.end = num_rounds, 2 * num_rounds
    return window


def test_times_on_their_way_count_and_lost_ones_lengthen_the_window() -> None:
    """Equal work. The faster candidate is measured once beside its warm-up, in step 3."""
    window = window_of(3)
    run_trials(window, [SMALL] * 6, [9, 9, 100, 80, None, None])
    window.end_round(6)
    assert window.end == 6
    window.add_time(4, 100)
    window.end_round(8)
    assert (window.end, window.best) == (10, OTHER)


def test_without_two_measurements_the_pick_stays_and_the_line_says_why() -> None:
    window = window_of(9)
    run_trials(window, [SMALL] * 18, [9, 9, 100, 80] + [100, None] * 7)
    window.end_round(18)
    assert window.best == OTHER, "times are on their way"
    window.end_round(20)
    assert window.best is None and window.end == 18
    assert window.result.startswith(
        "no candidate wins by trials in steps 0 to 17; the planner's pick stays, since "
        f"{OTHER.name} was measured 1 time only; us predicted and ms measured: "
    )


@pytest.mark.parametrize(
    ("times_us", "why"),
    [([], "no step had a backward pass on all ranks"), ([None, None], "times were lost")],
)
def test_a_window_without_measurements_says_why(times_us: list[int | None], why: str) -> None:
    window = window_of(3)
    run_trials(window, [SMALL] * len(times_us), times_us)
    assert window.result == f"no candidate was measured, as {why}; the planner's pick stays"


def test_no_power_is_computed() -> None:
    """All hosts round products alike; C's pow, which `** 2` calls, they do not."""
    nodes = ast.walk(ast.parse(inspect.getsource(trials)))
    assert not any(isinstance(node, ast.Pow) for node in nodes)


@pytest.mark.parametrize(
    ("num_rounds", "rates", "end", "best"),
    [
        # Half of the time is a difference, whatever the work.
        (3, (5.0, 5.0), 6, OTHER),
        # 10% less with an error of 10% is none: another round, or the planner's pick.
        (3, (8.1, 9.9), 8, OTHER),
        (9, (8.1, 9.9), 18, None),
    ],
)
def test_unequal_work_is_decided_by_differences_beyond_their_errors(
    num_rounds: int, rates: tuple[float, float], end: int, best: Choice | None
) -> None:
    """Plain alltoall takes 10 us for each token, in steps of 1 x 64 and of 1 x 448 tokens."""
    window = window_of(num_rounds)
    times_us = [None, None, 640, round(448 * rates[0]), 4480, round(64 * rates[1])]
    run_trials(window, [SMALL, SMALL, SMALL, LARGE, LARGE, SMALL], times_us)
    last = window.end
    window.end_round(last)
    if window.end == last:
        window.end_round(last + TIME_LAG)
    assert (window.end, window.best) == (end, best)
    assert ("compared per token" in window.result) and ("pin it with" in window.result) == bool(
        best
    )
