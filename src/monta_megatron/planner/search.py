"""The plan of an exchange: what was selected, with everything that led to it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from monta_megatron.chains.program import Resource
from monta_megatron.common.units import gb_text
from monta_megatron.planner.chain_price import ChainPrice
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.lower_bound import pass_lower_bound_us
from monta_megatron.planner.plan import Candidate, Plan, PlanKey, StageCost, exchange_of
from monta_megatron.planner.pricing import AROUND_STAGES
from monta_megatron.planner.resource_rates import resource_rates
from monta_megatron.planner.schedule import serial_us
from monta_megatron.planner.selection import Selection, percent, select
from monta_megatron.planner.traffic import StageTraffic
from monta_megatron.planner.workload import Workload


def plan(workload: Workload, cluster: Cluster, **settings: Any) -> Plan:
    """Choose a chain and a number of chunks.

    Args:
        workload: what is exchanged.
        cluster: the cluster it runs on.
        settings: passed to `selection.select`.

    Raises:
        ValueError: no chain can run, or keeps to the limit.
    """
    return plan_of(select(workload, cluster, **settings))


def plan_of(selection: Selection) -> Plan:
    """A selection with all candidates, and why each of the others was not chosen."""
    workload, cluster, price = selection.workload, selection.cluster, selection.price
    notes = (*cluster.doubts, *(note for pass_ in price.passes for note in pass_.notes))
    return Plan(
        chain=price.chain.name,
        num_chunks=price.num_chunks,
        predicted_us=price.total_us,
        exposed_us=price.exposed_us,
        reason=selection.reason,
        key=PlanKey(
            **exchange_of(workload),
            routing=workload.routing.name,
            phase=selection.phase,
            cluster=cluster.name,
            beside_us=selection.beside_us,
            experts=None if workload.experts is None else workload.experts.note,
            kernels=cluster.kernels,
            rail_ctas=None if cluster.copies_block_host else cluster.ctas.rail,
            node_ctas=None if cluster.copies_block_host else cluster.ctas.node,
        ),
        stages=stage_costs(price),
        candidates=(
            *(
                _candidate(candidate, plainest, selection)
                for candidate, plainest in zip(selection.prices, selection.plainest, strict=True)
            ),
            *(
                Candidate(chain=name, num_chunks=None, rejected=reason)
                for name, reason in selection.incompatible.items()
            ),
        ),
        notes=tuple(dict.fromkeys(notes)),
        rates=resource_rates(cluster),
        experts_pipelined=price.experts_pipelined,
    )


def slowest_plan(
    workloads: Sequence[Workload], cluster: Cluster, **settings: Any
) -> tuple[Plan, Workload]:
    """The slowest of the workloads' plans, and its workload: that exchange holds up the others.

    Args:
        workloads: one for every way in which the exchanges of a layout lie on the nodes.
        cluster: the cluster it runs on.
        settings: passed to `selection.select`.

    Raises:
        ValueError: no chain can run.
    """
    plans = [(plan(workload, cluster, **settings), workload) for workload in workloads]
    slowest, workload = max(plans, key=lambda planned: planned[0].exposed_us or 0.0)
    if len(plans) > 1:
        note = f"exchanges lie on the nodes in {len(plans)} ways; this is the slowest of them"
        slowest = replace(slowest, notes=(*slowest.notes, note))
    return slowest, workload


def _candidate(price: ChainPrice, plainest: ChainPrice, selection: Selection) -> Candidate:
    """A price as a plan shows it.

    Args:
        price: the price.
        plainest: that of the plainest chain that does the same; the price itself if it is that.
        selection: what was selected.
    """
    return Candidate(
        chain=price.chain.name,
        num_chunks=price.num_chunks,
        predicted_us=price.total_us,
        exposed_us=price.exposed_us,
        lower_bound_us=sum(
            pass_lower_bound_us(pass_, selection.cluster.factor) for pass_ in price.passes
        ),
        inter_bytes=_sent_bytes_of(price, "inter"),
        intra_bytes=_sent_bytes_of(price, "intra"),
        peak_bytes=price.peak_bytes,
        rejected=_why_rejected(price, plainest, selection),
        same_as=None if price is plainest else plainest.name,
        experts_pipelined=price.experts_pipelined,
    )


def _why_rejected(price: ChainPrice, plainest: ChainPrice, selection: Selection) -> str | None:
    """Why something that can run was not chosen; None if it was."""
    selected = selection.price
    same = f"the same as {plainest.name} at this layout"
    if price is selected:
        return None
    if plainest is selected:
        return same
    if selection.is_over_limit(price):
        return f"needs {gb_text(price.held_bytes)} on a rank, {selection.limit}"
    if price.exposed_us == selected.exposed_us:
        return f"as fast as {selected.name}, which is plainer"
    if price.exposed_us < selected.exposed_us:
        return (
            f"{percent(selected, price)} faster, within the margin of {selection.margin:.0%} for a "
            "plainer chain"
        )
    resource, busy_us = price.busiest()
    why = f"{resource} {busy_us:,.0f} us" if price is plainest else same
    if selection.beside_us > 0:
        return f"leaves {price.exposed_us - selected.exposed_us:,.0f} us more; {why}"
    return f"{percent(price, selected)} slower; {why}"


def stage_costs(price: ChainPrice) -> tuple[StageCost, ...]:
    """Every stage of every pass, as a plan shows it."""
    costs = []
    for pass_, of_pass in zip(price.passes, price.traffic, strict=True):
        if pass_.host_us > 0:
            around = StageCost(
                pass_name=pass_.pass_name,
                stage=AROUND_STAGES,
                resource="host",
                alone_us=pass_.host_us,
                inter_bytes=0.0,
                intra_bytes=0.0,
            )
            costs.append(around)
        # Finding copies and making them is one stage.
        alone_us: dict[str, float] = {}
        for work in pass_.works:
            alone_us[work.stage] = alone_us.get(work.stage, 0.0) + serial_us([work])
        costs += [
            StageCost(
                pass_name=pass_.pass_name,
                stage=work.stage,
                resource=work.resource,
                alone_us=alone_us.pop(work.stage),
                inter_bytes=sent_bytes(traffic, "inter", price.num_represented),
                intra_bytes=sent_bytes(traffic, "intra", price.num_represented),
            )
            for work, traffic in zip(pass_.works, of_pass.stages, strict=True)
            if work.stage in alone_us
        ]
    return tuple(costs)


def sent_bytes(stage: StageTraffic, resource: Resource, num_represented: Sequence[int]) -> float:
    """Bytes that leave ranks for others in one stage.

    Args:
        stage: what the priced ranks do in it.
        resource: "inter" or "intra".
        num_represented: [S] how many ranks each of them stands for.
    """
    if resource not in stage.moved:
        return 0.0
    sent: float = (stage.moved[resource].num_bytes[0].sum(axis=1) @ num_represented).item()
    return sent


def _sent_bytes_of(price: ChainPrice, resource: Resource) -> float:
    """Bytes of the chain's stages, over all ranks and passes."""
    return sum(
        sent_bytes(stage, resource, price.num_represented)
        for of_pass in price.traffic
        for stage in of_pass.pipeline
    )
