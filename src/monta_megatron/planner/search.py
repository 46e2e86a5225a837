"""The search: price every chain in every number of chunks, take the fastest or a plainer near tie.

Steps: bind the chain to the expected rows, convert them to bytes, price the stages, run each walk's
schedule, add up the walks. The space is small, so all of it is searched.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from monta_megatron.chains import CHAINS
from monta_megatron.planner.chain_price import ChainPrice, price_chain, stage_costs
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import Candidate, Phase, Plan, Situation, exchange_of
from monta_megatron.planner.tier_rates import tier_rates
from monta_megatron.planner.workload import Workload
from monta_megatron.quantities import counted

NUM_CHUNKS = (1, 2, 4, 8)
MARGIN = 0.03


def plan(
    workload: Workload,
    cluster: Cluster,
    *,
    phase: Phase = "forward_backward",
    chains: Sequence[str] = tuple(CHAINS),
    num_chunks: Sequence[int] = NUM_CHUNKS,
    memory_limit_bytes: float | None = None,
    or_least: bool = False,
    margin: float = MARGIN,
    gathered_counts: int | None = None,
) -> Plan:
    """Choose a chain and a number of chunks.

    Args:
        workload: what is exchanged.
        cluster: the cluster it runs on.
        phase: the phase to choose for.
        chains: the chains to consider.
        num_chunks: the numbers of chunks to consider; a serial chain has one.
        memory_limit_bytes: limit on what the executor holds at once on a rank, or None.
        or_least: where every chain holds more, choose the one that holds the least, and say so.
        margin: a plainer chain is chosen if it takes at most this fraction longer than the fastest.
        gathered_counts: integers per rank in the gather of counts, if the chain is chosen after it;
            None for what each chain needs.

    Raises:
        ValueError: no chain can run, or keeps to the limit.
    """
    refused: list[Candidate] = []
    prices: list[ChainPrice] = []
    for chain in (CHAINS[name] for name in chains):
        reason = chain.refusal(workload.layout)
        if reason is not None:
            refused.append(Candidate(chain=chain.name, num_chunks=None, rejected=reason))
            continue
        for chunks in (1,) if chain.serial else num_chunks:
            prices.append(price_chain(workload, cluster, chain, chunks, phase, gathered_counts))
    prices.sort(key=lambda price: (price.total_us, price.plainness))
    # The plainest of those that do the same is the one that counts.
    plainest: dict[Hashable, ChainPrice] = {}
    for price in prices:
        plainest.setdefault(_work_of(price), price)

    allowed = [
        price
        for price in plainest.values()
        if memory_limit_bytes is None or price.peak_bytes <= memory_limit_bytes
    ]
    if or_least and prices and not allowed:
        allowed = [min(prices, key=lambda price: price.peak_bytes)]
    if not allowed:
        raise ValueError(_why_none(prices, refused, memory_limit_bytes))
    choice = min(
        (price for price in allowed if price.total_us <= allowed[0].total_us * (1 + margin)),
        key=lambda price: price.plainness,
    )
    reason = _why_chosen(choice, allowed, margin)
    if memory_limit_bytes is not None and choice.peak_bytes > memory_limit_bytes:
        reason += f"; over the limit of {memory_limit_bytes / 1e9:.3g} GB"
    situation = Situation(
        **exchange_of(workload),
        routing=workload.routing.name,
        phase=phase,
        cluster=cluster.name,
    )
    return Plan(
        chain=choice.chain.name,
        num_chunks=choice.num_chunks,
        predicted_us=choice.total_us,
        reason=reason,
        situation=situation,
        stages=stage_costs(choice),
        candidates=(
            *(
                _candidate(price, plainest[_work_of(price)], choice, memory_limit_bytes, margin)
                for price in prices
            ),
            *refused,
        ),
        notes=tuple(
            dict.fromkeys(
                (*cluster.doubts, *(note for walk in choice.walks for note in walk.notes))
            )
        ),
        rates=tier_rates(cluster),
    )


def slowest_plan(
    workloads: Sequence[Workload], cluster: Cluster, **settings: Any
) -> tuple[Plan, Workload]:
    """The slowest of the workloads' plans, and its workload: that exchange holds up the others.

    Args:
        workloads: one for every way in which the exchanges of a layout lie on the nodes.
        cluster: the cluster it runs on.
        settings: passed to `plan`.

    Raises:
        ValueError: no chain can run.
    """
    plans = [(plan(workload, cluster, **settings), workload) for workload in workloads]
    slowest, workload = max(plans, key=lambda pair: pair[0].predicted_us or 0.0)
    if len(plans) > 1:
        note = f"exchanges lie on the nodes in {len(plans)} ways; this is the slowest of them"
        slowest = replace(slowest, notes=(*slowest.notes, note))
    return slowest, workload


def _work_of(price: ChainPrice) -> Hashable:
    """What it does, whatever its chain is called: the work of every walk, and what it holds.

    A chain's stages that have nothing to do on a layout are no part of it.
    """
    works = tuple(
        (work.resource, work.times_us, work.launch_us)
        for walk in price.walks
        for work in walk.works
    )
    return works, price.peak_bytes


def _candidate(
    price: ChainPrice,
    plainest: ChainPrice,
    choice: ChainPrice,
    memory_limit_bytes: float | None,
    margin: float,
) -> Candidate:
    same_as = None if price is plainest else f"{plainest.chain.name} in {_chunks(plainest)}"
    if price is choice:
        rejected = None
    elif plainest is choice:
        rejected = f"the same as {same_as} at this layout"
    elif memory_limit_bytes is not None and price.peak_bytes > memory_limit_bytes:
        rejected = (
            f"needs {price.peak_bytes / 1e9:.3g} GB on a rank, over the limit of "
            f"{memory_limit_bytes / 1e9:.3g} GB"
        )
    elif price.total_us == choice.total_us:
        rejected = f"as fast as {choice.chain.name} in {_chunks(choice)}, which is plainer"
    elif price.total_us < choice.total_us:
        rejected = (
            f"{_percent(choice.total_us / price.total_us)} faster, within the margin of "
            f"{margin:.0%} for a plainer chain"
        )
    else:
        resource, busy_us = price.busiest()
        why = f"{resource} {busy_us:,.0f} us"
        if same_as is not None:
            why = f"the same as {same_as} at this layout"
        rejected = f"{_percent(price.total_us / choice.total_us)} slower; {why}"
    moved = price.bytes_by_tier()
    return Candidate(
        chain=price.chain.name,
        num_chunks=price.num_chunks,
        predicted_us=price.total_us,
        lower_bound_us=price.lower_bound_us,
        inter_bytes=moved["inter"],
        intra_bytes=moved["intra"],
        peak_bytes=price.peak_bytes,
        rejected=rejected,
        same_as=same_as,
    )


def _why_chosen(choice: ChainPrice, allowed: Sequence[ChainPrice], margin: float) -> str:
    resource, busy_us = choice.busiest()
    share = busy_us / choice.total_us if choice.total_us > 0 else 0.0
    bound_by = f"the {resource} is busy for {share:.0%} of the time"
    fastest = allowed[0]
    others = [price for price in allowed if price.chain is not choice.chain]
    if fastest is not choice:
        how = (
            f"plainer than {fastest.chain.name} in {_chunks(fastest)}, which is "
            f"{_percent(choice.total_us / fastest.total_us)} faster, within the margin of "
            f"{margin:.0%}"
        )
    elif others:
        how = (
            f"{others[0].total_us / choice.total_us:.2f}x as fast as {others[0].chain.name} in "
            f"{_chunks(others[0])}, the next chain"
        )
    else:
        how = "the only chain that can run"
    return f"{how}; {bound_by}"


def _why_none(
    prices: Sequence[ChainPrice], refused: Sequence[Candidate], memory_limit_bytes: float | None
) -> str:
    if prices and memory_limit_bytes is not None:
        least = min(prices, key=lambda price: price.peak_bytes)
        return (
            f"memory_limit: got {memory_limit_bytes / 1e9:.3g} GB, must be at least "
            f"{least.peak_bytes / 1e9:.3g} GB, what {least.chain.name} in {_chunks(least)} "
            "needs on a rank"
        )
    return "chains: none can run: " + "; ".join(
        f"{each.chain}: {each.rejected}" for each in refused
    )


def _percent(ratio: float) -> str:
    """1.234 -> "23%", and "under 1%" instead of nothing."""
    return f"{ratio - 1:.0%}" if ratio >= 1.01 else "under 1%"


def _chunks(price: ChainPrice) -> str:
    return counted(price.num_chunks, "chunk")
