"""The planner of a training: picks a choice by predicted times, and proposes candidates."""

from dataclasses import dataclass, field, replace
from itertools import islice

from monta_megatron.chains import CHAINS, Chain
from monta_megatron.chains.chain import blocks_for
from monta_megatron.chains.program import Phase
from monta_megatron.common.text import counted, size_text
from monta_megatron.core import Choice, Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import Selection, select_chain
from monta_megatron.planner.price import Price

STOCK = Choice(chain="alltoall", num_chunks=1)
# Largest predicted memory of a candidate: so many times plain alltoall's, or so many bytes more.
MAX_MEMORY, MORE_BYTES = 1.5, 1e9
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
        phase: the passes of an exchange.
        shape: shape of the layers; its number of tokens is replaced.
        cluster: cluster whose costs price the candidates; None where one choice is given.
    """

    chains: tuple[Chain, ...]
    num_chunks: tuple[int, ...]
    splits_experts: bool = False
    phase: Phase = "forward_backward"
    shape: Shape | None = None
    cluster: Cluster | None = None
    # By half octave of tokens.
    _selections: "dict[int, Selection]" = field(default_factory=dict)

    @property
    def fixed(self) -> Choice | None:
        """The choice that was given; None where it is priced."""
        return None if self.cluster is not None else self._choice_of(self.chains[0].name)

    @property
    def num_blocks(self) -> int:
        """Token blocks that are counted: at least as many as chunks."""
        return blocks_for(max(*self.num_chunks, *(SPLITS if self.splits_experts else ()), 1))

    def pick(self, tokens: int) -> tuple[Choice, str]:
        """The planner's own choice for at most so many tokens per rank, and the reason."""
        tokens = half_octave(tokens)
        selection = self.selection(tokens)
        allowed = self._allowed(selection)
        price, reason = selection.price, selection.reason
        if price.choice not in [candidate.choice for candidate in allowed]:
            price = allowed[0]
            reason = f"the fastest within {MAX_MEMORY:g} times the memory of alltoall"
        choice = price.choice
        token_prices = [rival for rival in allowed if rival.chain.rows == "tokens"]
        if self.splits_experts and token_prices:
            price = token_prices[0]
            choice = self._choice_of(price.chain.name, max(SPLITS))
            reason = f"without its experts, as {price.choice.name}, the fastest chain of tokens"
        assert self.cluster is not None, "one choice is given"
        return choice, (
            f"planned on {self.cluster.name} for up to {counted(tokens, 'token')} per rank: "
            f"{price.total_us:,.0f} us, "
            f"{reason}; holds up to {size_text(price.peak_bytes)}"
        )

    def candidates(self, tokens: int, max_candidates: int) -> dict[Choice, float]:
        """At most `max_candidates` candidates for so many tokens per rank, and their predicted us.

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
                choices = (self._choice_of(price.chain.name, number) for number in SPLITS)
                split = {choice: price.total_us for choice in choices if choice.splits_experts}
            found[price.choice] = price.total_us
        rest = islice(found.items(), max(max_candidates - len(split), 1))
        return dict(islice((dict(rest) | split).items(), max_candidates))

    def _stock(self, selection: Selection) -> Price:
        return next(price for price in selection.prices if price.choice == STOCK)

    def _allowed(self, selection: Selection) -> list[Price]:
        """Those that are not too large beside plain alltoall, the fastest first."""
        stock_bytes = self._stock(selection).peak_bytes
        # Hosts differ in the last bit, which a byte more makes up for.
        max_bytes = max(MAX_MEMORY * stock_bytes, stock_bytes + MORE_BYTES) + 1
        return [price for price in selection.rivals if price.peak_bytes <= max_bytes]

    def selection(self, tokens: int) -> Selection:
        """The prices of everything allowed, for at most so many tokens per rank."""
        assert self.shape is not None and self.cluster is not None, "one choice is given"
        tokens = half_octave(tokens)
        if tokens not in self._selections:
            self._selections[tokens] = select_chain(
                replace(self.shape, tokens_per_rank=tokens),
                self.cluster,
                chains=[chain.name for chain in self.chains],
                num_chunks=self.num_chunks,
                phase=self.phase,
            )
        return self._selections[tokens]

    def _choice_of(self, chain: str, num_chunks: int | None = None) -> Choice:
        # A number of chunks that was asked for is kept.
        number = self.num_chunks[0] if len(self.num_chunks) == 1 else num_chunks or 1
        splits = self.splits_experts and number > 1 and CHAINS[chain].rows == "tokens"
        return Choice(chain=chain, num_chunks=number, splits_experts=splits)
