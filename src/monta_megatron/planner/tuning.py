"""Choosing: the planner proposes candidates, measured iterations decide. No torch.

    choice          a chain, its number of chunks, and whether its experts are split (`core.Choice`)
    pick            the planner's choice, by predicted times alone
    candidate       a choice to measure; plain alltoall is always one
    trial           an optimizer step that runs one candidate; its whole iteration is timed
    warm-up         the first trial of a candidate, which is not compared
    round           steps in which every candidate has a trial
    tuning window   three rounds, in a round robin
    winner          the candidate with the shortest iteration; of equal ones, the best predicted

    step                    choice
    before the window       the planner's pick
    first ... end - 1       a candidate
    end, end + 1            the best so far; the times of the last trials are still on their way
    from end + 2            the winner

Everything here follows from data that all ranks of an expert group share. Nothing follows from what
other groups do, but their rounds are in phase: the step number modulo the length of a round gives
the candidate.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import NamedTuple

from monta_megatron.common.text import counted
from monta_megatron.core import Choice
from monta_megatron.planner.choose import STOCK, Planner, half_octave

# Rounds of a tuning window.
ROUNDS = 3
# All ranks know the time of step n at the first training counts of step n + TIME_LAG.
TIME_LAG = 2
# Iterations count as equal within 1%, or within the median spread of a candidate's, up to 5%.
EQUAL, MOST_EQUAL = 1.01, 1.05
# Iterations in a row that take so many times what the winner's trials took are worth a line.
SLOWER, NUM_SLOWER = 1.3, 20
# From the first window to the second, because early routing is untrained.
STEPS_TO_SECOND = 1000


class Workload(NamedTuple):
    """Size of a step; only steps of one workload are compared.

    Attributes:
        num_exchanges: number of training exchanges.
        tokens: half octave of the most tokens of any rank in one of them.
    """

    num_exchanges: int
    tokens: int


class Trial(NamedTuple):
    """An optimizer step that runs one candidate.

    Attributes:
        candidate: the one that runs.
        workload: of the step.
        us: the longest iteration of any rank; None until it is known, or if a rank has none.
    """

    candidate: Choice
    workload: Workload
    us: int | None = None


@dataclass(kw_only=True)
class TuningWindow:
    """Steps in which the candidates of an expert group have trials in a round robin.

    Attributes:
        candidates: with their predicted us; plain alltoall comes first.
        first: number of the first step.
        num_steps: length of the window; 0 where candidates are not measured.
        warm: candidates that this group ran in an earlier window.
        trials: by step.
        workload: the most frequent one of the timed trials; of several, the largest.
        measured_us: the shortest iteration of each candidate, over its timed trials of that
            workload but the warm-up.
        best: the fastest so far, of equal ones the best predicted; None if none is measured.
    """

    candidates: dict[Choice, float]
    first: int
    num_steps: int
    warm: set[Choice] = field(default_factory=set)
    trials: dict[int, Trial] = field(default_factory=dict)
    workload: Workload | None = None
    measured_us: dict[Choice, int] = field(default_factory=dict)
    best: Choice | None = None
    _num_slower: int = 0

    @property
    def end(self) -> int:
        """The first step after the window."""
        return self.first + self.num_steps

    def is_open(self, step: int) -> bool:
        """Whether trials run, or their times are still on their way."""
        return step < self.end + TIME_LAG and self.num_steps > 0

    def candidate_of(self, step: int) -> Choice | None:
        """The candidate of a step; None outside the window."""
        if not self.first <= step < self.end:
            return None
        # Candidates repeat if there are fewer of them than steps in a round.
        place = step % (self.num_steps // ROUNDS)
        return list(self.candidates)[place % len(self.candidates)]

    def add_trial(self, step: int, workload: Workload) -> None:
        """Add the trial of a step that has ended; nothing outside the window."""
        candidate = self.candidate_of(step)
        if candidate is not None:
            self.trials[step] = Trial(candidate, workload)

    def add_time(self, step: int, us: int, workload: Workload | None = None) -> str | None:
        """Add the longest iteration of any rank in a step, of the window or later.

        Returns:
            A line for the log if later iterations have been slower than the winner's for long.
        """
        if step not in self.trials:
            return self._slower(us) if workload == self.workload else None
        self.trials[step] = self.trials[step]._replace(us=us)
        timed, warm = list[Trial](), set(self.warm)
        for trial in self.trials.values():
            if trial.us and trial.candidate in warm:
                timed.append(trial)
            warm.add(trial.candidate)
        frequency = Counter(trial.workload for trial in timed)
        self.workload = max(frequency, key=lambda each: (frequency[each], each), default=None)
        times: dict[Choice, list[int]] = {}
        for trial in timed:
            if trial.workload == self.workload and trial.us:
                times.setdefault(trial.candidate, []).append(trial.us)
        self.measured_us = least = {each: min(of) for each, of in times.items()}
        spreads = [max(of) / min(of) for of in times.values() if len(of) > 1]
        equal = min(max(EQUAL, median(spreads or [EQUAL])), MOST_EQUAL)
        # The winner is at most 1% slower than plain alltoall.
        limit = min(equal * min(least.values(), default=0), EQUAL * least.get(STOCK, inf))
        near = [each for each in least if least[each] <= limit]
        self.best = min(
            near, key=lambda each: (round(self.candidates[each], 1), each), default=None
        )
        return None

    def _slower(self, us: int) -> str | None:
        if self.best is None:
            return None
        measured_us = self.measured_us[self.best]
        self._num_slower = self._num_slower + 1 if us > SLOWER * measured_us else 0
        if self._num_slower != NUM_SLOWER:
            return None
        return (
            f"auto: {NUM_SLOWER} iterations in a row took {SLOWER} times as long as "
            f"{self.best.name} did in its trials, {us / 1e3:,.1f} ms instead of "
            f"{measured_us / 1e3:,.1f}"
        )

    def winner(self, tokens: int) -> Choice | None:
        """The best for so many tokens; None outside of a factor 2 of those that were measured."""
        if self.workload is None or not 0.5 <= tokens / self.workload.tokens <= 2:
            return None
        return self.best

    @property
    def cost(self) -> float:
        """Extra time of the trials over the winner's, as a number of its iterations.

        Trials of another workload are left out: they take another time.
        """
        if self.best is None:
            return 0.0
        least = self.measured_us[self.best]
        same = (trial for trial in self.trials.values() if trial.workload == self.workload)
        return sum(trial.us / least - 1 for trial in same if trial.us)

    @property
    def result(self) -> str:
        """The result as a line of the log."""
        best, measured_us = self.best, self.measured_us
        if best is None:
            return "no candidate was measured, as times were lost; the planner's pick stays"
        saved = ""
        if STOCK in measured_us and best != STOCK:
            share = 1 - measured_us[best] / measured_us[STOCK]
            saved = f", {abs(share):.1%} {'more' if share < 0 else 'less'} than plain alltoall"
        candidates = (
            f"{choice.name} {predicted_us:,.0f}, "
            + (f"{measured_us[choice] / 1e3:,.2f}" if choice in measured_us else "not measured")
            for choice, predicted_us in self.candidates.items()
        )
        return (
            f"{best.name} wins with {measured_us[best] / 1e3:,.2f} ms per iteration{saved}; trials "
            f"in steps {self.first} to {self.end - 1} cost {self.cost:.1f} iterations; pin it with "
            f"{best.flags}; us predicted and ms measured: {'; '.join(candidates)}"
        )


@dataclass(kw_only=True)
class Tuner:
    """Chooses for every optimizer step of the layers of one shape in an expert group.

    With 6 steps of tuning a round has 2 steps, one for A (plain alltoall) and one for B:

        step   choice   at the first training counts
        0      A        `open_window`, for steps 0 to 5
        1      B
        2      A        `add_time` of step 0: A's warm-up, not compared
        3      B        of step 1: B's warm-up, not compared
        4, 5   A, B     of step 2: A is the best so far; of step 3: A or B is
        6, 7   best     of steps 4 and 5, the last trials
        8      the winner, which `result` names

    Attributes:
        planner: proposes candidates.
        num_steps: length of a window; 0 if candidates are not measured.
        report: called with each line for the log.
        step: number of the step, from 0.
        window: the latest one; None before the first training exchange.
        choice: of this step; None before the first training exchange.
        result: of the window, in the step that begins once its last time is known; else None.
    """

    planner: Planner
    num_steps: int
    report: Callable[[str], None]
    step: int = 0
    window: TuningWindow | None = None
    choice: Choice | None = None
    result: str | None = None
    # Number of training exchanges, and the most tokens of any rank in one, since `timed_step`.
    _exchanges: dict[int, tuple[int, int]] = field(default_factory=dict)
    # Most tokens of any rank, in the last step that had training exchanges.
    _tokens: int = 0
    _second_due_at: float = inf
    _announced: set[Choice] = field(default_factory=set)
    _picked: set[tuple[Choice, str]] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Whether a window is open."""
        return self.window is not None and self.window.is_open(self.step)

    @property
    def timed_step(self) -> int:
        """The step whose time all ranks get to know in this step."""
        return self.step - TIME_LAG

    def workload(self, step: int) -> Workload | None:
        """Workload of a step since `timed_step`; None without training exchanges."""
        number, tokens = self._exchanges.get(step, (0, 0))
        return Workload(number, half_octave(tokens)) if number else None

    def add_exchange(self, tokens: int) -> None:
        """Add a training exchange to this step, with at most so many tokens on a rank."""
        number, most = self._exchanges.get(self.step, (0, 0))
        self._exchanges[self.step] = number + 1, max(most, tokens)

    def add_time(self, us: int) -> None:
        """Add the longest iteration of any rank in `timed_step`."""
        step = self.timed_step
        if self.window is not None and (
            line := self.window.add_time(step, us, self.workload(step))
        ):
            self.report(line)

    def next_step(self, others_tune: bool) -> None:
        """End this step, and choose for the next one.

        Args:
            others_tune: whether other layers of the group have an open window.
        """
        if (workload := self.workload(self.step)) is not None:
            _, self._tokens = self._exchanges[self.step]
            if self.window is not None:
                self.window.add_trial(self.step, workload)
        self._exchanges.pop(self.timed_step, None)
        self.step += 1
        window, self.result = self.window, None
        if window is not None and window.num_steps and self.step == window.end + TIME_LAG:
            self.result = window.result
        if self.step >= self._second_due_at and not self.is_open and not others_tune:
            self.open_window(self._tokens)
        elif self.window is not None:
            self._choose()

    def open_window(self, tokens: int) -> None:
        """Open a window in this step, with the candidates for `tokens` on a rank, and choose."""
        candidates, num_steps = dict[Choice, float](), self.num_steps
        if num_steps:
            candidates = self.planner.candidates(tokens, num_steps // ROUNDS)
            if len(candidates) < 2:
                num_steps = 0
                self.report(f"{self._where}: no tuning, plain alltoall is the only candidate")
        warm, self._second_due_at = set[Choice](), inf
        if self.window is not None:
            warm = {trial.candidate for trial in self.window.trials.values()}
        elif self.num_steps:
            self._second_due_at = self.step + STEPS_TO_SECOND
        self.window = TuningWindow(
            candidates=candidates, first=self.step, num_steps=num_steps, warm=warm
        )
        self._tokens = tokens
        if num_steps:
            pick, why = self.planner.pick(tokens)
            self.report(
                f"{self._where}: tuning window of {counted(len(candidates), 'candidate')} in steps "
                f"{self.step} to {self.window.end - 1}; the planner's pick is {pick.name}: {why}"
            )
        self._choose()

    def pick(self, tokens: int) -> Choice:
        """Return the planner's pick for at most `tokens` on a rank; report a new one."""
        picked = pick, why = self.planner.pick(tokens)
        if picked not in self._picked:
            self._picked.add(picked)
            self.report(f"{self._where}: {pick.name}, {why}")
        return pick

    def _choose(self) -> None:
        """Choose for this step: a candidate of the window, its best, or the planner's pick."""
        assert self.window is not None, "opened"
        candidate = self.window.candidate_of(self.step)
        if candidate is not None and candidate not in self._announced:
            # Before its first trial, which may run out of memory.
            self._announced.add(candidate)
            self.report(f"auto: step {self.step} is the first with {candidate.name}")
        tokens = half_octave(self._tokens)
        self.choice = candidate or self.window.winner(tokens) or self.pick(tokens)

    @property
    def _where(self) -> str:
        assert self.planner.shape is not None, "priced"
        return f"auto, {self.planner.shape.layout.name}"
