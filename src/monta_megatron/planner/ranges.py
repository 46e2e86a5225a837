"""A plan's times as ranges: likely figures price it, both ends of what was published bound it.

From measured curves a time is a point. Where a cluster states published figures it may state their
ends (`Cluster.ends`), by which the choice, and each chain in its best number of chunks, are priced
too. What is chosen follows from the likely figures alone.
"""

from dataclasses import replace

from monta_megatron.chains import CHAINS
from monta_megatron.planner.chain_price import ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import Candidate, Plan
from monta_megatron.planner.select import num_exchanged_counts
from monta_megatron.planner.workload import Workload


def with_ranges(plan: Plan, workload: Workload, cluster: Cluster) -> Plan:
    """A plan with the range of its choice and of each chain's fastest candidate.

    Args:
        plan: made for the workload.
        workload: what is exchanged.
        cluster: whose likely costs were used.
    """
    if cluster.ends is None:
        return plan
    shown = {id(plan.chosen)}
    # Of each chain the fastest, and the fastest that is not the same as another one.
    first: dict[tuple[str, bool], Candidate] = {}
    for candidate in plan.candidates:
        key = candidate.chain, candidate.same_as is None
        shown.add(id(first.setdefault(key, candidate)))
    candidates = tuple(
        replace(candidate, range_us=_range_us(candidate, plan, workload, cluster))
        if id(candidate) in shown
        else candidate
        for candidate in plan.candidates
    )
    ranged = replace(plan, candidates=candidates)
    return replace(ranged, range_us=None if ranged.chosen is None else ranged.chosen.range_us)


def _range_us(
    candidate: Candidate, plan: Plan, workload: Workload, cluster: Cluster
) -> tuple[float, float] | None:
    """The time of a candidate at both ends, the less first."""
    if candidate.num_chunks is None or cluster.ends is None:
        return None
    optimistic_us, conservative_us = (
        _price_at(end, candidate, plan, workload).total_us for end in cluster.ends
    )
    return min(optimistic_us, conservative_us), max(optimistic_us, conservative_us)


def _price_at(cluster: Cluster, candidate: Candidate, plan: Plan, workload: Workload) -> ChainPrice:
    assert candidate.num_chunks is not None, "it can run"
    phase = plan.key.phase
    chains = {entry.chain for entry in plan.candidates}
    chunks = [entry.num_chunks for entry in plan.candidates if entry.num_chunks is not None]
    num_counts = num_exchanged_counts(workload, chains, chunks)
    price = price_chain(
        workload,
        cluster,
        CHAINS[candidate.chain],
        candidate.num_chunks,
        phase,
        num_counts,
        plan.key.beside_us,
    )
    if workload.experts is None:
        return price
    from monta_megatron.planner.layer_price import with_experts

    return next(
        of_layer
        for of_layer in with_experts([price], workload, cluster, phase)
        if of_layer.experts_pipelined == candidate.experts_pipelined
    )
