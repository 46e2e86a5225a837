"""Plans: the selected chain, why, what it gains, and every candidate with its numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

from monta_megatron.chains import CHAINS
from monta_megatron.chains.allgather import ALLGATHER
from monta_megatron.chains.alltoall import ALLTOALL
from monta_megatron.chains.program import LINKS, Resource
from monta_megatron.common.errors import UserError
from monta_megatron.common.text import counted, time_text
from monta_megatron.core import Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.price import Price, price

NUM_CHUNKS = (1, 2, 4, 8)
# A plainer chain is chosen if it takes at most this fraction longer than the fastest.
MARGIN = 0.03


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
        chain: its name.
        num_chunks: None where the chain cannot run in any number of chunks.
        predicted_us: time of the phase; None where it cannot run.
        inter_bytes: as in `StageCost`, over all stages.
        intra_bytes: likewise.
        peak_bytes: the most that the executor holds at once on one rank.
        rejected: why it was not chosen; None for the choice.
    """

    chain: str
    num_chunks: int | None
    predicted_us: float | None = None
    inter_bytes: float | None = None
    intra_bytes: float | None = None
    peak_bytes: float | None = None
    rejected: str | None = None


@dataclass(frozen=True, kw_only=True)
class Benefit:
    """Benefit of a choice over stock `alltoall`, per exchange of one MoE layer and micro-batch.

    A pipeline waits for the stage with the most MoE layers, once for every micro-batch. Its bubble,
    which shrinks too where the exchanges are shorter, is left out.

    Attributes:
        chain: the chosen one.
        chosen_us: its time.
        alltoall_us: that of stock.
        ratio_range: the least and the most of `ratio` over `Cluster.corners`, each of which prices
            both; None where the cluster has no ranges.
        num_moe_layers: MoE layers of that stage; None where they are not known.
        num_micro_batches: of an iteration; None where the batch is not known.
    """

    chain: str
    chosen_us: float
    alltoall_us: float
    ratio_range: tuple[float, float] | None = None
    num_moe_layers: int | None = None
    num_micro_batches: int | None = None

    @property
    def ratio(self) -> float:
        """Speedup over stock."""
        return self.alltoall_us / self.chosen_us

    @property
    def saved_us(self) -> float:
        """Below 0 where the choice, by hand or for its memory, is slower."""
        return self.alltoall_us - self.chosen_us

    @property
    def per_iteration(self) -> int | None:
        """Exchanges that an iteration waits for; None where that is not known."""
        layers, micro_batches = self.num_moe_layers, self.num_micro_batches
        return None if layers is None or micro_batches is None else layers * micro_batches

    def document(self) -> dict[str, Any]:
        """Fields of a JSON document; None for unknown values."""
        times = self.per_iteration
        return {
            **asdict(self),
            "ratio": self.ratio,
            "saved_us": self.saved_us,
            "saved_s_per_iteration": None if times is None else self.saved_us * times / 1e6,
            "text": self.text,
        }

    @property
    def text(self) -> str:
        """The line; factors that are not known are left out."""
        if self.chain == "alltoall":
            return "plain alltoall is chosen: no gain over stock"
        parts = (
            (self.num_moe_layers, "MoE layer", " of a stage"),
            (self.num_micro_batches, "micro-batch", ""),
        )
        factors, per = [time_text(abs(self.saved_us))], [noun for n, noun, _ in parts if n is None]
        factors += (counted(n, noun) + behind for n, noun, behind in parts if n is not None)
        total_us = abs(self.saved_us) * prod(n for n, *_ in parts if n is not None)
        product = f" = {time_text(total_us)}" if len(factors) > 1 else ""
        ends = "" if self.ratio_range is None else " ({:.2f}x to {:.2f}x)".format(*self.ratio_range)
        return (
            f"{self.ratio:.2f}x stock alltoall, {self.alltoall_us:,.0f} us{ends}: "
            f"{'saves' if self.saved_us >= 0 else 'loses'} "
            f"{' x '.join(factors)}{product} per {' and '.join(per) or 'iteration'}"
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A choice, with everything that led to it.

    Attributes:
        chain: key of `chains.CHAINS`.
        num_chunks: number of chunks of the chosen chain.
        predicted_us: time of the phase.
        range_us: the least and the most over `Cluster.corners`; None without ranges.
        reason: why this one.
        shape: the exchange that it was made for.
        cluster: name of the cluster whose costs were used.
        stages: the choice, stage by stage.
        candidates: everything considered, the fastest first, what cannot run last.
        stock_times_us: see the function of this name.
        ratio_range: as in `Benefit`.
        rates: of large messages, as text, by resource of the cluster.
        notes: assumptions.
    """

    chain: str
    num_chunks: int
    predicted_us: float
    reason: str
    shape: Shape
    cluster: str
    range_us: tuple[float, float] | None
    stages: tuple[StageCost, ...]
    candidates: tuple[Candidate, ...]
    stock_times_us: Mapping[str, float]
    ratio_range: tuple[float, float] | None
    rates: Mapping[str, str]
    notes: tuple[str, ...] = ()

    @property
    def stock_us(self) -> float:
        """Time of stock `alltoall`."""
        return self.stock_times_us["alltoall"]

    @property
    def best(self) -> dict[str, Candidate]:
        """The choice, and the fastest number of chunks of every other chain, in order."""
        best: dict[str, Candidate] = {}
        for entry in self.candidates:
            if entry.chain != self.chain or entry.rejected is None:
                best.setdefault(entry.chain, entry)
        return best

    @property
    def benefit(self) -> Benefit:
        """Benefit over stock."""
        return Benefit(
            chain=self.chain,
            chosen_us=self.predicted_us,
            alltoall_us=self.stock_us,
            ratio_range=self.ratio_range,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection:
    """A selected price, and the prices that it was selected from.

    Attributes:
        price: the fastest, or a plainer one within the margin.
        prices: of everything that can run, the fastest first.
        rivals: likewise; of several that do the same at this layout the plainest alone.
        incompatible: chain -> why it cannot run on the layout.
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
            plainest = next(x for x in self.rivals if (x.sort_key[0], round(x.peak_bytes)) == same)
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
) -> Selection:
    """Price every chain in every number of chunks; take the fastest or a plainer tie.

    Args:
        shape: the exchange.
        cluster: the cluster it runs on.
        chains: the chains to consider.
        num_chunks: the numbers of chunks to consider; a serial chain has one.

    Raises:
        UserError: no chain can run.
    """
    reasons = {name: CHAINS[name].incompatibility(shape.layout) for name in chains}
    incompatible = {name: reason for name, reason in reasons.items() if reason is not None}
    prices = [
        price(shape, cluster, chain, number)
        for chain in (CHAINS[name] for name in chains if name not in incompatible)
        for number in ((1,) if chain.serial else num_chunks)
    ]
    if not prices:
        why = "; ".join(f"{name}: {reason}" for name, reason in incompatible.items())
        raise UserError(f"chains: none can run: {why}")
    prices.sort(key=lambda each: each.sort_key)
    # The plainest of those that do the same, in the same time, comes first.
    unlike: dict[tuple[float, int], Price] = {}
    for each in prices:
        unlike.setdefault((each.sort_key[0], round(each.peak_bytes)), each)
    rivals = list(unlike.values())
    near = (each for each in rivals if each.sort_key[0] <= rivals[0].sort_key[0] * (1 + MARGIN))
    return Selection(
        price=min(near, key=lambda each: each.sort_key[1:]),
        prices=prices,
        rivals=rivals,
        incompatible=incompatible,
    )


