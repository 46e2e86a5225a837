"""Plans: the selected chain, every candidate with its numbers, ranges, and why each was rejected.

Likely figures price a plan; both ends of the published figures bound its times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import Phase, Resource
from monta_megatron.common.rules import NonNegativeFloat, PositiveInt, Text
from monta_megatron.core import Shape
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.chain_price import ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster, Kernels
from monta_megatron.planner.cluster_file import ResourceRate, resource_rates
from monta_megatron.planner.pricing import AROUND_STAGES
from monta_megatron.planner.schedule import serial_us
from monta_megatron.planner.select import (
    MARGIN,
    Selection,
    num_exchanged_counts,
    percent,
    select_chain,
)
from monta_megatron.planner.traffic import StageTraffic


@dataclass(frozen=True, kw_only=True)
class PlanKey:
    """The exchange, phase and costs that a plan was made for.

    Attributes:
        ep: expert parallel size.
        etp: expert tensor parallel size.
        nodes: [ep * etp] node of every rank of the exchange, the first one being 0.
        num_experts: experts of the layer.
        topk: experts per token; for a routing that is not top-k, the most experts of one.
        hidden_size: hidden size of a row.
        value_bytes: bytes of one hidden value.
        tokens_per_rank: the most tokens that a rank brings.
        routing: where tokens go.
        phase: the phase that the choice was made for.
        cluster: name of the cluster whose costs were used.
        kernels: that copy and sum rows in what was priced.
    """

    ep: PositiveInt
    etp: PositiveInt
    nodes: tuple[int, ...]
    num_experts: PositiveInt
    topk: PositiveInt
    hidden_size: PositiveInt
    value_bytes: PositiveInt
    tokens_per_rank: int
    routing: Text
    phase: Phase
    cluster: Text
    kernels: Kernels


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage of the chosen chain, all chunks together.

    Attributes:
        pass_name: dispatch, combine, or the backward pass of one of them.
        stage: its name.
        resource: what it occupies; "host" for what surrounds the stages of a pass.
        alone_us: time of its chunks one after the other, with nothing else running.
        inter_bytes: bytes that leave ranks for other nodes, over all ranks of the exchange.
        intra_bytes: bytes that leave ranks for others on their node, likewise.
    """

    pass_name: Text
    stage: Text
    resource: Literal[Resource, "host"]
    alone_us: NonNegativeFloat
    inter_bytes: NonNegativeFloat
    intra_bytes: NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A chain and a number of chunks.

    Attributes:
        chain: its name.
        num_chunks: None where the chain cannot run in any number of chunks.
        predicted_us: time of the phase; None where it cannot run.
        inter_bytes: as in `StageCost`, over all stages.
        intra_bytes: likewise.
        peak_bytes: the most that the executor holds at once on one rank.
        range_us: the least and the most that it may take, by the ends of what was published;
            None where times were measured, and for all but the best of each chain.
        rejected: why it was not chosen; None for the choice.
        same_as: the plainer candidate that does the same at this layout, and so no rival; or None.
    """

    chain: Text
    num_chunks: PositiveInt | None
    predicted_us: NonNegativeFloat | None = None
    range_us: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    inter_bytes: NonNegativeFloat | None = None
    intra_bytes: NonNegativeFloat | None = None
    peak_bytes: NonNegativeFloat | None = None
    rejected: str | None = None
    same_as: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice, with everything that led to it.

    Attributes:
        chain: key of `chains.CHAINS`.
        num_chunks: number of chunks of the chosen chain.
        predicted_us: time of the phase.
        range_us: as in `Candidate`.
        reason: why this one.
        key: what it was made for.
        stages: the choice, stage by stage.
        candidates: everything considered, the fastest first, what cannot run last.
        notes: assumptions.
        rates: by which large messages were priced, for each resource of the cluster.
    """

    chain: Text
    num_chunks: PositiveInt
    predicted_us: NonNegativeFloat
    reason: Text
    key: PlanKey
    range_us: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    stages: tuple[StageCost, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    rates: tuple[ResourceRate, ...] = ()

    @property
    def chosen(self) -> Candidate:
        """The candidate that is not rejected."""
        return next(entry for entry in self.candidates if entry.rejected is None)

    def best_us(self) -> dict[str, float | None]:
        """The time of each chain in its best number of chunks, of the chosen one in the chosen.

        None where a chain cannot run.
        """
        best: dict[str, float | None] = {self.chain: self.predicted_us}
        # The fastest candidates come first.
        for candidate in self.candidates:
            best.setdefault(candidate.chain, candidate.predicted_us)
        return best

    @property
    def stock_us(self) -> float | None:
        """Time of plain `alltoall`; None where it was not priced."""
        return self.best_us().get("alltoall")

    @property
    def benefit(self) -> Benefit | None:
        """Benefit over plain `alltoall`; None where that was not priced."""
        stock = next((entry for entry in self.candidates if entry.chain == "alltoall"), None)
        if stock is None or stock.predicted_us is None:
            return None
        benefit = Benefit(
            chain=self.chain, chosen_us=self.predicted_us, alltoall_us=stock.predicted_us
        )
        if stock.range_us is None or self.range_us is None:
            return benefit
        ends = zip(stock.range_us, self.range_us, strict=True)
        ratios = [benefit.ratio, *(alltoall_us / chosen_us for alltoall_us, chosen_us in ends)]
        return replace(benefit, ratio_range=(min(ratios), max(ratios)))


def plan(shape: Shape, cluster: Cluster, **settings: Any) -> Plan:
    """Choose a chain and a number of chunks.

    Args:
        shape: the exchange.
        cluster: the cluster it runs on.
        settings: passed to `select.select_chain`.

    Raises:
        ValueError: no chain can run.
    """
    return plan_of(select_chain(shape, cluster, **settings))


def plan_of(selection: Selection) -> Plan:
    """A selection with all candidates, and why each of the others was not chosen."""
    shape, cluster, price = selection.shape, selection.cluster, selection.price
    layout, routing = shape.layout, shape.routing
    notes = (*cluster.doubts, *(note for pass_ in price.passes for note in pass_.notes))
    return Plan(
        chain=price.chain.name,
        num_chunks=price.num_chunks,
        predicted_us=price.total_us,
        reason=selection.reason,
        key=PlanKey(
            ep=layout.ep,
            etp=layout.etp,
            nodes=tuple(node - min(layout.nodes) for node in layout.nodes),
            num_experts=routing.num_experts,
            topk=routing.max_experts_per_token,
            hidden_size=shape.hidden_size,
            value_bytes=shape.value_bytes,
            tokens_per_rank=shape.tokens_per_rank,
            routing=routing.name,
            phase=selection.phase,
            cluster=cluster.name,
            kernels=cluster.kernels,
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
    )


def slowest_plan(shapes: Sequence[Shape], cluster: Cluster, **settings: Any) -> tuple[Plan, Shape]:
    """The slowest of the shapes' plans, and its shape: that exchange holds up the others.

    Args:
        shapes: one for every way in which the exchanges of a layout lie on the nodes.
        cluster: the cluster it runs on.
        settings: passed to `select.select_chain`.

    Raises:
        ValueError: no chain can run.
    """
    plans = [(plan(shape, cluster, **settings), shape) for shape in shapes]
    slowest, shape = max(plans, key=lambda planned: planned[0].predicted_us)
    if len(plans) > 1:
        note = f"exchanges lie on the nodes in {len(plans)} ways; this is the slowest of them"
        slowest = replace(slowest, notes=(*slowest.notes, note))
    return slowest, shape


def _candidate(price: ChainPrice, plainest: ChainPrice, selection: Selection) -> Candidate:
    """A price as a plan shows it.

    Args:
        price: the price.
        plainest: that of the plainest chain that does the same; the price itself if it is that.
        selection: with the prices of all candidates.
    """
    return Candidate(
        chain=price.chain.name,
        num_chunks=price.num_chunks,
        predicted_us=price.total_us,
        inter_bytes=_sent_bytes_of(price, "inter"),
        intra_bytes=_sent_bytes_of(price, "intra"),
        peak_bytes=price.peak_bytes,
        rejected=_why_rejected(price, plainest, selection),
        same_as=None if price is plainest else plainest.name,
    )


def _why_rejected(price: ChainPrice, plainest: ChainPrice, selection: Selection) -> str | None:
    """Why something that can run was not chosen; None if it was."""
    selected = selection.price
    same = f"the same as {plainest.name} at this layout"
    if price is selected:
        return None
    if plainest is selected:
        return same
    if price.total_us == selected.total_us:
        return f"as fast as {selected.name}, which is plainer"
    if price.total_us < selected.total_us:
        return (
            f"{percent(selected, price)} faster, within the margin of {MARGIN:.0%} for a "
            "plainer chain"
        )
    resource, busy_us = price.busiest()
    why = f"{resource} {busy_us:,.0f} us" if price is plainest else same
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


def with_ranges(plan: Plan, shape: Shape, cluster: Cluster) -> Plan:
    """A plan with the range of its choice and of each chain's fastest candidate.

    Args:
        plan: made for the shape.
        shape: the exchange.
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
        replace(candidate, range_us=_range_us(candidate, plan, shape, cluster))
        if id(candidate) in shown
        else candidate
        for candidate in plan.candidates
    )
    ranged = replace(plan, candidates=candidates)
    return replace(ranged, range_us=ranged.chosen.range_us)


def _range_us(
    candidate: Candidate, plan: Plan, shape: Shape, cluster: Cluster
) -> tuple[float, float] | None:
    """The time of a candidate at both ends, the less first."""
    if candidate.num_chunks is None or cluster.ends is None:
        return None
    chains = {entry.chain for entry in plan.candidates}
    chunks = [entry.num_chunks for entry in plan.candidates if entry.num_chunks is not None]
    num_counts = num_exchanged_counts(shape, chains, chunks)
    chain, phase = CHAINS[candidate.chain], plan.key.phase
    optimistic_us, conservative_us = (
        price_chain(shape, end, chain, candidate.num_chunks, phase, num_counts).total_us
        for end in cluster.ends
    )
    return min(optimistic_us, conservative_us), max(optimistic_us, conservative_us)
