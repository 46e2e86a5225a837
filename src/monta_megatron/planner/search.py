"""The search: price every chain in every number of chunks, take the fastest or a plainer near tie.

Steps: bind the chain to the expected rows, convert them to bytes, price the stages, run each pass's
schedule, add up the passes. The space is small, so all of it is searched.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from monta_megatron.chains import CHAINS
from monta_megatron.planner import reasons
from monta_megatron.planner.chain_price import ChainPrice, price_chain, stage_costs
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import Candidate, Phase, Plan, PlanKey
from monta_megatron.planner.reasons import Outcome
from monta_megatron.planner.resource_rates import resource_rates
from monta_megatron.planner.workload import Workload, exchange_of

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
    num_exchanged_counts: int | None = None,
    beside_bytes: Mapping[str, float] | None = None,
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
        num_exchanged_counts: integers per rank in the exchange of counts, if the chain is chosen
            after it; None for what each chain needs.
        beside_bytes: chain -> what it takes beside its exchange, within the limit, if anything.

    Raises:
        ValueError: no chain can run, or keeps to the limit.
    """
    refused: list[Candidate] = []
    prices: list[ChainPrice] = []
    for chain in (CHAINS[name] for name in chains):
        reason = chain.incompatibility(workload.layout)
        if reason is not None:
            refused.append(Candidate(chain=chain.name, num_chunks=None, rejected=reason))
            continue
        for chunks in (1,) if chain.serial else num_chunks:
            price = price_chain(workload, cluster, chain, chunks, phase, num_exchanged_counts)
            prices.append(replace(price, beside_bytes=(beside_bytes or {}).get(chain.name, 0.0)))
    prices.sort(key=lambda price: (price.total_us, price.plainness))
    # The plainest of those that do the same is the one that counts.
    plainest: dict[Hashable, ChainPrice] = {}
    for price in prices:
        plainest.setdefault(_work_of(price), price)

    # Memory comes before time, the plainer chain before a small gain.
    limit = math.inf if memory_limit_bytes is None else memory_limit_bytes
    allowed = [price for price in plainest.values() if price.held_bytes <= limit]
    if or_least and prices and not allowed:
        allowed = [min(prices, key=lambda price: price.held_bytes)]
    if not allowed:
        raise ValueError(reasons.why_none(prices, refused, memory_limit_bytes))
    choice = min(
        (price for price in allowed if price.total_us <= allowed[0].total_us * (1 + margin)),
        key=lambda price: price.plainness,
    )
    outcome = Outcome(
        choice=choice, allowed=allowed, memory_limit_bytes=memory_limit_bytes, margin=margin
    )
    return Plan(
        chain=choice.chain.name,
        num_chunks=choice.num_chunks,
        predicted_us=choice.total_us,
        reason=reasons.why_chosen(outcome),
        key=PlanKey(
            **exchange_of(workload),
            routing=workload.routing.name,
            phase=phase,
            cluster=cluster.name,
        ),
        stages=stage_costs(choice),
        candidates=(
            *(_candidate(price, plainest[_work_of(price)], outcome) for price in prices),
            *refused,
        ),
        notes=tuple(
            dict.fromkeys(
                (*cluster.doubts, *(note for pass_ in choice.passes for note in pass_.notes))
            )
        ),
        rates=resource_rates(cluster),
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
        slowest = replace(slowest, notes=(*slowest.notes, reasons.slowest_of(len(plans))))
    return slowest, workload


def _work_of(price: ChainPrice) -> Hashable:
    """What it does, whatever its chain is called: the work of every pass, and what it holds.

    A chain's stages that have nothing to do on a layout are no part of it.
    """
    works = tuple(
        (work.resource, work.times_us, work.launch_us)
        for pass_ in price.passes
        for work in pass_.works
    )
    return works, price.peak_bytes


def _candidate(price: ChainPrice, plainest: ChainPrice, outcome: Outcome) -> Candidate:
    """A price as a plan shows it.

    Args:
        price: the price.
        plainest: that of the plainest chain that does the same; the price itself if it is that.
        outcome: what the search came to.
    """
    is_choice = price is outcome.choice
    return Candidate(
        chain=price.chain.name,
        num_chunks=price.num_chunks,
        predicted_us=price.total_us,
        lower_bound_us=price.lower_bound_us,
        inter_bytes=price.sent_bytes("inter"),
        intra_bytes=price.sent_bytes("intra"),
        peak_bytes=price.peak_bytes,
        rejected=None if is_choice else reasons.why_rejected(price, plainest, outcome),
        same_as=None if price is plainest else plainest.name,
    )
