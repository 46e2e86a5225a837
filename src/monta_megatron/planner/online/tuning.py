"""Tuning: over the first iterations the best candidates of a selection take turns; one stays.

The planner proposes, the cluster decides. A step is one training iteration, in which one candidate
runs in all micro-batches and layers of an exchange. Its time is known `LATE` steps later, so a
turn depends on the results of steps that are so far back and on nothing else: ranks to which they
were given sooner choose alike.

Whose turn it is:

1. The planner's pick, stock's own order of stages and the best of every other chain. The first run
   of a chain does not count, since communicators are made in it, so it has two turns.
2. Other numbers of chunks. One chunk against several comes first, the fastest chain before the
   others, if it is not more than 60% behind: what a pipeline gains is what costs of another network
   get most wrong. Then those that are the fastest by prediction times the factor of their chain
   (measured over predicted time). The last quarter of the steps tries nothing new.
3. Of those that are not far behind, the one with the fewest runs that count, and of these the
   fastest. "Far behind" narrows with the runs: 30% after the first, 15% after the second, 10%
   after the third.

In the end the planner's pick stays, unless another one beats it by more than the margin.

The time of a step is that of its passes together on the rank that was the fastest: the one that has
waited least for the others. The time of a single pass would mislead where messages are buffered,
since the last rank to arrive finds them there, as if the network had taken no time.

Notation: S = ranks of the exchange, P = passes of an iteration, of all micro-batches and layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains.program import FORWARD_BACKWARD, NOT_TIMED_US
from monta_megatron.common.rules import PositiveFloat, PositiveInt, hash_of
from monta_megatron.common.units import counted
from monta_megatron.planner.chain_price import ChainPrice
from monta_megatron.planner.select import MARGIN, Selection

# Candidates predicted to take more than so many times as long as the fastest are not tried.
HOPELESS = 3.0
STOCK_ORDER = "alltoall"

# A chain and its number of chunks.
Key: TypeAlias = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class TuningCandidate:
    """A chain in a number of chunks, and the time that was predicted for its four passes."""

    chain: str
    num_chunks: PositiveInt
    predicted_us: PositiveFloat

    @property
    def key(self) -> Key:
        """Its chain and number of chunks."""
        return self.chain, self.num_chunks

    @property
    def name(self) -> str:
        """The same, for messages."""
        return f"{self.chain} in {counted(self.num_chunks, 'chunk')}"


def tuning_candidates(selection: Selection) -> tuple[TuningCandidate, ...]:
    """Candidates to measure: the selected one, stock's order, the best of each other chain, others.

    Nothing that does the same as a plainer candidate, or is predicted to be hopeless, stock's order
    apart.
    """
    most_us = HOPELESS * selection.rivals[0].total_us
    stock = [price for price in selection.rivals if price.chain.name == STOCK_ORDER]
    others = [price for price in selection.rivals if price.total_us <= most_us]
    best_of_chain: dict[str, ChainPrice] = {}
    for price in others:
        best_of_chain.setdefault(price.chain.name, price)
    candidates = (
        TuningCandidate(
            chain=price.chain.name, num_chunks=price.num_chunks, predicted_us=price.total_us
        )
        for price in (selection.price, *stock, *best_of_chain.values(), *others)
    )
    return tuple(dict.fromkeys(candidates))


def best_key(times_us: Mapping[Key, float], current: Key) -> Key:
    """Fastest candidate; the current one stays unless beaten by the margin.

    Args:
        times_us: of each, maybe of all others than `current`.
        current: runs now.
    """
    least_us = min(times_us.values())
    if times_us.get(current, inf) <= least_us * (1 + MARGIN):
        return current
    return min(times_us, key=times_us.__getitem__)


# After so many steps the result of a step is known to all ranks.
LATE = 2
FAR_BEHIND = 0.3
# Of what a chain takes in several chunks, if it may run in one, and the other way round.
FAR_BEHIND_OTHERWISE = 0.6
# The share of the steps in which candidates begin.
TRYING = 0.75


@dataclass(frozen=True, kw_only=True)
class TuningStep:
    """A step that is over.

    Attributes:
        candidate: the number of the candidate that ran.
        counts: whether its chain had run before.
        us: mean time of a pass, times the four passes of an exchange, on the fastest rank; 0 if
            it was not timed.
        slowest_us: the same on the slowest rank.
    """

    candidate: int
    counts: bool
    us: int
    slowest_us: int


@dataclass(kw_only=True)
class Tuning:
    """The tuning of one exchange: turns of its candidates, and measurements.

    The same on all ranks, once in each training iteration, before its first pass:

        tuning.add(candidate, pass_us)  # the iteration `LATE` before this one
        candidate = tuning.next()       # None: over, run `tuning.winner`

    When it is over, replicas of an exchange tell each other their `summary` and `settle`.

    Attributes:
        candidates: what may run; the first is the planner's pick, which stays if nothing beats it.
        num_steps: iterations that the tuning takes.
        steps: those that were added.
        settled_us: [candidates] what the replicas have settled on, 0 for what one of them has not
            measured; None before.
    """

    candidates: tuple[TuningCandidate, ...]
    num_steps: int
    steps: list[TuningStep] = field(init=False, default_factory=list)
    settled_us: tuple[int, ...] | None = field(init=False, default=None)
    # Candidates, and whether their runs count.
    _started: list[tuple[int, bool]] = field(init=False, default_factory=list)
    # Communicators are made anew in every process.
    _chains_ran: set[str] = field(init=False, default_factory=set)
    # Steps whose results may decide in this iteration: all ranks have been given them.
    _num_known: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        assert self.candidates, "at least the planner's pick"

    @property
    def is_over(self) -> bool:
        """Whether all steps were started."""
        return len(self._started) >= self.num_steps

    def next(self) -> int | None:
        """Start a step: the number of the candidate that runs in it; None when it is over."""
        assert len(self.steps) >= self._num_due, f"{len(self.steps)} steps were added"
        self._num_known = self._num_due
        if self.is_over:
            return None
        turn = self._turn()
        chain = self.candidates[turn].chain
        self._started.append((turn, chain in self._chains_ran))
        self._chains_ran.add(chain)
        return turn

    def add(self, candidate: int, pass_us: NDArray[np.int64]) -> None:
        """Add the time of the oldest step that was not added yet; the same on all ranks.

        Args:
            candidate: the number of the candidate that ran in it.
            pass_us: [S, P] us of each pass on each rank; `NOT_TIMED_US` where it was not timed.
        """
        started, counts = self._started[len(self.steps)]
        assert candidate == started, f"in step {len(self.steps)} ran {started}, not {candidate}"
        # [S, P] -> [S] of the passes that all ranks have timed
        is_timed = (pass_us != NOT_TIMED_US).all(axis=0)
        rank_us = pass_us[:, is_timed].sum(axis=1)
        us, slowest_us = (
            _exchange_us(int(total_us), int(is_timed.sum()))
            for total_us in (rank_us.min(), rank_us.max())
        )
        self.steps.append(
            TuningStep(candidate=candidate, counts=counts, us=us, slowest_us=slowest_us)
        )

    @property
    def measured_us(self) -> tuple[float | None, ...]:
        """[candidates] trimmed mean of the runs that count, or the replicas' settled times.

        None for a candidate that was not measured yet.
        """
        if self.settled_us is not None:
            return tuple(us or None for us in self.settled_us)
        return tuple(trimmed_mean(times) if times else None for times in self.times_us)

    @property
    def times_us(self) -> list[list[int]]:
        """[candidates] times of the runs that count and may decide by now."""
        return [[step.us for step in steps] for steps in self._runs]

    @property
    def winner(self) -> int:
        """Number of the best candidate so far: the pick, or one that beats it."""
        keys = [candidate.key for candidate in self.candidates]
        times_us = {
            key: us for key, us in zip(keys, self.measured_us, strict=True) if us is not None
        }
        if keys[0] not in times_us:
            return 0
        return keys.index(best_key(times_us, keys[0]))

    def summary(self) -> list[int]:
        """Summary for replicas: a hash, then [candidates] us, 0 for one that was not measured."""
        hash_here = hash_of({"candidates": [candidate.name for candidate in self.candidates]})
        return [hash_here, *(round(us or 0) for us in self.measured_us)]

    def settle(self, summaries: Sequence[Sequence[int]]) -> None:
        """Decide together with the replicas of this exchange, by the mean of all measurements.

        Replicas with other candidates, since they lie otherwise on the nodes, settle by themselves.

        Args:
            summaries: the `summary` of every replica, this one's too, in the same order on all.
        """
        hash_here = self.summary()[0]
        rows = np.array([summary[1:] for summary in summaries if summary[0] == hash_here])
        means, is_measured = rows.mean(axis=0).round().astype(int), rows.all(axis=0)
        self.settled_us = tuple((means * is_measured).tolist())

    def factor(self, key: Key) -> float:
        """Measured over predicted time of a chain in a number of chunks.

        Where it was not measured, the geometric mean of its chain's, else of all; else 1.
        """
        factors = {
            candidate.key: us / candidate.predicted_us
            for candidate, us in zip(self.candidates, self.measured_us, strict=True)
            if us is not None
        }
        if key in factors:
            return factors[key]
        of_chain = [factor for (chain, _), factor in factors.items() if chain == key[0]]
        logs = [log(factor) for factor in of_chain or factors.values()]
        return exp(sum(logs) / len(logs)) if logs else 1.0

    def select(self, prices: Sequence[ChainPrice], current: Key) -> ChainPrice:
        """Candidate for another number of tokens, by predicted time times `factor`.

        Args:
            prices: what may run, see `Selection.rivals`.
            current: what runs now: it stays where nothing beats it by more than the margin.
        """
        of_key = {(price.chain.name, price.num_chunks): price for price in prices}
        times_us = {key: price.total_us * self.factor(key) for key, price in of_key.items()}
        return of_key[best_key(times_us, current)]

    @property
    def _runs(self) -> list[list[TuningStep]]:
        """[candidates] runs that count and may decide by now."""
        runs: list[list[TuningStep]] = [[] for _ in self.candidates]
        for step in self.steps[: self._num_known]:
            if step.counts and step.us > 0:
                runs[step.candidate].append(step)
        return runs

    @property
    def _num_due(self) -> int:
        """Steps whose results every rank has been given when the next one starts."""
        return max(len(self._started) + 1 - LATE, 0)

    def _turn(self) -> int:
        """Whose turn it is in the next step."""
        if self.num_steps - len(self._started) < LATE:
            # Nothing can be learned from it in time.
            return self.winner
        numbers = range(len(self.candidates))
        num_runs, num_counted = [0] * len(numbers), [0] * len(numbers)
        for number, counts in self._started:
            num_runs[number] += 1
            num_counted[number] += counts
        chains = [candidate.chain for candidate in self.candidates]
        expected_us = [each.predicted_us * self.factor(each.key) for each in self.candidates]
        times_us = self.times_us
        least_us = min((us for us in self.measured_us if us is not None), default=inf)
        kinds = [(each.chain, each.num_chunks > 1) for each in self.candidates]
        kinds_ran = {kinds[number] for number, runs in enumerate(num_runs) if runs}

        def is_first_of_chain(number: int) -> bool:
            return chains.index(chains[number]) == number

        def first_us(number: int) -> float:
            return min(times_us[chains.index(chains[number])], default=0)

        def is_far_behind(number: int) -> bool:
            times = times_us[number]
            if not times and is_first_of_chain(number):
                return False
            if kinds[number] not in kinds_ran:
                return first_us(number) > (1 + FAR_BEHIND_OTHERWISE) * least_us
            us = min(times, default=expected_us[number])
            return us > (1 + FAR_BEHIND / max(len(times), 1)) * least_us

        # Step 1: once begun, a candidate runs until it was measured.
        near = [number for number in numbers if not is_far_behind(number)]
        begun = [number for number in near if num_runs[number] and not num_counted[number]]
        if begun:
            return begun[0]
        tried = [number for number in near if num_runs[number]]
        new = [number for number in near if not num_runs[number]]
        if new and len(self._started) < TRYING * self.num_steps:
            first = [number for number in new if is_first_of_chain(number)]
            if first:
                return first[0]
            # Step 2: when the factors of all chains are known.
            firsts = [number for number in tried if is_first_of_chain(number)]
            if all(times_us[number] for number in firsts):
                of_new_kind = [number for number in new if kinds[number] not in kinds_ran]
                if of_new_kind:
                    return min(of_new_kind, key=lambda number: (first_us(number), number))
                return min(new, key=lambda number: expected_us[number])
        # Step 3.
        return min(tried, key=lambda number: (num_counted[number], expected_us[number]))


def trimmed_mean(times_us: Sequence[int]) -> float:
    """The mean without the slowest quarter and the fastest: of 3 times that is the middle one."""
    num_trimmed = (len(times_us) + 1) // 4
    middle = sorted(times_us)[num_trimmed : len(times_us) - num_trimmed]
    return sum(middle) / len(middle)


def _exchange_us(total_us: int, num_passes: int) -> int:
    """The mean pass, as often as an exchange has passes; rounded, so the same everywhere."""
    num_passes = max(num_passes, 1)
    return (len(FORWARD_BACKWARD) * total_us + num_passes // 2) // num_passes
