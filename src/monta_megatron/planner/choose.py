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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.chains.chain import blocks_for
from monta_megatron.common.rules import hash_of
from monta_megatron.common.units import counted, gb_text
from monta_megatron.core import Choice, Layout, Shape
from monta_megatron.planner.cluster import Cluster

STOCK = Choice(chain="alltoall", num_chunks=1)
# Every slot has three turns in a window; the first is not counted.
TURNS = 3
# The time of a step is known to all ranks after so many steps.
LATE = 2
MOST_CHUNKS_OF_A_CHAIN = 3
# Of plain alltoall's predicted peak of memory.
MOST_MEMORY = 1.5
# Iterations so close together count as equal.
EQUAL = 1.01
# Numbers of chunks in which a chain's experts are split.
SPLITS = (2, 4)


def half_octave(num_tokens: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, ..., so that few selections are made."""
    if num_tokens <= 2:
        return max(num_tokens, 1)
    octave = 1 << (num_tokens - 1).bit_length() - 1
    return octave * 3 // 2 if num_tokens <= octave * 3 // 2 else octave * 2


def chains_for(layout: Layout) -> tuple[Chain, ...]:
    """The chains that can run on a layout."""
    return tuple(chain for chain in CHAINS.values() if chain.incompatibility(layout) is None)


@dataclass(frozen=True, kw_only=True, eq=False)
class Planner:
    """Proposes what may run on an exchange for the layers of one shape.

    Attributes:
        chains: that may run.
        num_chunks: numbers of chunks in which they may.
        splits_experts: whether their experts may run inside the pipeline.
        shape: of the layers; its number of tokens is replaced.
        cluster: by whose costs candidates are priced; None where one choice is given.
    """

    chains: tuple[Chain, ...]
    num_chunks: tuple[int, ...]
    splits_experts: bool = False
    shape: Shape | None = None
    cluster: Cluster | None = None
    # By half octave of tokens.
    _picks: dict[int, tuple[Choice, str]] = field(default_factory=dict)

    @property
    def fixed(self) -> Choice | None:
        """The choice that was given; None where it is priced."""
        return None if self.cluster is not None else self._choice(self.chains[0].name)

    @property
    def num_blocks(self) -> int:
        """Token blocks that are counted: at least as many as chunks."""
        most = max(*self.num_chunks, *(SPLITS if self.splits_experts else ()), 1)
        return blocks_for(most)

    def agreed_config(self) -> dict[str, Any]:
        """Values that all ranks of the exchange have to agree on."""
        config = {
            "chain": self.chains[0].name if self.cluster is None else "auto",
            "chains": [chain.name for chain in self.chains],
            "num_chunks": self.num_chunks[0] if self.cluster is None else list(self.num_chunks),
            "moe_monta_overlap_experts": self.splits_experts,
        }
        if self.cluster is not None:
            config["cluster"], config["kernels"] = self.cluster.name, self.cluster.kernels
            # The costs are too long for a message.
            config["hash of the costs"] = hash_of({"costs": repr(self.cluster)})
        return config

    def pick(self, tokens: int) -> tuple[Choice, str]:
        """The planner's own choice for so many tokens of a rank at most, and why."""
        tokens = half_octave(tokens)
        if tokens not in self._picks:
            self._picks[tokens] = self._pick(tokens)
        return self._picks[tokens]

    def candidates(self, tokens: int, num_slots: int) -> dict[Choice, float]:
        """Candidates for so many tokens, and their predicted us; plain alltoall comes first.

        Then the best predicted others, at most three numbers of chunks of a chain; with
        `splits_experts` the last two are the best chain of tokens with its experts split.
        """
        prices = self._select(half_octave(tokens)).rivals
        stock = next((price for price in prices if price.choice == STOCK), None)
        rest = [price for price in prices if price is not stock]
        if stock is not None:
            rest = [price for price in rest if price.peak_bytes <= MOST_MEMORY * stock.peak_bytes]
        best_of_tokens = next((price for price in rest if price.chain.rows == "tokens"), None)
        split: dict[Choice, float] = {}
        if self.splits_experts and best_of_tokens is not None:
            split = {
                choice: best_of_tokens.total_us
                for number in SPLITS
                if (choice := self._choice(best_of_tokens.chain.name, number)).splits_experts
            }
        found = {} if stock is None else {STOCK: stock.total_us}
        of_chain: Counter[str] = Counter()
        for price in rest:
            of_chain[price.chain.name] += 1
            if of_chain[price.chain.name] <= MOST_CHUNKS_OF_A_CHAIN:
                found[price.choice] = price.total_us
        most = max(num_slots - len(split), 1)
        return dict([*list(found.items())[:most], *split.items()][: max(num_slots, 1)])

    def _pick(self, tokens: int) -> tuple[Choice, str]:
        if self.cluster is None:
            return self._choice(self.chains[0].name), "as asked for"
        selection = self._select(tokens)
        choice, price = selection.price.choice, selection.price
        if self.splits_experts:
            of_tokens = [each for each in selection.rivals if each.chain.rows == "tokens"]
            price = of_tokens[0] if of_tokens else price
            choice = self._choice(price.chain.name, max(SPLITS)) if of_tokens else choice
        doubtful = ", whose calibration is doubtful," if self.cluster.doubts else ""
        return choice, (
            f"planned on {self.cluster.name}{doubtful} for up to {counted(tokens, 'token')} per "
            f"rank: {price.total_us:,.0f} us, {selection.reason}; "
            f"holds up to {gb_text(price.peak_bytes)}"
        )

    def _choice(self, chain: str, num_chunks: int | None = None) -> Choice:
        # A number of chunks that was asked for is kept.
        number = self.num_chunks[0] if len(self.num_chunks) == 1 else num_chunks or 1
        splits = self.splits_experts and number > 1 and CHAINS[chain].rows == "tokens"
        return Choice(chain=chain, num_chunks=number, splits_experts=splits)

    def _select(self, tokens: int) -> Any:
        # A named chain prices nothing.
        from monta_megatron.planner.select import select_chain

        assert self.shape is not None and self.cluster is not None, "one choice is given"
        return select_chain(
            replace(self.shape, tokens_per_rank=tokens),
            self.cluster,
            chains=[chain.name for chain in self.chains],
            num_chunks=self.num_chunks,
        )


@dataclass(kw_only=True)
class Turn:
    """One step of a window.

    Attributes:
        choice: that ran.
        num_exchanges: training exchanges in the step.
        tokens: the most of any rank in them, as half octave.
        counts: whether the choice had run before.
        us: the longest iteration of any rank; None until it is known, or where a rank has none.
    """

    choice: Choice
    num_exchanges: int
    tokens: int
    counts: bool
    us: int | None = None


@dataclass(kw_only=True)
class Window:
    """Steps in which the candidates of one exchange take turns.

    Attributes:
        candidates: with their predicted us; the first is plain alltoall.
        first: number of the first step.
        num_steps: its length; 0 where nothing takes turns.
        tokens: half octave for which the candidates were proposed.
        ran: choices that have run on this exchange before.
        turns: by step.
    """

    candidates: dict[Choice, float]
    first: int
    num_steps: int
    tokens: int
    ran: set[Choice] = field(default_factory=set)
    turns: dict[int, Turn] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The first step after it."""
        return self.first + self.num_steps

    def is_open(self, step: int) -> bool:
        """Whether times of its turns are measured or on their way."""
        return step < self.end + LATE and self.num_steps > 0

    def candidate(self, step: int) -> Choice | None:
        """The candidate whose turn it is; None outside the window."""
        if not self.first <= step < self.end:
            return None
        slot = step % (self.num_steps // TURNS)
        return list(self.candidates)[slot % len(self.candidates)]

    def add(self, step: int, num_exchanges: int, tokens: int) -> None:
        """Add a step that has ended, with its exchanges and the most tokens of any rank."""
        choice = self.candidate(step)
        if choice is not None:
            counts = choice in self.ran
            self.ran.add(choice)
            self.turns[step] = Turn(
                choice=choice,
                num_exchanges=num_exchanges,
                tokens=half_octave(tokens),
                counts=counts,
            )

    @property
    def kind(self) -> tuple[int, int] | None:
        """The most frequent number of exchanges and half octave of tokens, of measured turns."""
        kinds = Counter((turn.num_exchanges, turn.tokens) for turn in self._counted())
        return max(kinds, key=lambda kind: (kinds[kind], kind), default=None)

    @property
    def measured_us(self) -> dict[Choice, int]:
        """The least iteration of each candidate, over its turns of the most frequent kind."""
        kind, least = self.kind, dict[Choice, int]()
        for turn in self._counted():
            if (turn.num_exchanges, turn.tokens) == kind and turn.us is not None:
                least[turn.choice] = min(turn.us, least.get(turn.choice, turn.us))
        return least

    @property
    def best(self) -> Choice | None:
        """The fastest so far, the best predicted of those within 1%; None before a turn counts."""
        measured = self.measured_us
        near = [each for each, us in measured.items() if us <= EQUAL * min(measured.values())]
        return min(near, key=lambda each: (round(self.candidates[each], 1), each), default=None)

    @property
    def cost(self) -> float:
        """What the turns took beyond the winner's time, in its iterations."""
        best = self.best
        if best is None:
            return 0.0
        least = self.measured_us[best]
        return sum(turn.us / least - 1 for turn in self.turns.values() if turn.us)

    def _counted(self) -> Iterator[Turn]:
        return (turn for turn in self.turns.values() if turn.counts and turn.us is not None)
