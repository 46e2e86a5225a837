"""Select a chain: price each in every number of chunks, take the fastest or a plainer tie."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import Phase
from monta_megatron.core import Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.price import Price, price
from monta_megatron.planner.schedule import Times

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
        rivals: likewise; of several that do the same at this layout the plainest alone.
        incompatible: chain -> why it cannot run on the layout.
    """

    shape: Shape
    cluster: Cluster
    phase: Phase
    price: Price
    prices: Sequence[Price]
    rivals: Sequence[Price]
    incompatible: Mapping[str, str]

    @cached_property
    def reason(self) -> str:
        """Why this was selected."""
        price, fastest = self.price, self.rivals[0]
        others = [other for other in self.rivals if other.chain is not price.chain]
        if fastest is not price:
            how = (
                f"plainer than {fastest.choice.name}, which is {percent(price, fastest)} faster, "
                f"within the margin of {MARGIN:.0%}"
            )
        elif others:
            times = _ratio(others[0], price)
            how = f"{times:.2f}x as fast as {others[0].choice.name}, the next chain"
        else:
            how = "the only chain that can run"
        resource, busy_us = price.busiest()
        share = busy_us / price.total_us if price.total_us > 0 else 0.0
        return f"{how}; the {resource} is busy for {share:.0%} of the time"


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
    prices: list[Price] = []
    for chain in (CHAINS[name] for name in chains):
        reason = chain.incompatibility(shape.layout)
        if reason is not None:
            incompatible[chain.name] = reason
            continue
        for chunks in (1,) if chain.serial else num_chunks:
            prices.append(price(shape, cluster, chain, chunks, phase))
    if not prices:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in incompatible.items())
        raise ValueError(f"chains: none can run: {reasons}")
    prices.sort(key=lambda each: each.rank)
    # The plainest of those that do the same comes first.
    unlike: dict[tuple[tuple[Times, ...], float], Price] = {}
    for each in prices:
        unlike.setdefault((each.times, each.peak_bytes), each)
    rivals = list(unlike.values())
    return Selection(
        shape=shape,
        cluster=cluster,
        phase=phase,
        price=min(
            (each for each in rivals if each.total_us <= rivals[0].total_us * (1 + MARGIN)),
            key=lambda each: each.rank[1:],
        ),
        prices=prices,
        rivals=rivals,
        incompatible=incompatible,
    )


def percent(slower: Price, faster: Price) -> str:
    """1.234 times the time -> "23%", and "under 1%" instead of nothing."""
    ratio = _ratio(slower, faster)
    return f"{ratio - 1:.0%}" if ratio >= 1.01 else "under 1%"


def _ratio(slower: Price, faster: Price) -> float:
    return slower.total_us / faster.total_us if faster.total_us > 0 else 1.0
