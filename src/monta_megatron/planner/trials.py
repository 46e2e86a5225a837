"""Trials of candidates, and how their times are compared. No torch.

Steps of equal work are compared by their least times: noise only ever adds. Where the numbers of
micro-batches and tokens are drawn anew in every step, as in reinforcement learning and with packed
sequences, no two trials may have the same work. They are compared per token instead, where every
exchange counts as some tokens more: its share of the time that does not depend on tokens. That
number is the same for all candidates, and is fitted to all of their trials.

Only sums, products and square roots are used, which all hosts round alike.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median
from typing import NamedTuple, TypeAlias

from monta_megatron.core import Choice
from monta_megatron.planner.choose import STOCK, half_octave

# Share of the compared trials that must be of one kind of work for it to count as equal.
EQUAL_SHARE = 0.75
# Iterations count as equally fast within 1%, or within the median spread of a candidate's times, up
# to 5%. With unequal work they count so within 1%, and more trials narrow their errors.
EQUAL, MAX_EQUAL = 1.01, 1.05
# Number of comparable measurements that a winner needs; the fastest candidate needs as many.
MIN_MEASURED = 2
# With unequal work, times differ if they lie so many standard errors apart. After the last round,
# the winner's time may have this relative standard error at most.
NUM_ERRORS, MAX_ERROR = 2.5, 0.022
# Overheads of an exchange that are fitted, in tokens.
OVERHEADS = (0, *(1 << power for power in range(4, 18)))

# Number of exchanges, and half octave of the most tokens of any rank in one of them.
KindOfWork: TypeAlias = tuple[int, int]


class Work(NamedTuple):
    """The training exchanges of one step.

    Attributes:
        num_exchanges: number of exchanges that a backward pass follows.
        tokens: sum over these of the most tokens on any rank, for which all others wait.
        max_tokens: the largest term of that sum.
    """

    num_exchanges: int
    tokens: int
    max_tokens: int

    @property
    def kind(self) -> KindOfWork:
        """Steps of one kind have equal work."""
        return self.num_exchanges, half_octave(self.max_tokens)


class Trial(NamedTuple):
    """An optimizer step that runs one candidate.

    Attributes:
        candidate: the candidate.
        work: work of the step.
        us: the longest iteration of any rank; None until it is known, or if a rank has none.
    """

    candidate: Choice
    work: Work
    us: int | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How fast candidates are by their trials.

    Attributes:
        kind: the kind of work that was compared; None for unequal work.
        min_tokens, max_tokens: range of `Work.max_tokens` over the compared trials.
        us: time of each candidate; for unequal work, of a step of mean work.
        num_measured: number of trials behind each time.
        equal: factor of the fastest time within which candidates count as equally fast.
        error: for unequal work, the relative standard deviation of one trial; else 0.
        overhead_tokens: for unequal work, tokens that each exchange counts in addition to its own.
        mean_work: for unequal work, the mean over trials of `work_of`.
    """

    kind: KindOfWork | None
    min_tokens: int
    max_tokens: int
    us: dict[Choice, float]
    num_measured: Counter[Choice]
    equal: float
    error: float = 0.0
    overhead_tokens: int = 0
    mean_work: float = 1.0

    @property
    def fastest(self) -> Choice:
        """The candidate with the least time."""
        return min(self.us, key=lambda candidate: (self.us[candidate], candidate))

    def best(self, predicted_us: dict[Choice, float]) -> Choice:
        """The best predicted of the fastest, which is at most 1% slower than plain alltoall."""
        limit_us = min(self.equal * self.us[self.fastest], EQUAL * self.us.get(STOCK, inf))
        near = [candidate for candidate, us in self.us.items() if us <= limit_us]
        return min(near, key=lambda candidate: (round(predicted_us[candidate], 1), candidate))

    def relative_work(self, work: Work) -> float | None:
        """Work of a step over that of `us`; None if they cannot be compared."""
        if self.kind is None:
            return work_of(work, self.overhead_tokens) / self.mean_work
        return 1.0 if work.kind == self.kind else None

    def is_decided(self, best: Choice, in_flight: Counter[Choice], is_last: bool) -> bool:
        """Whether the times say that `best` is the best.

        Args:
            best: the result of `best`.
            in_flight: trials whose times are on their way, by candidate.
            is_last: whether there are no more trials.
        """
        if self.kind is not None:
            return all(
                self.num_measured[candidate] + in_flight[candidate] >= MIN_MEASURED
                for candidate in (best, self.fastest)
            )
        if min(self.num_measured[best], self.num_measured[self.fastest]) < MIN_MEASURED:
            return False
        if is_last and self._error_of(best) <= MAX_ERROR:
            return True
        return all(
            self.us[best] * (1 + NUM_ERRORS * self._error_between(best, other))
            <= EQUAL * self.us[other]
            for other in self.us
            if other != best
        )

    def why_undecided(self, predicted_us: dict[Choice, float]) -> str:
        """The reason of a negative `is_decided` after the last round, for the log."""
        best = self.best(predicted_us)
        for candidate in (best, self.fastest):
            if self.num_measured[candidate] < MIN_MEASURED:
                return f"{candidate.name} was measured {self.num_measured[candidate]} time only"
        return (
            f"{best.name} has a standard error of {self._error_of(best):.2%}, above {MAX_ERROR:.1%}"
        )

    def _error_of(self, candidate: Choice) -> float:
        return self.error / sqrt(self.num_measured[candidate])

    def _error_between(self, one: Choice, other: Choice) -> float:
        return self.error * sqrt(1 / self.num_measured[one] + 1 / self.num_measured[other])