def percent(slower: Price, faster: Price) -> str:
    """1.234 times the time -> "23%", and "under 1%" instead of nothing."""
    ratio = slower.total_us / faster.total_us
    return f"{ratio - 1:.0%}" if ratio >= 1.01 else "under 1%"


def plan(shape: Shape, cluster: Cluster, **settings: Any) -> Plan:
    """Choose a chain and a number of chunks.

    Args:
        shape: the exchange.
        cluster: the cluster it runs on.
        settings: passed to `select_chain`.

    Raises:
        UserError: no chain can run.
    """
    selection = select_chain(shape, cluster, **settings)
    chosen, stock_us = selection.price, stock_times_us(shape, cluster)
    range_us = ratio_range = None
    corners = cluster.corners()
    if len(corners) > 1:
        pairs = [(chosen.total_us, stock_us["alltoall"])]
        pairs += (
            (
                price(shape, corner, chosen.chain, chosen.num_chunks).total_us,
                price(shape, corner.as_stock, ALLTOALL, 1).total_us,
            )
            for corner in corners
        )
        times_us, ratios = [us for us, _ in pairs], [alltoall_us / us for us, alltoall_us in pairs]
        range_us, ratio_range = (min(times_us), max(times_us)), (min(ratios), max(ratios))
    candidates = [
        Candidate(
            chain=each.chain.name,
            num_chunks=each.num_chunks,
            predicted_us=each.total_us,
            inter_bytes=each.sent_bytes("inter"),
            intra_bytes=each.sent_bytes("intra"),
            peak_bytes=each.peak_bytes,
            rejected=selection.why_rejected(each),
        )
        for each in selection.prices
    ]
    candidates += (
        Candidate(chain=name, num_chunks=None, rejected=reason)
        for name, reason in selection.incompatible.items()
    )
    return Plan(
        chain=chosen.chain.name,
        num_chunks=chosen.num_chunks,
        predicted_us=chosen.total_us,
        reason=selection.reason,
        shape=shape,
        cluster=cluster.name,
        range_us=range_us,
        stages=stage_costs(chosen),
        candidates=tuple(candidates),
        stock_times_us=stock_us,
        ratio_range=ratio_range,
        rates={each: cluster.rate_of(each).in_both_units for each in cluster.resources},
    )


