"""What is worth a turn while an exchange is tuned: the best few of a selection, by prediction."""

from dataclasses import dataclass
from typing import TypeAlias

from monta_megatron.common.quantities import counted
from monta_megatron.common.rules import PositiveFloat, PositiveInt
from monta_megatron.planner.chain_price import ChainPrice
from monta_megatron.planner.selection import Selection

# What is predicted to take more than so many times as long as the fastest is not tried.
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
    """What is worth a turn: what was selected, stock's order, the best of each other chain, others.

    Nothing that does the same as a plainer candidate, holds too much memory, or is predicted to be
    hopeless, stock's order apart.
    """
    most_us = HOPELESS * selection.allowed[0].total_us
    stock = [price for price in selection.allowed if price.chain.name == STOCK_ORDER]
    others = [price for price in selection.allowed if price.total_us <= most_us]
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
