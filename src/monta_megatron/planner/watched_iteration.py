"""What a watched iteration took, as all ranks of an exchange have told it, beside its price.

The time of a group is that of its fastest rank, which waits least for the others; that of the
slowest group counts. What a resource took over what was predicted takes out tokens and routing.

Notation: S = ranks of the exchange, M = micro-batches of all layers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from monta_megatron.chains.layout import GroupName, Layout
from monta_megatron.chains.program import FORWARD_BACKWARD, LINKS, Resource
from monta_megatron.common.rules import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Text,
)
from monta_megatron.planner.chain_price import ChainPrice
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.routing import Routing

# What an exchange occupies.
BUSY = (*LINKS, "memory", "host")
PASS_NAMES = tuple(pass_.name for pass_ in FORWARD_BACKWARD)
# Integers of a rank before those of its micro-batches: us and number by pass, us and bytes by link.
NUM_SUMS = 2 * len(PASS_NAMES) + 2 * len(LINKS)
# Ranks that are named, of those that the others wait for by more than this share.
MOST_NAMED = 3
WAITED_FOR = 0.1


class Turn(NamedTuple):
    """A watched iteration: its number, and for what it is priced, once it has ended."""

    iteration: int
    chain: str = ""
    num_chunks: int = 1
    tokens: int = 1
    max_experts_per_token: int = 0
    routing: Routing | None = None


@dataclass(frozen=True, kw_only=True)
class WatchedIteration:
    """What a watched iteration took.

    Attributes:
        iteration: its number, from 0, among those of this exchange.
        chain: what ran.
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


class Observed(NamedTuple):
    """What is known of a watched iteration.

    Attributes:
        took: what it took.
        stages: by resource that is in `link_over_predicted`, the stages that occupy it, as they are
            named in the log, with their groups.
        slowest: likewise, the ranks of the slowest of these groups, in the job.
    """

    took: WatchedIteration
    stages: Mapping[Resource, tuple[str, ...]]
    slowest: Mapping[Resource, tuple[int, ...]]


def observe(
    sums: NDArray[np.int64],
    turn: Turn,
    price: ChainPrice,
    cluster: Cluster,
    ranks: Sequence[int],
    layout: Layout,
) -> Observed | None:
    """What a watched iteration took; None where some rank has not timed it.

    Args:
        sums: [S, NUM_SUMS + M]; see `exchange.watched_passes`.
        turn: the iteration.
        price: of a micro-batch of it.
        cluster: by which it is priced.
        ranks: [S] the ranks of the exchange in the job.
        layout: any rank's place.
    """
    us, times, link_us, link_bytes, rows = np.split(
        sums,
        [len(PASS_NAMES), 2 * len(PASS_NAMES), NUM_SUMS - len(LINKS), NUM_SUMS],
        axis=1,
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
    overload = rows.max(axis=0) * len(rows) / np.maximum(rows.sum(axis=0), 1)
    took = WatchedIteration(
        iteration=turn.iteration,
        chain=turn.chain,
        num_chunks=turn.num_chunks,
        exchange_ms=dict(zip(PASS_NAMES, (us[fastest] / 1e3).tolist(), strict=True)),
        inter_gb=int(link_bytes[:, 0].sum()) / 1e9,
        intra_gb=int(link_bytes[:, 1].sum()) / 1e9,
        avg_overload_factor=float(overload.mean()) if overload.size else 0.0,
        max_overload_factor=float(overload.max()) if overload.size else 0.0,
        imbalance=most_us / int(total_us[fastest]) - 1,
        slowest_ranks=tuple(
            ranks[rank] for rank in order.tolist() if total_us[rank] * (1 + WAITED_FOR) < most_us
        ),
        predicted_ms=predicted_us / 1e3,
        over_predicted=int(total_us[fastest]) / predicted_us,
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
