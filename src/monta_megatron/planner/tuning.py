"""Choosing: the planner proposes candidates, measured iterations decide. No torch.

    choice          a chain, its number of chunks, and whether its experts are split (`core.Choice`)
    pick            the planner's choice, by predicted times alone
    candidate       a choice to measure; plain alltoall is always one
    trial           an optimizer step that runs one candidate; its whole iteration is timed
    warm-up         the first trial of a candidate, which is not compared
    round           steps in which every candidate has a trial
    tuning window   three rounds, in a round robin; up to nine where they do not decide
    winner          the candidate with the shortest iteration; of equal ones, the best predicted

    step                    choice
    before the window       the planner's pick
    first ... end - 1       a candidate
    end, end + 1            the best so far; the times of the last trials are still on their way
    from end + 2            the winner; the planner's pick if the window has decided nothing

Everything here follows from data that all ranks of an expert group share. Nothing follows from what
other groups do, but their rounds are in phase: the step number modulo the length of a round gives
the candidate. `planner.trials` says which trials can be compared, and how.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from monta_megatron.common.text import counted
from monta_megatron.core import Choice
from monta_megatron.planner.choose import STOCK, Planner, half_octave
from monta_megatron.planner.trials import Comparison, Trial, Work, compare, timed_trials

# Rounds of a tuning window, and of one that goes on because it has decided nothing.
ROUNDS, MAX_ROUNDS = 3, 9
# All ranks know the time of step n at the first training counts of step n + TIME_LAG.
TIME_LAG = 2
# Iterations in a row that take so many times what the winner's trials took are worth a line.
SLOWER, NUM_SLOWER = 1.3, 20
# From the first window to the second, because early routing is untrained.
STEPS_TO_SECOND = 1000


@dataclass(kw_only=True)
class TuningWindow:
    """Steps in which the candidates of an expert group have trials in a round robin.

    Attributes:
        candidates: candidates with their predicted us; plain alltoall comes first.
        tokens: tokens of a rank that the predictions are for.
        first: number of the first step.
        num_steps: length of the first three rounds; 0 where candidates are not measured.
        num_rounds: number of rounds so far.
        end: number of the first step after the window.
        warm: candidates that this group ran in an earlier window.
        trials: trials by step.
        comparison: comparison of the trials so far; None before the first time.
        best: the fastest so far, of equal ones the best predicted; None if none is measured, or if
            the window has ended and decided nothing.
    """

    candidates: dict[Choice, float]
    tokens: int
    first: int
    num_steps: int
    num_rounds: int = ROUNDS
    end: int = field(init=False)
    warm: set[Choice] = field(default_factory=set)
    trials: dict[int, Trial] = field(default_factory=dict)
    comparison: Comparison | None = None
    best: Choice | None = None
    _num_slower: int = 0

    def __post_init__(self) -> None:
        self.end = self.first + self.num_steps

    def is_open(self, step: int) -> bool:
        """Whether trials run, or their times are still on their way."""
        return step < self.end + TIME_LAG and self.num_steps > 0

    def candidate_of(self, step: int) -> Choice | None:
        """The candidate of a step; None outside the window."""
        if not self.first <= step < self.end:
            return None
        # Candidates repeat if there are fewer of them than steps in a round.
        place = step % self._steps_of_round
        return list(self.candidates)[place % len(self.candidates)]

    @property
    def _steps_of_round(self) -> int:
        return self.num_steps // ROUNDS

    def add_trial(self, step: int, work: Work) -> None:
        """Add the trial of a step that has ended; nothing outside the window."""
        candidate = self.candidate_of(step)
        if candidate is not None:
            self.trials[step] = Trial(candidate, work)

    def add_time(self, step: int, us: int, work: Work | None = None) -> str | None:
        """Add the longest iteration of any rank in a step, of the window or later.

        Returns:
            A line for the log if later iterations have been slower than the winner's for long.
        """
        if step not in self.trials:
            return None if work is None else self._slower(us, work)
        self.trials[step] = self.trials[step]._replace(us=us)
        self.comparison = compare(timed_trials(self.trials.values(), self.warm))
        if self.comparison is not None:
            self.best = self.comparison.best(self.candidates)
        return None

    def end_round(self, step: int) -> None:
        """Go on for another round, if the times decide nothing and the window may; or decide.

        Args:
            step: the step that begins: `end`, when the last times are on their way, or the first
                step in which all are known.
        """
        if self.comparison is None or self.best is None:
            return
        last_trials = [
            self.trials[late] for late in range(step - TIME_LAG, step) if late in self.trials
        ]
        in_flight = Counter(trial.candidate for trial in last_trials)
        is_last = self.num_rounds == MAX_ROUNDS
        if self.comparison.is_decided(self.best, in_flight, is_last):
            return
        if not is_last:
            self.num_rounds += 1
            self.end = step + self._steps_of_round
        elif not self.is_open(step):
            self.best = None

    def _slower(self, us: int, work: Work) -> str | None:
        expected_us = self._expected_us(work)
        if expected_us is None:
            return None
        assert self.best is not None, "its time is expected"
        self._num_slower = self._num_slower + 1 if us > SLOWER * expected_us else 0
        if self._num_slower != NUM_SLOWER:
            return None
        return (
            f"auto: {NUM_SLOWER} iterations in a row took {SLOWER} times as long as "
            f"{self.best.name} did in its trials, {us / 1e3:,.1f} ms instead of "
            f"{expected_us / 1e3:,.1f}"
        )

    def _expected_us(self, work: Work) -> float | None:
        """Time of the winner for a step of such work, by its trials; None if they do not say."""
        if self.comparison is None or self.best is None:
            return None
        relative_work = self.comparison.relative_work(work)
        return None if relative_work is None else relative_work * self.comparison.us[self.best]

    def is_near(self, tokens: int) -> bool:
        """Whether so many tokens are within a factor 2 of those that are, or will be, measured."""
        measured = self.comparison
        fewest = self.tokens if measured is None else measured.min_tokens
        most = self.tokens if measured is None else measured.max_tokens
        return half_octave(fewest) <= 2 * half_octave(tokens) <= 4 * half_octave(most)

    def winner(self, tokens: int) -> Choice | None:
        """The best for so many tokens; None if they are not near those that were measured."""
        return self.best if self.is_near(tokens) else None

    @property
    def cost(self) -> float:
        """Extra time of the trials over the winner's, as a number of its iterations.

        Trials whose work cannot be compared are left out.
        """
        cost = 0.0
        for trial in self.trials.values():
            expected_us = self._expected_us(trial.work)
            if trial.us and expected_us:
                cost += trial.us / expected_us - 1
        return cost

    @property
    def result(self) -> str:
        """The result as a line of the log."""
        comparison = self.comparison
        if comparison is None:
            lost = "times were lost" if self.trials else "no step had a backward pass on all ranks"
            return f"no candidate was measured, as {lost}; the planner's pick stays"
        steps = f"steps {self.first} to {self.end - 1}"
        work = "" if comparison.kind else ", for steps of unequal work, compared per token"
        if self.best is None:
            text = (
                f"no candidate wins by trials in {steps}{work}; the planner's pick stays, since "
                f"{comparison.why_undecided(self.candidates)}"
            )
        else:
            text = (
                f"{self.best.name} wins with {comparison.us[self.best] / 1e3:,.2f} ms per "
                f"iteration{self._saved(comparison.us, self.best)}{work}; trials in {steps} cost "
                f"{self.cost:.1f} iterations; pin it with {self.best.flags}"
            )
        candidates = (
            f"{choice.name} {predicted_us:,.0f}, "
            + (f"{comparison.us[choice] / 1e3:,.2f}" if choice in comparison.us else "not measured")
            for choice, predicted_us in self.candidates.items()
        )
        return f"{text}; us predicted and ms measured: {'; '.join(candidates)}"

    @staticmethod
    def _saved(us: dict[Choice, float], best: Choice) -> str:
        if STOCK not in us or best == STOCK:
            return ""
        share = 1 - us[best] / us[STOCK]
        return f", {abs(share):.1%} {'more' if share < 0 else 'less'} than plain alltoall"


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
    # Work of the steps that ended since `timed_step`.
    _works: dict[int, Work] = field(default_factory=dict)
    # Most tokens of any rank in an exchange of the last step that had work.
    _tokens: int = 0
    # Whether the window was opened by an exchange, before the work of any step was known.
    _is_new: bool = False
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

    def add_time(self, us: int) -> None:
        """Add the longest iteration of any rank in `timed_step`."""
        step = self.timed_step
        if self.window is not None and (
            line := self.window.add_time(step, us, self._works.get(step))
        ):
            self.report(line)

    def next_step(self, tokens: Sequence[int], others_tune: bool) -> None:
        """End this step, and choose for the next one.

        Args:
            tokens: the most tokens of any rank in each exchange of this step that a backward pass
                followed; empty if it had none, or none that can be compared.
            others_tune: whether other layers of the group have an open window.
        """
        is_for_others = False
        if tokens:
            work = Work(num_exchanges=len(tokens), tokens=sum(tokens), max_tokens=max(tokens))
            self._works[self.step], self._tokens = work, work.max_tokens
            if self.window is not None:
                is_for_others = self._is_new and not self.window.is_near(work.max_tokens)
                self._is_new = False
                self.window.add_trial(self.step, work)
        self._works.pop(self.timed_step, None)
        self.step += 1
        self.result = None
        if self.window is not None and self.window.num_steps:
            self._end_round(self.window)
        if is_for_others:
            # Log-probabilities opened it, of other numbers of tokens.
            self.window = None
        is_due = self.step >= self._second_due_at and not self.is_open and not others_tune
        if is_due or is_for_others:
            self._open_window(self._tokens)
        elif self.window is not None:
            self._choose()

    def _end_round(self, window: TuningWindow) -> None:
        """Let the window decide or go on; set the result of one that has ended."""
        ends = self.step == window.end + TIME_LAG
        if ends or self.step == window.end:
            window.end_round(self.step)
        if ends and not window.is_open(self.step):
            self.result = window.result

    def open_window(self, tokens: int) -> None:
        """Open the first window at the first exchange of a step, with so many tokens on a rank.

        It is opened anew after that step if the training has other numbers of tokens.
        """
        self._is_new = True
        self._open_window(tokens)

    def _open_window(self, tokens: int) -> None:
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
            candidates=candidates,
            tokens=tokens,
            first=self.step,
            num_steps=num_steps,
            warm=warm,
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