def stock_times_us(shape: Shape, cluster: Cluster) -> dict[str, float]:
    """Time of the dispatchers of Megatron that have a price, by name.

    `allgather` gathers all rows, or reduce-scatters them, in each of its four passes; in combine
    and its backward pass in the dtype of the probabilities. Each is taken to cost what the
    collective and the copy in the dispatch of our chain do, by its bytes.
    """
    as_stock = cluster.as_stock
    works = price(shape, as_stock, ALLGATHER, 1, "forward").works
    gather_us = sum(w.alone_us for w in works if w.in_chain and w.pass_name == "dispatch")
    return {
        "alltoall": price(shape, as_stock, ALLTOALL, 1).total_us,
        "allgather": 2 * gather_us * (1 + shape.prob_bytes / shape.value_bytes),
    }


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


@dataclass(frozen=True)
class IterationShare:
    """The predicted exchange in a measured iteration.

    Attributes:
        iteration_ms: measured.
        ran: the dispatcher of Megatron that ran.
        exchange_share: of the iteration; None where what ran has no price.
        saved_share: what the choice saves of the iteration; below 0 where it is slower.
    """

    iteration_ms: float
    ran: str
    exchange_share: float | None = None
    saved_share: float | None = None

    @property
    def text(self) -> str:
        """Both in a sentence."""
        text = f"{self.iteration_ms:,.0f} ms by {self.ran}, "
        if self.exchange_share is None:
            return f"{text}whose exchange has no price here; `monta compare` measures it"
        text += f"of which the exchange takes {self.exchange_share:.0%} (predicted)"
        if self.exchange_share > 1:
            return f"{text}: the costs of this cluster are not those of the run"
        return f"{text}; this choice saves {self.saved_share:.0%} of it"


def share_of(
    iteration_ms: float, ran: str, ran_us: float | None, benefit: Benefit
) -> IterationShare:
    """The share of a plan's exchange in an iteration.

    Args:
        iteration_ms: measured.
        ran: the dispatcher of Megatron that ran.
        ran_us: its time; None for `flex`, which has no price, and for ours, whose log says what it
            measured.
        benefit: of the plan.

    Raises:
        UserError: the exchanges of an iteration are not known.
    """
    times = benefit.per_iteration
    if times is None:
        raise UserError(
            "--global-batch-size: not given, must be: it says how many exchanges an iteration has"
        )
    if ran_us is None:
        return IterationShare(iteration_ms, ran)
    of_iteration = times / 1e3 / iteration_ms
    saved_us = ran_us - benefit.chosen_us
    return IterationShare(iteration_ms, ran, ran_us * of_iteration, saved_us * of_iteration)
