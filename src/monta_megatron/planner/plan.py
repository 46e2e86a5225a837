"""Plans: the best chain beside stock's dispatchers, why, and every candidate with its numbers.

Megatron's `alltoall` and `allgather` are candidates of every plan. What takes the least time is
recommended: a plan never recommends what it predicts to be slower than stock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import LINKS, Phase, Resource
from monta_megatron.common import strict_yaml
from monta_megatron.common.errors import UserError
from monta_megatron.core import Choice, Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.price import Price, price
from monta_megatron.planner.stock import stock_times_us
from monta_megatron.planner.training import Training

NUM_CHUNKS = (1, 2, 4, 8)
DISPATCHER_FLAG = "--moe-token-dispatcher-type"
# A plainer chain is chosen if it takes at most this fraction longer than the fastest.
MARGIN = 0.03


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage of the chosen chain, all chunks together.

    Attributes:
        pass_name: name of the pass: dispatch, combine, or the backward pass of one of them.
        stage: name of the stage.
        resource: the resource that the stage occupies; "host" for the host's work around the
            stages of a pass.
        alone_us: sum of the times of its chunks, with nothing else running.
        inter_bytes: bytes that leave ranks for other nodes, summed over the ranks of the exchange.
        intra_bytes: bytes that leave ranks for others on their node, summed likewise.
    """

    pass_name: str
    stage: str
    resource: Literal[Resource, "host"]
    alone_us: float
    inter_bytes: float
    intra_bytes: float


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A chain and a number of chunks.

    Attributes:
        chain: name of the chain.
        num_chunks: number of chunks; None where the chain cannot run in any number of them.
        predicted_us: time of the phase; None where the chain cannot run.
        inter_bytes: `StageCost.inter_bytes`, summed over all stages.
        intra_bytes: `StageCost.intra_bytes`, summed over all stages.
        peak_bytes: largest number of bytes that the executor holds at once on one rank.
        busiest: the resource that is occupied longest; None where the chain cannot run.
        busiest_us: time for which that resource is occupied.
        rejected: the reason why it was not chosen among our chains; None for the choice.
    """

    chain: str
    num_chunks: int | None
    predicted_us: float | None = None
    inter_bytes: float | None = None
    intra_bytes: float | None = None
    peak_bytes: float | None = None
    busiest: str | None = None
    busiest_us: float | None = None
    rejected: str | None = None


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The best of our chains beside stock's dispatchers.

    Attributes:
        chain: the best chain of ours, a key of `chains.CHAINS`.
        num_chunks: number of its chunks.
        predicted_us: its predicted time, summed over all passes.
        stock_times_us: times of Megatron's dispatchers that the training can run, by name.
        refuses_monta: the setting with which the training refuses our dispatcher; None if it runs.
    """

    chain: str
    num_chunks: int
    predicted_us: float
    stock_times_us: Mapping[str, float]
    refuses_monta: str | None = None

    @property
    def choice(self) -> Choice:
        """The best of our chains."""
        return Choice(chain=self.chain, num_chunks=self.num_chunks)

    @property
    def stock(self) -> str:
        """The faster dispatcher of stock, by Megatron's name."""
        return min(self.stock_times_us, key=self.stock_times_us.__getitem__)

    @property
    def stock_us(self) -> float:
        """Time of the faster dispatcher of stock."""
        return self.stock_times_us[self.stock]

    @property
    def stock_wins(self) -> bool:
        """Whether stock is recommended: it is as fast, or the training refuses our dispatcher."""
        return self.refuses_monta is not None or self.stock_us <= self.predicted_us

    @property
    def recommended(self) -> str:
        """What to run: stock's dispatcher or our chain, by name. `flags` tells them apart."""
        return self.stock if self.stock_wins else self.chain

    @property
    def recommended_us(self) -> float:
        """Predicted time of what is recommended."""
        return self.stock_us if self.stock_wins else self.predicted_us

    @property
    def flags(self) -> str:
        """The arguments of a training that start what is recommended."""
        if self.stock_wins:
            return f"{DISPATCHER_FLAG} {self.stock}"
        return f"{DISPATCHER_FLAG} monta {self.choice.flags}"

    def document(self) -> dict[str, Any]:
        """Fields of a JSON document."""
        names = ("stock", "stock_us", "recommended", "recommended_us", "flags")
        return strict_yaml.plain(self) | {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class Plan(Recommendation):
    """A recommendation, with everything that led to it.

    Attributes:
        range_us: smallest and largest `predicted_us` over `Cluster.corners`; None without ranges.
        ratio_range: smallest and largest speedup over the faster dispatcher of stock, over
            `Cluster.corners`, each of which prices both; None without ranges.
        reason: the reason why this chain was chosen among ours.
        shape: the exchange that the plan was made for.
        cluster: name of the cluster whose costs were used.
        stages: costs of the chain, stage by stage.
        candidates: all of our chains, fastest first; those that cannot run come last.
        rates: resource of the cluster -> rate of large messages, as text.
        notes: assumptions of the plan.
    """

    range_us: tuple[float, float] | None
    ratio_range: tuple[float, float] | None
    reason: str
    shape: Shape
    cluster: str
    stages: tuple[StageCost, ...]
    candidates: tuple[Candidate, ...]
    rates: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> dict[str, Candidate]:
        """The choice, and the fastest number of chunks of every other chain, in order."""
        best: dict[str, Candidate] = {}
        for entry in self.candidates:
            if entry.chain != self.chain or entry.rejected is None:
                best.setdefault(entry.chain, entry)
        return best


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """A selected price, and the prices that it was selected from.

    Attributes:
        price: the fastest price, or that of a plainer chain within the margin.
        prices: prices of everything that can run, fastest first.
        rivals: the same prices, but only the plainest of those that do the same at this layout.
        incompatible: chain -> the reason why it cannot run on the layout or in the training.
    """

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
            times = others[0].total_us / price.total_us
            how = f"{times:.2f}x as fast as {others[0].choice.name}, the next chain"
        else:
            how = "the only chain that can run"
        resource, busy_us = price.busiest()
        return f"{how}; the {resource} is busy for {busy_us / price.total_us:.0%} of the time"

    def why_rejected(self, price: Price) -> str | None:
        """Why something that can run was not chosen; None if it was."""
        chosen, name = self.price, self.price.choice.name
        if price is chosen:
            return None
        if price not in self.rivals:
            same = price.sort_key[0], round(price.peak_bytes)
            plainest = next(
                rival
                for rival in self.rivals
                if (rival.sort_key[0], round(rival.peak_bytes)) == same
            )
            return f"the same as {plainest.choice.name} at this layout"
        if price.sort_key[0] == chosen.sort_key[0]:
            return f"as fast as {name}, which is plainer"
        if price.total_us < chosen.total_us:
            faster = percent(chosen, price)
            return f"{faster} faster, within the margin of {MARGIN:.0%} for a plainer chain"
        resource, busy_us = price.busiest()
        return f"{percent(price, chosen)} slower; {resource} {busy_us:,.0f} us"


def select_chain(
    shape: Shape,
    cluster: Cluster,
    *,
    chains: Sequence[str] = tuple(CHAINS),
    num_chunks: Sequence[int] = NUM_CHUNKS,
    phase: Phase = "forward_backward",
    refused_chains: Mapping[str, str] | None = None,
) -> Selection:
    """Price every chain in every number of chunks; take the fastest or a plainer tie.

    Args:
        shape: the exchange.
        cluster: the cluster it runs on.
        chains: the chains to consider.
        num_chunks: the numbers of chunks to consider; a serial chain has one.
        phase: the passes that are priced.
        refused_chains: chain -> the reason why the training refuses it.

    Raises:
        UserError: no chain can run.
    """
    refused = refused_chains or {}
    reasons = {
        name: CHAINS[name].incompatibility(shape.layout) or refused.get(name) for name in chains
    }
    incompatible = {name: reason for name, reason in reasons.items() if reason is not None}
    prices = [
        price(shape, cluster, chain, number, phase)
        for chain in (CHAINS[name] for name in chains if name not in incompatible)
        for number in ((1,) if chain.serial else num_chunks)
    ]
    if not prices:
        why = "; ".join(f"{name}: {reason}" for name, reason in incompatible.items())
        raise UserError(f"chains: none can run: {why}")
    prices.sort(key=lambda candidate: candidate.sort_key)
    # The plainest of those that do the same, in the same time, comes first.
    unlike: dict[tuple[float, int], Price] = {}
    for candidate in prices:
        unlike.setdefault((candidate.sort_key[0], round(candidate.peak_bytes)), candidate)
    rivals = list(unlike.values())
    limit = rivals[0].sort_key[0] * (1 + MARGIN)
    near = (rival for rival in rivals if rival.sort_key[0] <= limit)
    return Selection(
        price=min(near, key=lambda rival: rival.sort_key[1:]),
        prices=prices,
        rivals=rivals,
        incompatible=incompatible,
    )


def percent(slower: Price, faster: Price) -> str:
    """1.234 times the time -> "23%", and "under 1%" instead of nothing."""
    ratio = slower.total_us / faster.total_us
    return f"{ratio - 1:.0%}" if ratio >= 1.01 else "under 1%"


def plan(
    shape: Shape,
    cluster: Cluster,
    *,
    chains: Sequence[str] = tuple(CHAINS),
    num_chunks: Sequence[int] = NUM_CHUNKS,
    training: Training | None = None,
) -> Plan:
    """Choose a chain and a number of chunks, and set it beside stock's dispatchers.

    Args:
        shape: the exchange.
        cluster: the cluster it runs on.
        chains: the chains to consider.
        num_chunks: the numbers of chunks to consider.
        training: effects of the training on the exchange; None for four passes of any dispatcher.

    Raises:
        UserError: no chain can run.
    """
    training = training or Training()
    recommended, selection = recommend(
        shape, cluster, training, chains=chains, num_chunks=num_chunks
    )
    chosen = selection.price
    range_us = ratio_range = None
    corners = cluster.corners()
    if len(corners) > 1:
        times_us = [recommended.predicted_us]
        ratios = [recommended.stock_us / recommended.predicted_us]
        for corner in corners:
            us = price(shape, corner, chosen.chain, chosen.num_chunks, training.phase).total_us
            times_us.append(us)
            ratios.append(min(stock_times_us(shape, corner, training).values()) / us)
        range_us, ratio_range = (min(times_us), max(times_us)), (min(ratios), max(ratios))
    candidates = []
    for priced in selection.prices:
        busiest, busiest_us = priced.busiest()
        candidate = Candidate(
            chain=priced.chain.name,
            num_chunks=priced.num_chunks,
            predicted_us=priced.total_us,
            inter_bytes=priced.sent_bytes("inter"),
            intra_bytes=priced.sent_bytes("intra"),
            peak_bytes=priced.peak_bytes,
            busiest=busiest,
            busiest_us=busiest_us,
            rejected=selection.why_rejected(priced),
        )
        candidates.append(candidate)
    candidates += (
        Candidate(chain=name, num_chunks=None, rejected=reason)
        for name, reason in selection.incompatible.items()
    )
    return Plan(
        **vars(recommended),
        reason=selection.reason,
        shape=shape,
        cluster=cluster.name,
        range_us=range_us,
        stages=stage_costs(chosen),
        candidates=tuple(candidates),
        ratio_range=ratio_range,
        rates={name: cluster.rate_of(name).in_both_units for name in cluster.resources},
        notes=training.notes,
    )


def recommend(
    shape: Shape,
    cluster: Cluster,
    training: Training,
    *,
    chains: Sequence[str] = tuple(CHAINS),
    num_chunks: Sequence[int] = NUM_CHUNKS,
) -> tuple[Recommendation, Selection]:
    """The best of our chains beside stock's dispatchers, and what it was selected from.

    Arguments are those of `plan`.

    Raises:
        UserError: no chain can run.
    """
    selection = select_chain(
        shape,
        cluster,
        chains=chains,
        num_chunks=num_chunks,
        phase=training.phase,
        refused_chains=training.refused_chains,
    )
    recommended = Recommendation(
        chain=selection.price.chain.name,
        num_chunks=selection.price.num_chunks,
        predicted_us=selection.price.total_us,
        stock_times_us=stock_times_us(shape, cluster, training),
        refuses_monta=training.refuses_monta,
    )
    return recommended, selection


def stage_costs(chosen: Price) -> tuple[StageCost, ...]:
    """Every stage of every pass, as a plan shows it."""
    costs: dict[tuple[str, str], StageCost] = {}
    for work in chosen.works:
        traffic, key = work.traffic, (work.pass_name, work.stage)
        inter_bytes, intra_bytes = (
            0.0 if traffic is None else traffic.sent_bytes(resource, chosen.num_represented)
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
