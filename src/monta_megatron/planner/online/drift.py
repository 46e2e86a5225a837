"""Drift monitoring: one iteration in N is timed, and a change that lasts is noticed. No torch.

Each resource has a series: measured over predicted times of its collectives. Usual is the median of
the series, whatever the prediction is worth. The time of a group is that of its fastest rank, which
waits least for the others; that of the slowest group counts.
A change lasts where several in a row lie outside the band around it:

    every N iterations          while all is as usual
    every N / 8                 at the beginning, and after one that lies outside, until that has
                                lasted for `NUM_IN_A_ROW` of them, or one lies inside again

So a change is known within 2 N iterations (N >= 16), and one that passes within N / 2 is ignored.

Notation: S = ranks of the exchange, M = micro-batches of all layers.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS
from monta_megatron.chains.layout import GroupName, Layout
from monta_megatron.chains.program import FORWARD_BACKWARD, LINKS, NOT_TIMED_US, Resource
from monta_megatron.common.rules import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Text,
)
from monta_megatron.planner.chain_policy import ChainChoice, PlannedPolicy
from monta_megatron.planner.chain_price import RESOURCE_NAMES, ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import with_rate
from monta_megatron.planner.routing.expected import Routing

# Resources that an exchange occupies.
BUSY = (*LINKS, "memory", "host")
PASS_NAMES = tuple(pass_.name for pass_ in FORWARD_BACKWARD)
# Integers of a rank before those of its micro-batches: us and number by pass, us and bytes by link.
NUM_SUMS = 2 * len(PASS_NAMES) + 2 * len(LINKS)
# Ranks that are named, of those that the others wait for by more than this share.
MOST_NAMED = 3
WAITED_FOR = 0.1


class Turn(NamedTuple):
    """A watched iteration: its number, and its price once it has ended."""

    iteration: int
    chain: str = ""
    num_chunks: int = 1
    tokens: int = 1
    max_experts_per_token: int = 0
    routing: Routing | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredIteration:
    """Times of a watched iteration.

    Attributes:
        iteration: its number, from 0, among those of this exchange.
        chain: that ran.
        num_chunks: its number of chunks.
        exchange_ms: pass -> its time in the whole iteration, on the rank that waited least.
        inter_gb: 1e9 bytes that all ranks of the exchange sent to other nodes.
        intra_gb: likewise, to other ranks of their nodes.
        avg_overload_factor: rows of the most loaded rank over those of a balanced one: the mean
            over micro-batches and layers; 0 where nothing was sent.
        max_overload_factor: likewise, the largest.
        imbalance: by how much the exchange takes longer on the rank that waits most.
        slowest_ranks: the ranks of the job that the others wait for; empty where nobody waits long.
        predicted_ms: of the exchange.
        over_predicted: measured over predicted.
        link_ms: "inter", "intra" -> time of the collectives there, of the slowest group.
        link_over_predicted: likewise, measured over predicted.
        predicted_busy_ms: "inter", "intra", "memory", "host" -> what was predicted of each alone.
        calibrated_links: "inter", "intra", where what was predicted says how fast the link should
            be: it was measured, and is not the node link of CPU ranks, which waits for cores.
        exposed_ms: part of the exchange for which computation waits; None where none overlaps it.
        hidden_us: the rest, of a layer and micro-batch; None likewise.
    """

    iteration: NonNegativeInt
    chain: Text
    num_chunks: PositiveInt
    exchange_ms: Mapping[str, NonNegativeFloat]
    inter_gb: NonNegativeFloat
    intra_gb: NonNegativeFloat
    avg_overload_factor: NonNegativeFloat
    max_overload_factor: NonNegativeFloat
    imbalance: NonNegativeFloat
    slowest_ranks: tuple[int, ...]
    predicted_ms: PositiveFloat
    over_predicted: PositiveFloat
    link_ms: Mapping[Resource, NonNegativeFloat]
    link_over_predicted: Mapping[Resource, PositiveFloat]
    predicted_busy_ms: Mapping[str, NonNegativeFloat]
    calibrated_links: tuple[Resource, ...] = ()
    exposed_ms: NonNegativeFloat | None = None
    hidden_us: NonNegativeFloat | None = None

    @property
    def exposed_share(self) -> float:
        """Of the exchange: 1 where no computation overlaps it."""
        exchange_ms = sum(self.exchange_ms.values())
        return 1.0 if self.exposed_ms is None else self.exposed_ms / exchange_ms


class Observed(NamedTuple):
    """A watched iteration beside its price.

    Attributes:
        took: what it took.
        stages: by resource that is in `link_over_predicted`, the stages that occupy it, as they are
            named in the log, with their groups.
        slowest: likewise, the ranks of the slowest of these groups, in the job.
    """

    took: MeasuredIteration
    stages: Mapping[Resource, tuple[str, ...]]
    slowest: Mapping[Resource, tuple[int, ...]]


def observe(
    sums: NDArray[np.int64],
    turn: Turn,
    price: ChainPrice,
    cluster: Cluster,
    ranks: Sequence[int],
    layout: Layout,
    exposed_us: NDArray[np.int64] | None = None,
) -> Observed | None:
    """Observe a watched iteration; None where some rank has not timed it.

    Args:
        sums: [S, NUM_SUMS + M]; see `exchange.pass_times`.
        turn: the iteration.
        price: of a micro-batch of it.
        cluster: by which it is priced.
        ranks: [S] the ranks of the exchange in the job.
        layout: any rank's place.
        exposed_us: [S]; see `decision.Outcome`.
    """
    us, times, link_us, link_bytes, rows = np.split(
        sums, [len(PASS_NAMES), 2 * len(PASS_NAMES), NUM_SUMS - len(LINKS), NUM_SUMS], axis=1
    )
    total_us = us.sum(axis=1)
    if not total_us.all():
        return None
    num_passes = dict(zip(PASS_NAMES, times[0].tolist(), strict=True))
    ratios: dict[Resource, float] = {}
    link_ms: dict[Resource, float] = {}
    stages: dict[Resource, tuple[str, ...]] = {}
    slowest: dict[Resource, tuple[int, ...]] = {}
    for link, of_ranks in zip(LINKS, link_us.T, strict=True):
        busy_us = sum(
            sum(work.times_us) * num_passes[each.pass_name]
            for each in price.passes
            for work in each.pipeline
            if work.resource == link
        )
        groups = _stages(price, link)
        if busy_us > 0 and of_ranks.all() and groups:
            slowest_us, members = _slowest_group(groups.values(), of_ranks, layout)
            ratios[link], link_ms[link] = slowest_us / busy_us, slowest_us / 1e3
            stages[link] = tuple(groups)
            slowest[link] = tuple(ranks[rank] for rank in members)

    predicted_us = sum(each.total_us * num_passes[each.pass_name] for each in price.passes)
    fastest, most_us = int(total_us.argmin()), int(total_us.max())
    order = total_us.argsort(kind="stable")[:MOST_NAMED]
    fastest_us = int(total_us[fastest])
    exposed_ms = hidden_us = None
    if exposed_us is not None and (exposed_us != NOT_TIMED_US).all():
        exposed_ms = min(int(exposed_us.min()), fastest_us) / 1e3
        num_exchanges = sum(num_passes.values()) / len(PASS_NAMES)
        hidden_us = (fastest_us - 1e3 * exposed_ms) / num_exchanges
    overload = rows.max(axis=0) * len(rows) / np.maximum(rows.sum(axis=0), 1)
    took = MeasuredIteration(
        iteration=turn.iteration,
        chain=turn.chain,
        num_chunks=turn.num_chunks,
        exchange_ms=dict(zip(PASS_NAMES, (us[fastest] / 1e3).tolist(), strict=True)),
        inter_gb=int(link_bytes[:, 0].sum()) / 1e9,
        intra_gb=int(link_bytes[:, 1].sum()) / 1e9,
        avg_overload_factor=float(overload.mean()) if overload.size else 0.0,
        max_overload_factor=float(overload.max()) if overload.size else 0.0,
        imbalance=most_us / fastest_us - 1,
        slowest_ranks=tuple(
            ranks[rank] for rank in order.tolist() if total_us[rank] * (1 + WAITED_FOR) < most_us
        ),
        predicted_ms=predicted_us / 1e3,
        over_predicted=fastest_us / predicted_us,
        link_ms=link_ms,
        link_over_predicted=ratios,
        predicted_busy_ms={
            resource: sum(
                each.busy_us(resource) * num_passes[each.pass_name] / 1e3 for each in price.passes
            )
            for resource in BUSY
        },
        calibrated_links=tuple(
            link
            for link in LINKS
            if cluster.was_measured(link) and not (link == "intra" and cluster.copies_block_host)
        ),
        exposed_ms=exposed_ms,
        hidden_us=hidden_us,
    )
    return Observed(took, stages, slowest)


def _slowest_group(
    groups: Iterable[GroupName], of_ranks: NDArray[np.int64], layout: Layout
) -> tuple[int, tuple[int, ...]]:
    """The time of the slowest group, by its fastest rank, and its members."""
    instances = {
        tuple(layout.members(group, rank)) for group in set(groups) for rank in range(len(of_ranks))
    }
    return max((int(of_ranks[list(each)].min()), each) for each in instances)


def _stages(price: ChainPrice, link: Resource) -> dict[str, GroupName]:
    """The stages that occupy a resource, as they are named in the log, and their groups."""
    return {
        f"stage {operation.stage}, group {operation.group}": operation.group
        for operation in price.passes[0].program.operations
        if operation.is_collective and operation.resource == link and operation.group is not None
    }


# A shared host's cores change their speed by up to 1.6; a link that fails over is 4 times slower.
BAND = 2.0
NUM_USUAL = 4
NUM_IN_A_ROW = 6
MOST_KEPT = 40
LOOKS_PER_PERIOD = 8


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that lasts.

    Attributes:
        resource: what became slower, or as fast again.
        factor: time over the usual time.
        since: the first iteration that lay outside the band.
        stages: the stages that occupy it, with their groups.
        ranks: of the job, of the slowest of these groups.
        rate_ratio: of the rate that was planned with at first, the one to plan with from now on.
    """

    resource: Resource
    factor: PositiveFloat
    since: NonNegativeInt
    stages: tuple[Text, ...]
    ranks: tuple[int, ...]
    rate_ratio: PositiveFloat

    @property
    def text(self) -> str:
        """One line for the log."""
        ranks = ", ".join(map(str, self.ranks))
        return (
            f"since iteration {self.since + 1} the {RESOURCE_NAMES[self.resource]} takes "
            f"{self.factor:.2g}x its usual time: {'; '.join(self.stages)}; slowest are ranks "
            f"{ranks}"
        )


