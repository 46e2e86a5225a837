"""Plans: the selected chain, every candidate with its numbers, and why each was rejected."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import LINKS, Phase, Resource
from monta_megatron.common.rules import NonNegativeFloat, PositiveInt, Text
from monta_megatron.core import Shape
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.cluster import Cluster, End
from monta_megatron.planner.price import Price, price
from monta_megatron.planner.select import MARGIN, Selection, percent, select_chain


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
        range_us: the least and the most that it may take, by the range of the published rates;
            None where times were measured, and for all but the choice and plain `alltoall`.
        rejected: why it was not chosen; None for the choice.
    """

    chain: Text
    num_chunks: PositiveInt | None
    predicted_us: NonNegativeFloat | None = None
    range_us: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    inter_bytes: NonNegativeFloat | None = None
    intra_bytes: NonNegativeFloat | None = None
    peak_bytes: NonNegativeFloat | None = None
    rejected: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice, with everything that led to it.

    Attributes:
        chain: key of `chains.CHAINS`.
        num_chunks: number of chunks of the chosen chain.
        predicted_us: time of the phase.
        range_us: as in `Candidate`.
        reason: why this one.
        shape: the exchange that it was made for.
        phase: whose time counts.
        cluster: name of the cluster whose costs were used.
        stages: the choice, stage by stage.
        candidates: everything considered, the fastest first, what cannot run last.
        notes: assumptions.
        rates: of large messages, as text, by resource of the cluster.
    """

    chain: Text
    num_chunks: PositiveInt
    predicted_us: NonNegativeFloat
    reason: Text
    shape: Shape
    phase: Phase
    cluster: Text
    range_us: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    stages: tuple[StageCost, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    rates: Mapping[str, Text] = field(default_factory=dict)

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
    shape, cluster, chosen = selection.shape, selection.cluster, selection.price
    return Plan(
        chain=chosen.chain.name,
        num_chunks=chosen.num_chunks,
        predicted_us=chosen.total_us,
        reason=selection.reason,
        shape=shape,
        phase=selection.phase,
        cluster=cluster.name,
        stages=stage_costs(chosen),
        candidates=(
            *(_candidate(each, selection) for each in selection.prices),
            *(
                Candidate(chain=name, num_chunks=None, rejected=reason)
                for name, reason in selection.incompatible.items()
            ),
        ),
        rates={each: cluster.rate_of(each).in_both_units for each in cluster.resources},
    )


def _candidate(of: Price, selection: Selection) -> Candidate:
    return Candidate(
        chain=of.chain.name,
        num_chunks=of.num_chunks,
        predicted_us=of.total_us,
        inter_bytes=of.sent_bytes("inter"),
        intra_bytes=of.sent_bytes("intra"),
        peak_bytes=of.peak_bytes,
        rejected=_why_rejected(of, selection),
    )


def _why_rejected(of: Price, selection: Selection) -> str | None:
    """Why something that can run was not chosen; None if it was."""
    chosen = selection.price
    if of is chosen:
        return None
    if of not in selection.rivals:
        plainest = next(each for each in selection.rivals if each.times == of.times)
        return f"the same as {plainest.choice.name} at this layout"
    if of.total_us < chosen.total_us:
        return (
            f"{percent(chosen, of)} faster, within the margin of {MARGIN:.0%} for a plainer chain"
        )
    resource, busy_us = of.busiest()
    return f"{percent(of, chosen)} slower; {resource} {busy_us:,.0f} us"


def stage_costs(of: Price) -> tuple[StageCost, ...]:
    """Every stage of every pass, as a plan shows it."""
    costs: dict[tuple[str, str], StageCost] = {}
    for work in of.works:
        traffic, key = work.traffic, (work.pass_name, work.stage)
        inter_bytes, intra_bytes = (
            0.0 if traffic is None else traffic.sent_bytes(resource, of.num_represented)
            for resource in LINKS
        )
        # Finding copies and making them is one stage.
        found_us = costs[key].alone_us if key in costs else 0.0
        costs[key] = StageCost(
            pass_name=work.pass_name,
            stage=work.stage,
            resource=work.resource,
            alone_us=found_us + work.alone_us,
            inter_bytes=inter_bytes,
            intra_bytes=intra_bytes,
        )
    return tuple(costs.values())


def with_ranges(plan: Plan, shape: Shape, cluster: Cluster) -> Plan:
    """A plan with the range of its choice and of plain `alltoall`.

    Args:
        plan: made for the shape.
        shape: the exchange.
        cluster: whose likely costs were used.
    """
    ends = [cluster.at_end(end) for end in get_args(End)]
    if ends[0] == ends[1]:
        return plan

    def range_us(of: Candidate) -> tuple[float, float] | None:
        """The time at both ends, the less first."""
        if of.num_chunks is None or (of.chain != "alltoall" and of.rejected is not None):
            return of.range_us
        chain, phase = CHAINS[of.chain], plan.phase
        low_us, high_us = sorted(
            price(shape, end, chain, of.num_chunks, phase).total_us for end in ends
        )
        return low_us, high_us

    candidates = tuple(replace(each, range_us=range_us(each)) for each in plan.candidates)
    ranged = replace(plan, candidates=candidates)
    return replace(ranged, range_us=ranged.chosen.range_us)
