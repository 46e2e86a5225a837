"""Choosing: the planner proposes candidates, measured iterations decide. No torch.

    step                    what runs
    before the window       the planner's pick
    first ... end - 1       candidates, one per step, in slots; whole iterations are timed
    end, end + 1            the best so far; the times of the last steps are still on their way
    from end + 2            the winner

Everything here follows from data that all ranks of the exchange share. Nothing follows from what
other exchanges do, but their slots are in phase: slot = step number modulo the number of slots.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.chains.chain import blocks_for
from monta_megatron.common.units import counted, gb_text
from monta_megatron.core import Choice, Shape
from monta_megatron.planner.cluster import Cluster

if TYPE_CHECKING:
    from monta_megatron.planner.price import Price
    from monta_megatron.planner.select import Selection

STOCK = Choice(chain="alltoall", num_chunks=1)
# Every slot has three trials in a window; the first of a candidate is not counted.
TRIALS = 3
# The time of a step is known to all ranks after so many steps.
LATE = 2
# Most predicted memory of a candidate: so many times plain alltoall's, or so many bytes more.
MOST_MEMORY, MORE_BYTES = 1.5, 1e9
# Iterations within 1% count as equal.
EQUAL = 1.01
# Iterations in a row that take so many times what the winner's trials took are worth a line.
SLOWER, NUM_SLOWER = 1.3, 20
# Numbers of chunks in which a chain's experts are split.
SPLITS = (2, 4)


def half_octave(num_tokens: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, ..., so that few selections are made."""
    if num_tokens <= 2:
        return max(num_tokens, 1)
    octave = 1 << (num_tokens - 1).bit_length() - 1
    return octave * 3 // 2 if num_tokens <= octave * 3 // 2 else octave * 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Planner:
    """Proposes choices on an exchange, for the layers of one shape.

    Attributes:
        chains: allowed chains; plain alltoall is one of them unless a choice is given.
        num_chunks: allowed numbers of chunks; a serial chain has one.
        splits_experts: whether experts run inside the pipeline of a chain of tokens; then at least
            one of the chains is such.
        shape: of the layers; its number of tokens is replaced.
        cluster: by whose costs candidates are priced; None where one choice is given.
    """

    chains: tuple[Chain, ...]
    num_chunks: tuple[int, ...]
    splits_experts: bool = False
    shape: Shape | None = None
    cluster: Cluster | None = None
    # By half octave of tokens.
    _selections: "dict[int, Selection]" = field(default_factory=dict)
    _picks: dict[tuple[int, bool], tuple[Choice, str]] = field(default_factory=dict)

    @property
    def fixed(self) -> Choice | None:
        """The choice that was given; None where it is priced."""
        return None if self.cluster is not None else self._choice(self.chains[0].name)

    @property
    def num_blocks(self) -> int:
        """Token blocks that are counted: at least as many as chunks."""
        return blocks_for(max(*self.num_chunks, *(SPLITS if self.splits_experts else ()), 1))

    def pick(self, tokens: int, splits_experts: bool = True) -> tuple[Choice, str]:
        """The planner's own choice for at most so many tokens per rank, and the reason.

        Args:
            tokens: of a rank.
            splits_experts: False where measured iterations have shown that it does not pay.
        """
        key = half_octave(tokens), splits_experts
        if key not in self._picks:
            self._picks[key] = self._pick(*key)
        return self._picks[key]

    def _pick(self, tokens: int, splits_experts: bool) -> tuple[Choice, str]:
        selection = self.selection(tokens)
        allowed = self._allowed(selection)
        price, reason = selection.price, selection.reason
        if price.choice not in [each.choice for each in allowed]:
            price = allowed[0]
            reason = f"the fastest within {MOST_MEMORY:g} times the memory of alltoall"
        choice, of_tokens = price.choice, [each for each in allowed if each.chain.rows == "tokens"]
        if self.splits_experts and splits_experts and of_tokens:
            price = of_tokens[0]
            choice = self._choice(price.chain.name, max(SPLITS))
            reason = f"without its experts, as {price.choice.name}, the fastest chain of tokens"
        assert self.cluster is not None, "one choice is given"
        return choice, (
            f"planned on {self.cluster.name} for up to {counted(tokens, 'token')} per rank: "
            f"{price.total_us:,.0f} us, "
            f"{reason}; holds up to {gb_text(price.peak_bytes)}"
        )

    def candidates(self, tokens: int, num_slots: int) -> dict[Choice, float]:
        """Candidates for at most so many tokens per rank, and their predicted us.

        Plain alltoall comes first, then the best predicted others. With `splits_experts` the last
        two are the best chain of tokens with its experts split; they have the prediction of the
        chain without its experts.
        """
        selection = self.selection(tokens)
        stock = self._stock(selection)
        found, split = {STOCK: stock.total_us}, dict[Choice, float]()
        for price in self._allowed(selection):
            if price.choice == STOCK:
                continue
            if self.splits_experts and price.chain.rows == "tokens" and not split:
                choices = (self._choice(price.chain.name, number) for number in SPLITS)
                split = {each: price.total_us for each in choices if each.splits_experts}
            found[price.choice] = price.total_us
        rest = islice(found.items(), max(num_slots - len(split), 1))
        return dict(islice((dict(rest) | split).items(), num_slots))

    def _stock(self, selection: "Selection") -> "Price":
        return next(price for price in selection.prices if price.choice == STOCK)

    def _allowed(self, selection: "Selection") -> "list[Price]":
        """Those that are not too large beside plain alltoall, the fastest first."""
        stock_bytes = self._stock(selection).peak_bytes
        # Hosts differ in the last bit, which a byte more makes up for.
        most_bytes = max(MOST_MEMORY * stock_bytes, stock_bytes + MORE_BYTES) + 1
        return [price for price in selection.rivals if price.peak_bytes <= most_bytes]

    def selection(self, tokens: int) -> "Selection":
        """The prices of everything allowed, for at most so many tokens per rank."""
        # Not needed where one choice is given.
        from monta_megatron.planner.select import select_chain

        assert self.shape is not None and self.cluster is not None, "one choice is given"
        tokens = half_octave(tokens)
        if tokens not in self._selections:
            self._selections[tokens] = select_chain(
                replace(self.shape, tokens_per_rank=tokens),
                self.cluster,
                chains=[chain.name for chain in self.chains],
                num_chunks=self.num_chunks,
            )
        return self._selections[tokens]

    def _choice(self, chain: str, num_chunks: int | None = None) -> Choice:
        # A number of chunks that was asked for is kept.
        number = self.num_chunks[0] if len(self.num_chunks) == 1 else num_chunks or 1
        splits = self.splits_experts and number > 1 and CHAINS[chain].rows == "tokens"
        return Choice(chain=chain, num_chunks=number, splits_experts=splits)