def lasting_change(ratios: Sequence[float]) -> float | None:
    """Factor between the latest of a series and the usual before them.

    Args:
        ratios: measured over predicted time, the oldest first.

    Returns:
        The median of the last `NUM_IN_A_ROW` over the median of those before them, if all of them
        lie outside the band, on the same side; else None, as where too few are known.
    """
    usual = usual_ratio(ratios)
    if usual is None:
        return None
    last = [ratio / usual for ratio in ratios[-NUM_IN_A_ROW:]]
    if min(last) > BAND or max(last) < 1 / BAND:
        return median(last)
    return None


def usual_ratio(ratios: Sequence[float]) -> float | None:
    """Usual ratio of a series, apart from the latest; None where too few are known."""
    before = ratios[:-NUM_IN_A_ROW]
    return median(before) if len(before) >= NUM_USUAL else None


class DriftMonitor:
    """Drift monitor of one exchange; the same on all of its ranks.

    Args:
        num_steps: N.
        ranks: [S] the ranks of the exchange in the job.
        layout: any rank's place.

    Attributes:
        latest: of the last watched iteration that is known.
        change: what has just been noticed; None before and after.
        rate_ratios: "inter", "intra" -> what is left of the rate that was planned with at first.
    """

    def __init__(self, num_steps: int, ranks: Sequence[int], layout: Layout) -> None:
        self.latest: MeasuredIteration | None = None
        self.change: Change | None = None
        self.rate_ratios: dict[Resource, float] = dict.fromkeys(LINKS, 1.0)
        self._num_steps, self._ranks, self._layout = num_steps, ranks, layout
        # The iterations whose figures are not known yet.
        self._turns: deque[Turn | None] = deque([None])
        self._last_watched = 0
        # (chain, number of chunks, resource) -> the iterations and their ratios.
        self._series: dict[tuple[str, int, Resource], deque[tuple[int, float]]] = {}
        self._looks_often = True
        self._prices: dict[tuple[PlannedPolicy, Turn], ChainPrice] = {}

    @property
    def is_on(self) -> bool:
        """Whether the iteration under way is watched."""
        return self._turns[-1] is not None

    def restart(self, iteration: int, rate_ratios: Sequence[float]) -> None:
        """Go on in an iteration with the remaining rates, by link; or with the full ones."""
        self.rate_ratios = dict(zip(LINKS, rate_ratios or (1.0,) * len(LINKS), strict=True))
        self._turns = deque([None])
        self._last_watched = iteration

    def begin(self, iteration: int, free: bool) -> None:
        """Begin an iteration; `free` says that it may be watched: nothing else is timed in it."""
        often = max(self._num_steps // LOOKS_PER_PERIOD, 1)
        period = often if self._looks_often else self._num_steps
        is_due = free and iteration - self._last_watched >= period
        if is_due:
            self._last_watched = iteration
        self._turns.append(Turn(iteration) if is_due else None)

    def end(self, choice: ChainChoice, key: tuple[int, int], routing: Routing) -> None:
        """Note the choice of the iteration under way: the key is that of `ChoiceTable`."""
        turn = self._turns[-1]
        if turn is not None:
            self._turns[-1] = Turn(
                turn.iteration, choice.chain.name, choice.num_chunks, *key, routing
            )

    def learn(
        self,
        sums: NDArray[np.int64],
        policy: PlannedPolicy,
        exposed_us: NDArray[np.int64] | None = None,
    ) -> None:
        """Add the shared figures of the oldest iteration that was not added.

        Args:
            sums: [S, NUM_SUMS + M]; see `exchange.pass_times`.
            policy: prices it.
            exposed_us: [S]; see `decision.Outcome`.
        """
        turn = self._turns.popleft()
        self.change = None
        if turn is None or not turn.chain or sums.shape[1] < NUM_SUMS:
            return
        price = self._price(policy, turn)
        seen = observe(sums, turn, price, policy.cluster, self._ranks, self._layout, exposed_us)
        if seen is None:
            return
        self.latest = seen.took
        self._looks_often = False
        for link, ratio in seen.took.link_over_predicted.items():
            self._add(turn, link, ratio, seen.stages[link], seen.slowest[link])

    def _add(
        self,
        turn: Turn,
        link: Resource,
        ratio: float,
        stages: tuple[str, ...],
        ranks: tuple[int, ...],
    ) -> None:
        """Add to the series of a resource."""
        key = turn.chain, turn.num_chunks, link
        series = self._series.setdefault(key, deque(maxlen=MOST_KEPT))
        series.append((turn.iteration, ratio))
        ratios = [each for _, each in series]
        usual = usual_ratio(ratios)
        if usual is None or not 1 / BAND <= ratio / usual <= BAND:
            self._looks_often = True
        factor = lasting_change(ratios)
        if factor is None or (factor < 1 and self.rate_ratios[link] >= 1):
            # Faster than at the beginning is no news.
            return
        now = self.rate_ratios[link] / factor
        self.rate_ratios[link] = 1.0 if now > 1 / BAND else now
        self.change = Change(
            resource=link,
            factor=factor,
            since=series[-NUM_IN_A_ROW][0],
            stages=stages,
            ranks=ranks,
            rate_ratio=self.rate_ratios[link],
        )
        # The usual time is another from here on, for every chain.
        self._series = {key: series for key, series in self._series.items() if key[2] != link}
        self._looks_often = True

    def _price(self, policy: PlannedPolicy, turn: Turn) -> ChainPrice:
        key = policy, turn._replace(iteration=0)
        if key not in self._prices:
            self._prices.clear()
            assert turn.routing is not None
            workload = replace(
                policy.workload,
                tokens_per_rank=turn.tokens,
                max_experts_per_token=turn.max_experts_per_token,
                routing=turn.routing,
            )
            self._prices[key] = price_chain(
                workload, policy.cluster, CHAINS[turn.chain], turn.num_chunks, "forward_backward"
            )
        return self._prices[key]


def replanned(
    policy: PlannedPolicy, rate_ratios: Mapping[Resource, float], overlapped_compute_us: float
) -> PlannedPolicy:
    """The policy at the remaining rates, beside so much computation."""
    cluster = policy.cluster
    for resource, ratio in rate_ratios.items():
        if ratio != 1:
            cluster = with_rate(cluster, resource, ratio)
    if cluster is policy.cluster and overlapped_compute_us == policy.overlapped_compute_us:
        return policy
    return replace(policy, cluster=cluster, overlapped_compute_us=overlapped_compute_us, _tables={})
