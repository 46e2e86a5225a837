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

Where computation overlaps the exchange, candidates are compared by the exposed part of their times:
as it was measured, or as the `overlapped_compute` that the user states leaves it. Of those within
the margin of the best the plainest is taken, as in a plan: where most of every candidate is hidden,
many leave about the same exposed.

The time of a step is that of its passes together on the rank that was the fastest: the one that has
waited least for the others. The time of a single pass would mislead where messages are buffered,
since the last rank to arrive finds them there, as if the network had taken no time.

Notation: S = ranks of the exchange, P = passes of an iteration, of all micro-batches and layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import exp, inf, log
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import FORWARD_BACKWARD, NOT_TIMED_US
from monta_megatron.common.rules import PositiveFloat, PositiveInt, hash_of
from monta_megatron.common.units import counted
from monta_megatron.planner.chain_price import ChainPrice, plainness
from monta_megatron.planner.select import (
    MARGIN,
    OverlappedCompute,
    Selection,
    exposed_of,
    overlapped_compute_of,
)

# Candidates predicted to take more than so many times as long as the fastest are not tried; beside
# computation, those that would leave as much more exposed.
HOPELESS = 3.0
STOCK_ORDER = "alltoall"

# A chain and its number of chunks.
Key: TypeAlias = tuple[str, int]


# Keys of older checkpoints.
RENAMED = {"other_work": "overlapped_compute"}


@dataclass(frozen=True, kw_only=True)
class TuningCandidate:
    """A chain in a number of chunks, and the time that was predicted for its four passes.

    The prediction of overlapped computation, if any, is that of the tuning's start for good, so
    that what was chosen stays chosen.
    """

    chain: str
    num_chunks: PositiveInt
    predicted_us: PositiveFloat
    overlapped_compute: OverlappedCompute | None = None
    RENAMED_KEYS: ClassVar[dict[str, str]] = RENAMED

    @property
    def key(self) -> Key:
        """Its chain and number of chunks."""
        return self.chain, self.num_chunks

    @property
    def name(self) -> str:
        """The same, for messages."""
        return f"{self.chain} in {counted(self.num_chunks, 'chunk')}"

    def exposed_of(self, us: float) -> float:
        """Exposed time where the four passes take `us`."""
        return exposed_of(us, self.overlapped_compute)


def tuning_candidates(selection: Selection) -> tuple[TuningCandidate, ...]:
    """Candidates to measure: the selected one, stock's order, the best of each other chain, others.

    Nothing that does the same as a plainer candidate, holds too much memory, or is predicted to be
    hopeless, stock's order apart.
    """
    least = selection.allowed[0]
    most_us = least.exposed_us + (HOPELESS - 1) * least.total_us
    stock = [price for price in selection.allowed if price.chain.name == STOCK_ORDER]
    others = [price for price in selection.allowed if price.exposed_us <= most_us]
    best_of_chain: dict[str, ChainPrice] = {}
    for price in others:
        best_of_chain.setdefault(price.chain.name, price)
    candidates = (
        TuningCandidate(
            chain=price.chain.name,
            num_chunks=price.num_chunks,
            predicted_us=price.total_us,
            overlapped_compute=overlapped_compute_of(price),
        )
        for price in (selection.price, *stock, *best_of_chain.values(), *others)
    )
    return tuple(dict.fromkeys(candidates))


