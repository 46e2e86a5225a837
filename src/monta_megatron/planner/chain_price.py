"""Price of a chain in a number of chunks: its passes, their bytes and their memory.

The memory of a pass is the liveness of its program's buffers.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from monta_megatron.chains.chain import Chain, blocks_for
from monta_megatron.chains.counts import message_size
from monta_megatron.chains.program import (
    PASSES,
    BoundProgram,
    Operation,
    Phase,
    Policy,
    Program,
    Release,
)
from monta_megatron.core import Choice, Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import PricedRanks, priced_ranks
from monta_megatron.planner.pricing import PassPrice, price_pass, with_leads
from monta_megatron.planner.shape import bind_expected, lower_expected
from monta_megatron.planner.traffic import PassTraffic, pass_traffic


def peak_bytes(bound: BoundProgram) -> float:
    """Peak of a pass's output, messages, and sums with their converted terms.

    Indices are left out. In a chain of tokens they take up to 32 bytes for each copy of a row, kept
    until backward, and about 25 for each row and part while the copies are found.

    Returns:
        Bytes on this rank beyond the pass's input.
    """
    program = bound.program
    sizes = {slot: max(map(bound.num_bytes, buffers)) for slot, buffers in program.slots.items()}
    live = {program.buffers[0].slot: 0.0}
    if program.policy != "host":
        # Those that are held until the join are allocated before the first operation.
        held = (buffer for buffer in program.buffers if buffer.release is not Release.LAST_READ)
        live = {buffer.slot: sizes[buffer.slot] for buffer in held} | live
    peak = sum(live.values())

    def end(operation: Operation) -> None:
        for number in {*operation.reads, *operation.writes, *operation.scratch}:
            buffer = program.buffers[number]
            # A buffer that nothing reads, such as scratch memory, is needed by its own operation.
            if buffer.release is Release.LAST_READ and buffer.last_read in (-1, operation.number):
                live.pop(buffer.slot, None)

    for operation in program.operations:
        for number in operation.waits:
            end(program.operations[number])
        for number in (*operation.writes, *operation.scratch):
            slot = program.buffers[number].slot
            live.setdefault(slot, sizes[slot])
        peak = max(peak, sum(live.values()))
        if not operation.is_collective:
            end(operation)
    return peak


RESOURCE_NAMES = {
    "inter": "network",
    "intra": "node link",
    "memory": "memory",
}


@dataclass(frozen=True, kw_only=True)
class ChainPrice:
    """The price of a chain in a given number of chunks.

    Attributes:
        chain: that runs.
        num_chunks: in how many chunks.
        passes: the passes of the phase.
        traffic: what they move, in each pass.
        num_represented: [ranks] number of ranks that each of them stands for.
        peak_bytes: the most that the executor holds at once on one rank.
    """

    chain: Chain
    num_chunks: int
    passes: tuple[PassPrice, ...]
    traffic: tuple[PassTraffic, ...]
    num_represented: tuple[int, ...]
    peak_bytes: float

    @property
    def choice(self) -> Choice:
        """What is priced, without its experts."""
        return Choice(chain=self.chain.name, num_chunks=self.num_chunks)

    @property
    def name(self) -> str:
        """For messages."""
        return self.choice.name

    @cached_property
    def total_us(self) -> float:
        """All passes, one after the other."""
        return sum(pass_.total_us for pass_ in self.passes)

    @property
    def work(self) -> Hashable:
        """Work of every pass and its memory, whatever the chain is called.

        A chain's stages that have nothing to do on a layout are no part of it.
        """
        works = tuple(
            (work.resource, work.times_us, work.launch_us)
            for pass_ in self.passes
            for work in pass_.works
        )
        return works, self.peak_bytes

    @property
    def plainness(self) -> tuple[bool, int, int]:
        """Sort key: smaller is plainer."""
        return self.chain.name != "alltoall", len(self.chain.stages), self.num_chunks

    def busy_us(self, resource: str) -> float:
        """Time for which all passes occupy a resource; see `PassPrice.busy_us`."""
        return sum(of_pass.busy_us(resource) for of_pass in self.passes)

    def busiest(self) -> tuple[str, float]:
        """The busiest resource, and for how long it is busy."""
        busy = {resource: self.busy_us(resource) for resource in RESOURCE_NAMES}
        resource = max(RESOURCE_NAMES, key=lambda name: busy[name])
        return RESOURCE_NAMES[resource], busy[resource]


def price_chain(
    shape: Shape,
    cluster: Cluster,
    chain: Chain,
    num_chunks: int,
    phase: Phase,
    num_exchanged_counts: int | None = None,
) -> ChainPrice:
    """Price one chain in a given number of chunks.

    Args:
        shape: the exchange.
        cluster: the cluster it runs on.
        chain: that runs.
        num_chunks: in how many chunks.
        phase: whether the backward passes are priced too.
        num_exchanged_counts: integers to each rank in the exchange of counts; None for what
            the chain needs.
    """
    ranks = priced_ranks(shape.layout, shape.routing, cluster.ranks_per_nic)
    if num_exchanged_counts is None:
        num_exchanged_counts = message_size((chain,), shape.layout, blocks_for(num_chunks))
    programs, traffic, peak = _expected(
        shape, chain, num_chunks, phase, num_exchanged_counts, ranks, cluster.policy
    )
    passes = [
        price_pass(program, moved, cluster, ranks.nic_starts)
        for program, moved in zip(programs, traffic, strict=True)
    ]
    return ChainPrice(
        chain=chain,
        num_chunks=num_chunks,
        passes=with_leads(passes, cluster.factor),
        traffic=traffic,
        num_represented=ranks.num_represented,
        peak_bytes=peak,
    )


# The same for every cluster with such nodes, as for both ends of published figures.
@lru_cache(maxsize=64)
def _expected(
    shape: Shape,
    chain: Chain,
    num_chunks: int,
    phase: Phase,
    num_exchanged_counts: int,
    ranks: PricedRanks,
    policy: Policy,
) -> tuple[tuple[Program, ...], tuple[PassTraffic, ...], float]:
    """Program and traffic of every pass, and the peak of memory."""
    bound = [bind_expected(shape, chain, num_chunks, layout) for layout in ranks.layouts]
    programs = [
        [lower_expected(shape, of_rank, pass_, policy) for of_rank in bound]
        for pass_ in PASSES[phase]
    ]
    return (
        tuple(of_pass[0].program for of_pass in programs),
        tuple(
            pass_traffic(of_pass, shape.tokens_per_rank, num_exchanged_counts)
            for of_pass in programs
        ),
        max(peak_bytes(program) for of_pass in programs for program in of_pass),
    )
