"""What a chain costs in a given number of chunks: a phase's walks, their bytes and their memory."""

from dataclasses import dataclass
from functools import cached_property

from monta_megatron.chains import Chain
from monta_megatron.chains.cut import blocks_for
from monta_megatron.chains.gathered import gathered_widths
from monta_megatron.chains.program import (
    DISPATCH,
    DISPATCH_BACKWARD,
    FORWARD,
    FORWARD_BACKWARD,
    Pass,
)
from monta_megatron.common.quantities import counted
from monta_megatron.planner.alike_ranks import priced_ranks
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import TIERS, Tier
from monta_megatron.planner.memory import peak_bytes
from monta_megatron.planner.plan import Phase, StageCost
from monta_megatron.planner.pricing import AROUND_STAGES, WalkPrice, price_walk
from monta_megatron.planner.schedule import serial_us
from monta_megatron.planner.traffic import WalkTraffic, walk_traffic
from monta_megatron.planner.workload import Workload

WALKS: dict[Phase, tuple[Pass, ...]] = {
    "forward": FORWARD,
    "forward_backward": FORWARD_BACKWARD,
}
# The walks that hold most, one per direction: the other two move the same rows with fewer lanes.
HEAVIEST: dict[Phase, tuple[Pass, ...]] = {
    "forward": FORWARD,
    "forward_backward": (DISPATCH, DISPATCH_BACKWARD),
}
TIER_NAMES = {"inter": "network", "intra": "fast tier", "memory": "memory"}


@dataclass(frozen=True, kw_only=True)
class ChainPrice:
    """The price of a chain in a given number of chunks.

    Attributes:
        chain: what runs.
        num_chunks: in how many chunks.
        walks: the walks of the phase.
        traffic: what they move, in each walk.
        num_alike: [ranks] number of ranks that each of them stands for.
        peak_bytes: the most that the executor holds at once on one rank.
        beside_bytes: what the chain takes there beside its exchange, within the same limit.
    """

    chain: Chain
    num_chunks: int
    walks: tuple[WalkPrice, ...]
    traffic: tuple[WalkTraffic, ...]
    num_alike: tuple[int, ...]
    peak_bytes: float
    beside_bytes: float = 0.0

    @property
    def held_bytes(self) -> float:
        """What has to be within a limit."""
        return self.peak_bytes + self.beside_bytes

    @property
    def name(self) -> str:
        """The chain and its chunks, for messages."""
        return f"{self.chain.name} in {counted(self.num_chunks, 'chunk')}"

    @cached_property
    def total_us(self) -> float:
        """All walks, one after the other."""
        return sum(walk.total_us for walk in self.walks)

    @cached_property
    def lower_bound_us(self) -> float:
        """A time that no schedule of these stages beats."""
        return sum(walk.lower_bound_us for walk in self.walks)

    def sent_bytes(self, tier: Tier) -> float:
        """Bytes of the chain's stages in a tier, over all ranks and walks."""
        return sum(
            stage.sent_bytes(tier, self.num_alike)
            for walk in self.traffic
            for stage in walk.pipeline
        )

    @property
    def plainness(self) -> tuple[bool, int, int]:
        """Sort key: smaller is plainer."""
        return self.chain.name != "alltoall", len(self.chain.stages), self.num_chunks

    def busiest(self) -> tuple[str, float]:
        """The busiest resource, and for how long it is busy."""
        busy = {
            resource: sum(
                sum(work.times_us)
                for walk in self.walks
                for work in walk.works
                if work.resource == resource
            )
            for resource in TIERS
        }
        resource = max(TIERS, key=lambda name: busy[name])
        return TIER_NAMES[resource], busy[resource]


def price_chain(
    workload: Workload,
    cluster: Cluster,
    chain: Chain,
    num_chunks: int,
    phase: Phase,
    gathered_counts: int | None = None,
) -> ChainPrice:
    """What one chain costs in a given number of chunks.

    Args:
        workload: what is exchanged.
        cluster: the cluster it runs on.
        chain: what runs.
        num_chunks: in how many chunks.
        phase: whether the backward walks are priced too.
        gathered_counts: integers per rank in the gather of counts; None for what the chain needs.
    """
    ranks = priced_ranks(workload.layout, workload.routing, cluster.ranks_per_nic)
    bound = [workload.bind(chain, num_chunks, layout) for layout in ranks.layouts]
    if gathered_counts is None:
        gathered_counts = sum(gathered_widths((chain,), workload.layout, blocks_for(num_chunks)))
    programs = [
        [workload.lower(each, walk, cluster.policy) for each in bound] for walk in WALKS[phase]
    ]
    traffic = tuple(
        walk_traffic(of_walk, workload.tokens_per_rank, gathered_counts) for of_walk in programs
    )
    return ChainPrice(
        chain=chain,
        num_chunks=num_chunks,
        walks=tuple(
            price_walk(of_walk[0].program, moved, cluster, ranks.nic_starts)
            for of_walk, moved in zip(programs, traffic, strict=True)
        ),
        traffic=traffic,
        num_alike=ranks.num_alike,
        peak_bytes=max(
            peak_bytes(each)
            for walk, of_walk in zip(WALKS[phase], programs, strict=True)
            if walk in HEAVIEST[phase]
            for each in of_walk
        ),
    )


def stage_costs(price: ChainPrice) -> tuple[StageCost, ...]:
    """Every stage of every walk, as a plan shows it."""
    costs = []
    for walk, traffic in zip(price.walks, price.traffic, strict=True):
        if walk.host_us > 0:
            around = StageCost(
                walk=walk.walk,
                stage=AROUND_STAGES,
                resource="host",
                alone_us=walk.host_us,
                inter_bytes=0.0,
                intra_bytes=0.0,
            )
            costs.append(around)
        # What is found before it is copied is one stage.
        alone_us: dict[str, float] = {}
        for work in walk.works:
            alone_us[work.stage] = alone_us.get(work.stage, 0.0) + serial_us([work])
        costs += [
            StageCost(
                walk=walk.walk,
                stage=work.stage,
                resource=work.resource,
                alone_us=alone_us.pop(work.stage),
                inter_bytes=moved.sent_bytes("inter", price.num_alike),
                intra_bytes=moved.sent_bytes("intra", price.num_alike),
            )
            for work, moved in zip(walk.works, traffic.stages, strict=True)
            if work.stage in alone_us
        ]
    return tuple(costs)
