"""Select a chain: price every chain in every number of chunks, take the fastest or a plainer tie.

Steps: bind the chain to the expected rows, convert them to bytes, price the stages, run each pass's
schedule, add up the passes. The space is small, so all of it is searched.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from monta_megatron.chains import CHAINS
from monta_megatron.chains.chain import blocks_for
from monta_megatron.chains.counts import message_size
from monta_megatron.chains.program import Phase
from monta_megatron.core import Shape
from monta_megatron.planner.chain_price import ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster

NUM_CHUNKS = (1, 2, 4, 8)
# A plainer chain is chosen if it takes at most this fraction longer than the fastest.
MARGIN = 0.03


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A selection, and the prices that it was made from.

    Attributes:
        shape: the exchange.
        cluster: the cluster it runs on.
        phase: the phase that it was selected for.
        price: the price of what was selected.
        prices: of everything that can run, the fastest first.
        plainest: [prices] the plainest that does the same; the price itself if it is that.
        rivals: from what it was selected, the fastest first.
        incompatible: chain -> why it cannot run on the layout.
    """

    shape: Shape
    cluster: Cluster
    phase: Phase
    price: ChainPrice
    prices: Sequence[ChainPrice]
    plainest: Sequence[ChainPrice]
    rivals: Sequence[ChainPrice]
    incompatible: Mapping[str, str]

    @cached_property
    def reason(self) -> str:
        """Why this was selected."""
        price, fastest = self.price, self.rivals[0]
        others = [other for other in self.rivals if other.chain is not price.chain]
        if fastest is not price:
            how = (
                f"plainer than {fastest.name}, which is {percent(price, fastest)} faster, within "
                f"the margin of {MARGIN:.0%}"
            )
        elif others:
            how = f"{_ratio(others[0], price):.2f}x as fast as {others[0].name}, the next chain"
        else:
            how = "the only chain that can run"
        resource, busy_us = price.busiest()
        share = busy_us / price.total_us if price.total_us > 0 else 0.0
        return f"{how}; the {resource} is busy for {share:.0%} of the time"


def num_exchanged_counts(shape: Shape, chains: Iterable[str], num_chunks: Sequence[int]) -> int:
    """Integers to each rank in the exchange of counts, behind which one of some chains is chosen.

    It holds what any of them needs that can run, in any of the numbers of chunks.
    """
    able = [CHAINS[name] for name in chains]
    able = [chain for chain in able if chain.incompatibility(shape.layout) is None]
    return message_size(able, shape.layout, blocks_for(max(num_chunks))) if able else 0


def select_chain(
    shape: Shape,
    cluster: Cluster,
    *,
    phase: Phase = "forward_backward",
    chains: Sequence[str] = tuple(CHAINS),
    num_chunks: Sequence[int] = NUM_CHUNKS,
) -> Selection:
    """Choose a chain and a number of chunks.

    Args:
        shape: the exchange.
        cluster: the cluster it runs on.
        phase: the phase to choose for.
        chains: the chains to consider.
        num_chunks: the numbers of chunks to consider; a serial chain has one.

    Raises:
        ValueError: no chain can run.
    """
    incompatible: dict[str, str] = {}
    prices: list[ChainPrice] = []
    num_counts = num_exchanged_counts(shape, chains, num_chunks)
    for chain in (CHAINS[name] for name in chains):
        reason = chain.incompatibility(shape.layout)
        if reason is not None:
            incompatible[chain.name] = reason
            continue
        for chunks in (1,) if chain.serial else num_chunks:
            prices.append(price_chain(shape, cluster, chain, chunks, phase, num_counts))
    if not prices:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in incompatible.items())
        raise ValueError(f"chains: none can run: {reasons}")
    # Hosts differ in the last bit of a price.
    prices.sort(key=lambda price: (round(price.total_us, 1), price.plainness))
    # The plainest of those that do the same is the one that counts.
    plainest: dict[Hashable, ChainPrice] = {}
    same = [plainest.setdefault(price.work, price) for price in prices]

    rivals = list(plainest.values())
    return Selection(
        shape=shape,
        cluster=cluster,
        phase=phase,
        price=min(
            (each for each in rivals if each.total_us <= rivals[0].total_us * (1 + MARGIN)),
            key=lambda price: price.plainness,
        ),
        prices=prices,
        plainest=same,
        rivals=rivals,
        incompatible=incompatible,
    )


def percent(slower: ChainPrice, faster: ChainPrice) -> str:
    """1.234 times the time -> "23%", and "under 1%" instead of nothing."""
    ratio = _ratio(slower, faster)
    return f"{ratio - 1:.0%}" if ratio >= 1.01 else "under 1%"


def _ratio(slower: ChainPrice, faster: ChainPrice) -> float:
    return slower.total_us / faster.total_us if faster.total_us > 0 else 1.0
