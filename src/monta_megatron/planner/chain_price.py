"""What a chain costs in a number of chunks: a phase's passes, their bytes and their memory."""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from monta_megatron.chains import Chain
from monta_megatron.chains.chain import blocks_for
from monta_megatron.chains.counts import message_size
from monta_megatron.chains.program import DISPATCH, DISPATCH_BACKWARD, FORWARD, PASSES, Pass, Phase
from monta_megatron.common.units import counted
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.memory import peak_bytes
from monta_megatron.planner.pricing import PassPrice, price_pass, with_leads
from monta_megatron.planner.representative_ranks import priced_ranks
from monta_megatron.planner.traffic import PassTraffic, pass_traffic
from monta_megatron.planner.workload import Workload

# The passes that hold most, one per direction, where all rows travel in their own dtype: the other
# two move the same rows with fewer columns.
HEAVIEST: dict[Phase, tuple[Pass, ...]] = {
    "forward": FORWARD,
    "forward_backward": (DISPATCH, DISPATCH_BACKWARD),
}
RESOURCE_NAMES = {"inter": "network", "intra": "node link", "memory": "memory"}
RESOURCE_NAMES |= {"compute": "compute"}


@dataclass(frozen=True, kw_only=True)
class ChainPrice:
    """The price of a chain in a given number of chunks.

    Attributes:
        chain: what runs.
        num_chunks: in how many chunks.
        passes: the passes of the phase.
        traffic: what they move, in each pass.
        num_represented: [ranks] number of ranks that each of them stands for.
        peak_bytes: the most that the executor holds at once on one rank.
        beside_bytes: what the chain takes there beside its exchange, within the same limit.
        beside_us: other work that runs beside the exchange, as much of it beside each pass.
        experts_pipelined: whether the experts run in the pipeline: a pass is one direction then.
    """

    chain: Chain
    num_chunks: int
    passes: tuple[PassPrice, ...]
    traffic: tuple[PassTraffic, ...]
    num_represented: tuple[int, ...]
    peak_bytes: float
    beside_bytes: float = 0.0
    beside_us: float = 0.0
    experts_pipelined: bool = False

    @property
    def held_bytes(self) -> float:
        """What has to be within a limit."""
        return self.peak_bytes + self.beside_bytes

    @property
    def name(self) -> str:
        """The chain and its chunks, for messages."""
        with_experts = " with their experts" * self.experts_pipelined
        return f"{self.chain.name} in {counted(self.num_chunks, 'chunk')}{with_experts}"

    @cached_property
    def total_us(self) -> float:
        """All passes, one after the other."""
        return sum(pass_.total_us for pass_ in self.passes)

    @cached_property
    def exposed_us(self) -> float:
        """Likewise, less what the work beside them hides: what training waits for."""
        return sum(pass_.exposed_us for pass_ in self.passes)

    @property
    def work(self) -> Hashable:
        """What it does, whatever its chain is called: the work of every pass, and what it holds.

        A chain's stages that have nothing to do on a layout are no part of it.
        """
        works = tuple(
            (work.resource, work.times_us, work.launch_us)
            for pass_ in self.passes
            for work in pass_.works
        )
        return works, self.peak_bytes

    @property
    def plainness(self) -> tuple[bool, bool, int, int]:
        """Sort key: smaller is plainer."""
        return self.experts_pipelined, *plainness(self.chain, self.num_chunks)

    def busy_us(self, resource: str) -> float:
        """How long all passes occupy a resource; see `PassPrice.busy_us`."""
        return sum(of_pass.busy_us(resource) for of_pass in self.passes)

    def busiest(self) -> tuple[str, float]:
        """The busiest resource, and for how long it is busy."""
        busy = {resource: self.busy_us(resource) for resource in RESOURCE_NAMES}
        resource = max(RESOURCE_NAMES, key=lambda name: busy[name])
        return RESOURCE_NAMES[resource], busy[resource]


def plainness(chain: Chain, num_chunks: int) -> tuple[bool, int, int]:
    """Sort key of chains: smaller is plainer."""
    return chain.name != "alltoall", len(chain.stages), num_chunks


def price_chain(
    workload: Workload,
    cluster: Cluster,
    chain: Chain,
    num_chunks: int,
    phase: Phase,
    num_exchanged_counts: int | None = None,
    beside_us: float = 0.0,
) -> ChainPrice:
    """What one chain costs in a given number of chunks.

    Args:
        workload: what is exchanged.
        cluster: the cluster it runs on.
        chain: what runs.
        num_chunks: in how many chunks.
        phase: whether the backward passes are priced too.
        num_exchanged_counts: integers to each rank in the exchange of counts; None for what
            the chain needs.
        beside_us: other work that runs beside the exchange, as much of it beside each pass.
    """
    ranks = priced_ranks(workload.layout, workload.routing, cluster.ranks_per_nic)
    bound = [workload.bind(chain, num_chunks, layout) for layout in ranks.layouts]
    if num_exchanged_counts is None:
        num_exchanged_counts = message_size((chain,), workload.layout, blocks_for(num_chunks))
    programs = [
        [workload.lower(of_rank, pass_, cluster.policy) for of_rank in bound]
        for pass_ in PASSES[phase]
    ]
    traffic = tuple(
        pass_traffic(of_pass, workload.tokens_per_rank, num_exchanged_counts)
        for of_pass in programs
    )
    # Rows of eight bits and sums of fp32 are those of single passes.
    all_alike = not (workload.quantized_passes or workload.keeps_sums)
    heaviest = HEAVIEST[phase] if all_alike else PASSES[phase]
    passes = [
        price_pass(of_pass[0].program, moved, cluster, ranks.nic_starts)
        for of_pass, moved in zip(programs, traffic, strict=True)
    ]
    return ChainPrice(
        chain=chain,
        num_chunks=num_chunks,
        passes=with_leads(passes, cluster.factor, beside_us / len(programs)),
        traffic=traffic,
        num_represented=ranks.num_represented,
        peak_bytes=max(
            peak_bytes(program)
            for pass_, of_pass in zip(PASSES[phase], programs, strict=True)
            if pass_ in heaviest
            for program in of_pass
        ),
        beside_us=beside_us,
    )
