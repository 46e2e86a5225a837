"""Select a chain: price every chain in every number of chunks, take the fastest or a plainer tie.

Steps: bind the chain to the expected rows, convert them to bytes, price the stages, run each pass's
schedule, add up the passes. The space is small, so all of it is searched.

Work that runs beside an exchange hides part of a measured time, by the rule that ranks predictions:
an equal part of the work lies beside the program of each pass (see `schedule`). Programs are taken
to be as much longer or shorter than predicted as the whole exchange is. Operations around them,
which nothing hides, and the work's own loss to the exchange stay as predicted.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from monta_megatron.chains import CHAINS
from monta_megatron.chains.chain import blocks_for
from monta_megatron.chains.counts import message_size
from monta_megatron.chains.program import Phase
from monta_megatron.common.rules import NonNegativeFloat
from monta_megatron.common.units import gb_text
from monta_megatron.planner.benefit import Benefit, benefit_of
from monta_megatron.planner.chain_price import ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.workload import Workload

NUM_CHUNKS = (1, 2, 4, 8)
MARGIN = 0.03


@dataclass(frozen=True, kw_only=True)
class Selection:
    """A selection, and the prices that it was made from.

    Attributes:
        workload: the exchange.
        cluster: the cluster it runs on.
        phase: the phase that it was selected for.
        price: the price of what was selected.
        prices: of everything that can run, the fastest first.
        plainest: [prices] the plainest that does the same; the price itself if it is that.
        allowed: from what it was selected, the fastest first.
        incompatible: chain -> why it cannot run on the layout.
        memory_limit_bytes: what was allowed to be held on a rank, or None.
        margin: the fraction by which a plainer chain was allowed to be slower.
        overlapped_compute_us: compute beside the exchange, which hides as much of it.
    """

    workload: Workload
    cluster: Cluster
    phase: Phase
    price: ChainPrice
    prices: Sequence[ChainPrice]
    plainest: Sequence[ChainPrice]
    allowed: Sequence[ChainPrice]
    incompatible: Mapping[str, str]
    memory_limit_bytes: float | None
    margin: float
    overlapped_compute_us: float = 0.0

    def is_over_limit(self, price: ChainPrice) -> bool:
        """Whether something holds more than is allowed."""
        return self.memory_limit_bytes is not None and price.held_bytes > self.memory_limit_bytes

    @property
    def limit(self) -> str:
        """The limit as text."""
        return f"over the limit of {gb_text(self.memory_limit_bytes or 0.0)}"

    @property
    def benefit(self) -> Benefit | None:
        """Benefit over plain `alltoall`; None as in `plan.Plan`, and for quantized rows."""
        quantized = self.workload.quantized_passes
        if self.overlapped_compute_us > 0 or self.workload.experts is not None or quantized:
            return None
        # The fastest come last here, and stay.
        best_us = {price.chain.name: price.total_us for price in reversed(self.prices)}
        return benefit_of(self.price.chain.name, self.price.total_us, best_us, self.reason)

    @property
    def reason(self) -> str:
        """Why this was selected."""
        price, fastest = self.price, self.allowed[0]
        others = [other for other in self.allowed if other.chain is not price.chain]
        if fastest is not price:
            how = (
                f"plainer than {fastest.name}, which is {percent(price, fastest)} faster, within "
                f"the margin of {self.margin:.0%}"
            )
        elif others:
            how = f"{_ratio(others[0], price):.2f}x as fast as {others[0].name}, the next chain"
            if self.overlapped_compute_us > 0:
                how = f"{others[0].name}, the next chain, exposes {others[0].exposed_us:,.0f} us"
        else:
            how = "the only chain that can run"
        resource, busy_us = price.busiest()
        share = busy_us / price.total_us if price.total_us > 0 else 0.0
        if self.overlapped_compute_us > 0:
            how = f"exposes {price.exposed_us:,.0f} of {price.total_us:,.0f} us; {how}"
        over = f"; {self.limit}" if self.is_over_limit(price) else ""
        return f"{how}; the {resource} is busy for {share:.0%} of the time{over}"


def num_exchanged_counts(
    workload: Workload, chains: Iterable[str], num_chunks: Sequence[int]
) -> int:
    """Integers to each rank in the exchange of counts, behind which one of some chains is chosen.

    It holds what any of them needs that can run, in any of the numbers of chunks.
    """
    able = [CHAINS[name] for name in chains]
    able = [chain for chain in able if chain.incompatibility(workload.layout) is None]
    return message_size(able, workload.layout, blocks_for(max(num_chunks))) if able else 0


def select_chain(
    workload: Workload,
    cluster: Cluster,
    *,
    phase: Phase = "forward_backward",
    chains: Sequence[str] = tuple(CHAINS),
    num_chunks: Sequence[int] = NUM_CHUNKS,
    memory_limit_bytes: float | None = None,
    or_least: bool = False,
    margin: float = MARGIN,
    beside_bytes: Mapping[str, float] | None = None,
    overlapped_compute_us: float = 0.0,
    price: Callable[..., ChainPrice] = price_chain,
) -> Selection:
    """Choose a chain and a number of chunks.

    Args:
        workload: the exchange.
        cluster: the cluster it runs on.
        phase: the phase to choose for.
        chains: the chains to consider.
        num_chunks: the numbers of chunks to consider; a serial chain has one.
        memory_limit_bytes: limit on what the executor holds at once on a rank, or None.
        or_least: where every chain holds more, choose the one that holds the least, and say so.
        margin: a plainer chain is chosen if it takes at most this fraction longer than the fastest.
        beside_bytes: chain -> bytes that it takes beside its exchange, within the limit.
        overlapped_compute_us: compute beside the exchange, in all passes of the phase together.
        price: `price_chain`, or one that remembers what it has priced.

    Raises:
        ValueError: no chain can run, or keeps to the limit.
    """
    incompatible: dict[str, str] = {}
    prices: list[ChainPrice] = []
    num_counts = num_exchanged_counts(workload, chains, num_chunks)
    for chain in (CHAINS[name] for name in chains):
        reason = chain.incompatibility(workload.layout)
        if reason is not None:
            incompatible[chain.name] = reason
            continue
        for chunks in (1,) if chain.serial else num_chunks:
            priced = price(
                workload, cluster, chain, chunks, phase, num_counts, overlapped_compute_us
            )
            prices.append(replace(priced, beside_bytes=(beside_bytes or {}).get(chain.name, 0.0)))
    if workload.experts is not None:
        from monta_megatron.planner.layer_price import with_experts

        prices = with_experts(prices, workload, cluster, phase)
    prices.sort(key=lambda price: (price.exposed_us, price.plainness))
    # The plainest of those that do the same is the one that counts.
    plainest: dict[Hashable, ChainPrice] = {}
    same = [plainest.setdefault(price.work, price) for price in prices]

    # Memory comes before time, the plainer chain before a small gain.
    limit = math.inf if memory_limit_bytes is None else memory_limit_bytes
    allowed = [price for price in plainest.values() if price.held_bytes <= limit]
    if not allowed:
        if not prices:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in incompatible.items())
            raise ValueError(f"chains: none can run: {reasons}")
        least = min(prices, key=lambda price: price.held_bytes)
        if not or_least:
            raise ValueError(
                f"memory_limit: got {gb_text(limit)}, must be at least "
                f"{gb_text(least.held_bytes)}, what {least.name} needs on a rank"
            )
        allowed = [least]
    return Selection(
        workload=workload,
        cluster=cluster,
        phase=phase,
        price=min(
            (each for each in allowed if each.exposed_us <= allowed[0].exposed_us * (1 + margin)),
            key=lambda price: price.plainness,
        ),
        prices=prices,
        plainest=same,
        allowed=allowed,
        incompatible=incompatible,
        memory_limit_bytes=memory_limit_bytes,
        margin=margin,
        overlapped_compute_us=overlapped_compute_us,
    )


def percent(slower: ChainPrice, faster: ChainPrice) -> str:
    """1.234 times the time -> "23%", and "under 1%" instead of nothing."""
    ratio = _ratio(slower, faster)
    return f"{ratio - 1:.0%}" if ratio >= 1.01 else "under 1%"


def _ratio(slower: ChainPrice, faster: ChainPrice) -> float:
    return slower.exposed_us / faster.exposed_us if faster.exposed_us > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class OverlappedCompute:
    """Computation that overlaps an exchange, and the predictions of both.

    Attributes:
        part_us: of the work, beside each pass.
        program_us: [passes] the program of each.
        total_us: the exchange.
        exposed_us: its exposed part.
    """

    part_us: NonNegativeFloat
    program_us: tuple[NonNegativeFloat, ...]
    total_us: NonNegativeFloat
    exposed_us: NonNegativeFloat

    @property
    def overlapped_compute_us(self) -> float:
        """The work beside all passes."""
        return self.part_us * len(self.program_us)

    def exposed_of(self, us: float) -> float:
        """Exposed part of an exchange that takes `us`."""
        programs_us = sum(self.program_us)
        longer = max(programs_us + us - self.total_us, 0.0) / programs_us if programs_us else 1.0
        more_us = (
            max(longer * program_us - self.part_us, 0.0) - max(program_us - self.part_us, 0.0)
            for program_us in self.program_us
        )
        return max(self.exposed_us + sum(more_us), 0.0)


def overlapped_compute_of(price: ChainPrice) -> OverlappedCompute | None:
    """Work beside a priced exchange; None for nothing."""
    if price.overlapped_compute_us == 0:
        return None
    return OverlappedCompute(
        part_us=price.overlapped_compute_us / len(price.passes),
        program_us=tuple(pass_.schedule.total_us for pass_ in price.passes),
        total_us=price.total_us,
        exposed_us=price.exposed_us,
    )


def exposed_of(us: float, overlapped_compute: OverlappedCompute | None) -> float:
    """Exposed part of an exchange that takes `us`: all of it where nothing overlaps it."""
    return us if overlapped_compute is None else overlapped_compute.exposed_of(us)
