"""What is worth a turn while an exchange is tuned: the best few of a selection, by prediction."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from monta_megatron.chains import CHAINS
from monta_megatron.common.rules import PositiveFloat, PositiveInt
from monta_megatron.common.units import counted
from monta_megatron.planner.chain_price import ChainPrice, plainness
from monta_megatron.planner.other_work import OtherWork, left_over_us, other_work_of
from monta_megatron.planner.selection import MARGIN, Selection

# What is predicted to take more than so many times as long as the fastest is not tried; beside
# other work, what would leave as much more over.
HOPELESS = 3.0
STOCK_ORDER = "alltoall"

# A chain and its number of chunks.
Key: TypeAlias = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class TuningCandidate:
    """A chain in a number of chunks, and the time that was predicted for its four passes.

    What was predicted of other work, if there is any, is that of the tuning's begin for good, so
    that what was chosen stays chosen.
    """

    chain: str
    num_chunks: PositiveInt
    predicted_us: PositiveFloat
    other_work: OtherWork | None = None

    @property
    def key(self) -> Key:
        """Its chain and number of chunks."""
        return self.chain, self.num_chunks

    @property
    def name(self) -> str:
        """The same, for messages."""
        return f"{self.chain} in {counted(self.num_chunks, 'chunk')}"

    def left_over_us(self, us: float) -> float:
        """What training waits for where its four passes take `us`."""
        return left_over_us(us, self.other_work)


def tuning_candidates(selection: Selection) -> tuple[TuningCandidate, ...]:
    """What is worth a turn: what was selected, stock's order, the best of each other chain, others.

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
            other_work=other_work_of(price),
        )
        for price in (selection.price, *stock, *best_of_chain.values(), *others)
    )
    return tuple(dict.fromkeys(candidates))


def best_key(left_us: Mapping[Key, float], current: Key, is_beside_work: bool) -> Key:
    """What leaves the least over; what runs now stays unless that beats it by the margin.

    Args:
        left_us: what is left over of each, maybe of all others than `current`.
        current: what runs now.
        is_beside_work: whether other work hides a part: then many leave about the same over, and of
            those within the margin the plainest, which gets least into its way, is the best.
    """
    least_us = min(left_us.values())
    near = [key for key, us in left_us.items() if us <= least_us * (1 + MARGIN)]
    if current in near:
        return current
    if is_beside_work:
        return min(near, key=lambda key: plainness(CHAINS[key[0]], key[1]))
    return min(near, key=left_us.__getitem__)