def timed_trials(trials: Iterable[Trial], warm: Set[Choice]) -> list[Trial]:
    """Trials with a time, in the order of their steps, without each candidate's warm-up.

    Args:
        trials: in the order of their steps.
        warm: candidates that ran before and need no warm-up.
    """
    timed, warmed_up = list[Trial](), set(warm)
    for trial in trials:
        if trial.us and trial.candidate in warmed_up:
            timed.append(trial)
        warmed_up.add(trial.candidate)
    return timed


def compare(timed: Sequence[Trial]) -> Comparison | None:
    """Compare timed trials; None without any."""
    if not timed:
        return None
    frequency = Counter(trial.work.kind for trial in timed)
    kind = max(frequency, key=lambda kind: (frequency[kind], kind))
    if frequency[kind] >= EQUAL_SHARE * len(timed):
        return _compare_equal(kind, [trial for trial in timed if trial.work.kind == kind])
    return _compare_unequal(timed)


def _compare_equal(kind: KindOfWork, timed: Sequence[Trial]) -> Comparison:
    times_us = defaultdict[Choice, list[int]](list)
    for trial in timed:
        assert trial.us, "timed"
        times_us[trial.candidate].append(trial.us)
    spreads = [max(times) / min(times) for times in times_us.values() if len(times) > 1]
    return Comparison(
        kind=kind,
        **_range_of_tokens(timed),
        us={candidate: min(times) for candidate, times in times_us.items()},
        num_measured=Counter({candidate: len(times) for candidate, times in times_us.items()}),
        equal=min(max(EQUAL, median(spreads or [EQUAL])), MAX_EQUAL),
    )


def _compare_unequal(timed: Sequence[Trial]) -> Comparison:
    overhead_tokens, rates, error = min(
        ((overhead, *_rates(timed, overhead)) for overhead in OVERHEADS),
        key=lambda fit: fit[2],
    )
    mean_work = fmean(work_of(trial.work, overhead_tokens) for trial in timed)
    return Comparison(
        kind=None,
        **_range_of_tokens(timed),
        us={candidate: rate * mean_work for candidate, rate in rates.items()},
        num_measured=Counter(trial.candidate for trial in timed),
        equal=EQUAL,
        error=error,
        overhead_tokens=overhead_tokens,
        mean_work=mean_work,
    )


def work_of(work: Work, overhead_tokens: int) -> float:
    """Work of a step in tokens; each exchange counts `overhead_tokens` in addition to its own."""
    return work.tokens + overhead_tokens * work.num_exchanges


def _rates(timed: Sequence[Trial], overhead_tokens: int) -> tuple[dict[Choice, float], float]:
    """Mean us per token of each candidate, and the relative standard deviation of one trial."""
    by_candidate = defaultdict[Choice, list[float]](list)
    for trial in timed:
        assert trial.us, "timed"
        by_candidate[trial.candidate].append(trial.us / work_of(trial.work, overhead_tokens))
    rates = {candidate: fmean(values) for candidate, values in by_candidate.items()}
    deviations = [
        value / rates[candidate] - 1
        for candidate, values in by_candidate.items()
        for value in values
    ]
    # Not `** 2`: C's pow need not round as a product does, and hosts have several of it.
    squares = [deviation * deviation for deviation in deviations]
    # Each mean takes a degree of freedom, and the overhead takes one.
    degrees = len(timed) - len(rates) - 1
    return rates, sqrt(sum(squares) / degrees) if degrees > 0 else inf


def _range_of_tokens(timed: Sequence[Trial]) -> dict[str, int]:
    tokens = [trial.work.max_tokens for trial in timed]
    return {"min_tokens": min(tokens), "max_tokens": max(tokens)}