@dataclass(kw_only=True)
class Trial:
    """A step of a window.

    Attributes:
        choice: that ran.
        kind: number of training exchanges, and half octave of the most tokens of any rank in them.
        counts: whether the choice had run before.
        us: the longest iteration of any rank; None until it is known, or if a rank has none.
    """

    choice: Choice
    kind: tuple[int, int]
    counts: bool
    us: int | None = None


@dataclass(kw_only=True)
class Window:
    """Steps in which the candidates of an exchange run in a round robin.

    Attributes:
        candidates: with their predicted us; plain alltoall comes first.
        first: number of the first step.
        num_steps: length of the window; 0 where candidates are not compared.
        ran: choices that this exchange has run, in an earlier window too.
        trials: by step.
        kind: the most frequent kind of the trials that count; of several, the largest.
        measured_us: the least iteration of each candidate, over its trials of that kind that count.
        best: the fastest so far, the best predicted of those within 1%; None until one counts.
    """

    candidates: dict[Choice, float]
    first: int
    num_steps: int
    ran: set[Choice] = field(default_factory=set)
    trials: dict[int, Trial] = field(default_factory=dict)
    kind: tuple[int, int] | None = None
    measured_us: dict[Choice, int] = field(default_factory=dict)
    best: Choice | None = None
    _num_slower: int = 0

    @property
    def end(self) -> int:
        """The first step after the window."""
        return self.first + self.num_steps

    def is_open(self, step: int) -> bool:
        """Whether the window runs, or times of its steps are still on their way."""
        return step < self.end + LATE and self.num_steps > 0

    def candidate(self, step: int) -> Choice | None:
        """The candidate of a step; None outside the window."""
        if not self.first <= step < self.end:
            return None
        slot = step % (self.num_steps // TRIALS)
        return list(self.candidates)[slot % len(self.candidates)]

    def add(self, step: int, kind: tuple[int, int]) -> None:
        """Add a step that has ended, of this kind; see `Trial`."""
        choice = self.candidate(step)
        if choice is not None:
            self.trials[step] = Trial(choice=choice, kind=kind, counts=choice in self.ran)
            self.ran.add(choice)

    def add_time(self, step: int, us: int, kind: tuple[int, int] | None = None) -> str | None:
        """Add the longest iteration of any rank in a step of this kind, in the window or later.

        Returns:
            A line for the log if later iterations have been slower than the winner's for long.
        """
        if step not in self.trials:
            return self._slower(us) if kind == self.kind else None
        self.trials[step].us = us
        counted = [trial for trial in self.trials.values() if trial.counts and trial.us is not None]
        kinds = Counter(trial.kind for trial in counted)
        self.kind = max(kinds, key=lambda kind: (kinds[kind], kind), default=None)
        least = dict[Choice, int]()
        for trial in counted:
            if trial.kind == self.kind and trial.us is not None:
                least[trial.choice] = min(trial.us, least.get(trial.choice, trial.us))
        self.measured_us = least
        near = [each for each in least if least[each] <= EQUAL * min(least.values())]
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
            f"{self.best.name} did in its turns, {us / 1e3:,.1f} ms instead of "
            f"{measured_us / 1e3:,.1f}"
        )

    def winner(self, tokens: int) -> Choice | None:
        """The best for so many tokens; None outside of a factor 2 of those that were measured."""
        is_near = self.kind is not None and self.kind[1] <= 2 * tokens <= 4 * self.kind[1]
        return self.best if is_near else None

    @property
    def cost(self) -> float:
        """Extra time of the trials over the winner's, as a number of its iterations.

        Trials of another kind are left out: other exchanges take another time.
        """
        if self.best is None:
            return 0.0
        least = self.measured_us[self.best]
        same = (trial for trial in self.trials.values() if trial.kind == self.kind)
        return sum(trial.us / least - 1 for trial in same if trial.us)

    @property
    def result(self) -> str:
        """The result as a line of the log."""
        best, measured_us = self.best, self.measured_us
        if best is None:
            return "no turn counts, as times were lost; the planner's pick stays"
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
            f"{best.name} wins with {measured_us[best] / 1e3:,.2f} ms per iteration{saved}; turns "
            f"cost {self.cost:.1f} iterations; pin it with {best.flags}; us predicted and ms "
            f"measured: {'; '.join(candidates)}"
        )