def best_key(
    exposed_us: Mapping[Key, float], current: Key, is_overlapped: bool, margin_us: float = 0.0
) -> Key:
    """Candidate with the least exposed time; the current one stays unless beaten by the margin.

    Args:
        exposed_us: of each, maybe of all others than `current`.
        current: runs now.
        is_overlapped: whether computation hides a part. Many then have about the same exposed, and
            of those within the margin the plainest, which disturbs it least, is the best.
        margin_us: the least margin.
    """
    least_us = min(exposed_us.values())
    most_us = max(least_us * (1 + MARGIN), least_us + margin_us)
    near = [key for key, us in exposed_us.items() if us <= most_us]
    if current in near:
        return current
    if is_overlapped:
        return min(near, key=lambda key: plainness(CHAINS[key[0]], key[1]))
    return min(near, key=exposed_us.__getitem__)


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
        exposed_us: its exposed part, on the rank that waits least; None where it was not measured.
    """

    candidate: int
    counts: bool
    us: int
    slowest_us: int
    exposed_us: int | None = None


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
        settled_exposed_us: likewise, of their exposed parts; None where these were not measured.
    """

    candidates: tuple[TuningCandidate, ...]
    num_steps: int
    steps: list[TuningStep] = field(default_factory=list)
    settled_us: tuple[int, ...] | None = None
    settled_exposed_us: tuple[int, ...] | None = None
    # Candidates, and whether their runs count.
    _started: list[tuple[int, bool]] = field(init=False)
    # Communicators are made anew in every process.
    _chains_ran: set[str] = field(init=False, default_factory=set)
    # Steps whose results may decide in this iteration: all ranks have been given them.
    _num_known: int = field(init=False)

    def __post_init__(self) -> None:
        assert self.candidates, "at least the planner's pick"
        self._started = [(step.candidate, step.counts) for step in self.steps]
        self._num_known = self._num_due

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

    def add(
        self,
        candidate: int,
        pass_us: NDArray[np.int64],
        exposed_us: NDArray[np.int64] | None = None,
    ) -> None:
        """Add the time of the oldest step that was not added yet; the same on all ranks.

        Args:
            candidate: the number of the candidate that ran in it.
            pass_us: [S, P] us of each pass on each rank; `NOT_TIMED_US` where it was not timed.
            exposed_us: [S] the exposed part of all passes; None, or `NOT_TIMED_US` for a rank,
                where it was not measured.
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
        exposed = None
        if exposed_us is not None and (exposed_us != NOT_TIMED_US).all():
            exposed = min(_exchange_us(int(exposed_us.min()), pass_us.shape[1]), us)
        self.steps.append(
            TuningStep(
                candidate=candidate,
                counts=counts,
                us=us,
                slowest_us=slowest_us,
                exposed_us=exposed,
            )
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
    def measures_exposed(self) -> bool:
        """Whether the exposed part of the exchange is measured."""
        return any(step.exposed_us is not None for step in self.steps)

    @property
    def exposed_us(self) -> tuple[float | None, ...]:
        """[candidates] exposed part of `measured_us`."""
        if self.settled_exposed_us is not None:
            settled = zip(self.measured_us, self.settled_exposed_us, strict=True)
            return tuple(None if us is None else exposed for us, exposed in settled)
        times = [
            [step.exposed_us for step in steps if step.exposed_us is not None]
            for steps in self._runs
        ]
        return tuple(
            None if us is None else trimmed_mean(exposed) if exposed else candidate.exposed_of(us)
            for candidate, us, exposed in zip(self.candidates, self.measured_us, times, strict=True)
        )

    @property
    def hidden_us(self) -> float:
        """Longest part of an exchange that was hidden; 0 where that is not measured."""
        if not self.measures_exposed:
            return 0.0
        pairs = zip(self.measured_us, self.exposed_us, strict=True)
        return max(
            (us - exposed for us, exposed in pairs if us is not None and exposed is not None),
            default=0.0,
        )

    @property
    def winner(self) -> int:
        """Number of the best candidate so far: the pick, or one that beats it."""
        keys = [candidate.key for candidate in self.candidates]
        exposed_us = {
            key: us for key, us in zip(keys, self.exposed_us, strict=True) if us is not None
        }
        if keys[0] not in exposed_us:
            return 0
        margin_us = 0.0
        if self.measures_exposed:
            # An exposed part near zero varies by as much as the exchange does.
            best = keys.index(min(exposed_us, key=exposed_us.__getitem__))
            margin_us = MARGIN * (self.measured_us[best] or 0.0)
        return keys.index(best_key(exposed_us, keys[0], self.is_overlapped, margin_us))

    def summary(self) -> list[int]:
        """Summary for replicas: a hash, then [candidates] us or 0, and exposed us if measured."""
        # Replicas compare alike if the same overlap was predicted, too.
        names = [
            f"{candidate.name}, {candidate.overlapped_compute}" for candidate in self.candidates
        ]
        hash_here = hash_of({"candidates": [*names, self.measures_exposed]})
        exposed_us = self.exposed_us if self.measures_exposed else ()
        return [hash_here, *(round(us or 0) for us in (*self.measured_us, *exposed_us))]

    def settle(self, summaries: Sequence[Sequence[int]]) -> None:
        """Decide together with the replicas of this exchange, by the mean of all measurements.

        Replicas with other candidates, since they lie otherwise on the nodes, settle by themselves.

        Args:
            summaries: the `summary` of every replica, this one's too, in the same order on all.
        """
        hash_here = self.summary()[0]
        rows = np.array([summary[1:] for summary in summaries if summary[0] == hash_here])
        num_candidates, means = len(self.candidates), rows.mean(axis=0).round().astype(int)
        is_measured = rows[:, :num_candidates].all(axis=0)
        self.settled_us = tuple((means[:num_candidates] * is_measured).tolist())
        if self.measures_exposed:
            self.settled_exposed_us = tuple((means[num_candidates:] * is_measured).tolist())

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
        """Candidate for other traffic, by the exposed part of predicted time times `factor`.

        Args:
            prices: what may run on it, see `Selection.allowed`.
            current: what runs now: it stays where nothing beats it by more than the margin.
        """
        of_key = {(price.chain.name, price.num_chunks): price for price in prices}
        exposed_us = {
            key: exposed_of(price.total_us * self.factor(key), overlapped_compute_of(price))
            for key, price in of_key.items()
        }
        return of_key[best_key(exposed_us, current, self.is_overlapped)]

    def state(self) -> dict[str, Any]:
        """The state, as plain JSON values; see `tuning_report.resumed`."""
        return {
            "num_steps": self.num_steps,
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "steps": [asdict(step) for step in self.steps],
            "settled_us": None if self.settled_us is None else list(self.settled_us),
            "settled_exposed_us": (
                None if self.settled_exposed_us is None else list(self.settled_exposed_us)
            ),
        }

    @property
    def is_overlapped(self) -> bool:
        """Whether computation hides a part of the exchange."""
        return self.candidates[0].overlapped_compute is not None or self.measures_exposed

    @property
    def _runs(self) -> list[list[TuningStep]]:
        """[candidates] runs that count and may decide by now."""
        runs: list[list[TuningStep]] = [[] for _ in self.candidates]
        for step in self.steps[: self._num_known]:
            if step.counts and step.us > 0:
                runs[step.candidate].append(step)
        return runs

    def _exposed_of(self, candidate: TuningCandidate, us: float) -> float:
        """Exposed part of an exchange that takes `us`, by what was measured or predicted."""
        if self.measures_exposed:
            return max(us - self.hidden_us, 0.0)
        return candidate.exposed_of(us)

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
        # Exposed parts; margins are of whole times, since they are as uncertain.
        expected_us = [
            self._exposed_of(each, each.predicted_us * self.factor(each.key))
            for each in self.candidates
        ]
        times_us = [
            [
                each.exposed_of(step.us) if step.exposed_us is None else step.exposed_us
                for step in steps
            ]
            for each, steps in zip(self.candidates, self._runs, strict=True)
        ]
        pairs = zip(self.exposed_us, self.measured_us, strict=True)
        least_us, of_us = min(
            ((exposed, us) for exposed, us in pairs if exposed is not None and us is not None),
            default=(inf, inf),
        )
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
                return first_us(number) > least_us + FAR_BEHIND_OTHERWISE * of_us
            us = min(times, default=expected_us[number])
            return us > least_us + FAR_BEHIND / max(len(times), 1) * of_us

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
