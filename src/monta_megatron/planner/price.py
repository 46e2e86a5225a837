"""Price of a chain in a number of chunks: bytes through the curves, operations on a schedule.

A collective of a group that spans nodes moves bytes through the network and the node link at once:
it takes the longer of the two times and occupies the network. All ranks of a group finish together,
so the busiest one is priced; those that share its network interface are taken to be as busy.

The passes of a layer run one after the other. The host launches all of them in order and is ahead
of the device as far as the device has been busy; in a dispatch it waits for the counts, when
nothing else is queued. Experts and other layers, behind which it could hide more, are left out.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from monta_megatron.chains.chain import BoundChain, Chain, blocks_for, message_size
from monta_megatron.chains.lower import lower
from monta_megatron.chains.program import (
    COLLECTIVES,
    PASSES,
    BoundProgram,
    Operation,
    Pass,
    Phase,
    Policy,
    Program,
    Release,
    Resource,
    RowFormat,
)
from monta_megatron.core import Choice, Layout, Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import RESOURCE_NAMES
from monta_megatron.planner.layout import priced_ranks
from monta_megatron.planner.schedule import Task, simulate
from monta_megatron.planner.traffic import (
    FIND_PASSES,
    PassTraffic,
    StageTraffic,
    num_host_operations,
    pass_traffic,
)

# Host work of a pass besides its stages.
AROUND_STAGES = "around the stages"
# Of fp32, in which copies of a row are summed at least.
MIN_SUM_BYTES = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """A stage of a pass: the same thing done for every chunk.

    Attributes:
        pass_name: dispatch, combine, or the backward pass of one of them.
        stage: name of the stage.
        resource: resource that the stage occupies; "host" for the time around the stages, which is
            all launch.
        times_us: [C] time of each chunk when it runs alone.
        launch_us: host time to launch a chunk.
        traffic: traffic of the stage; None for "host".
        in_chain: whether it is a stage of the chain, rather than work around the chain.
    """

    pass_name: str
    stage: str
    resource: Resource | Literal["host"]
    times_us: tuple[float, ...]
    launch_us: float
    traffic: StageTraffic | None = None
    in_chain: bool = False

    @property
    def alone_us(self) -> float:
        """Its chunks one after the other, launches included."""
        return sum(self.times_us) + self.launch_us * len(self.times_us)


@dataclass(frozen=True, kw_only=True, eq=False)
class Price:
    """The price of a chain in a given number of chunks.

    Attributes:
        chain: the chain that runs.
        num_chunks: number of chunks.
        works: stages of all passes, in order.
        total_us: time from the first launch to the last end.
        num_represented: [ranks] number of ranks that each priced rank stands for.
        peak_bytes: peak memory of the executor on any rank.
    """

    chain: Chain
    num_chunks: int
    works: tuple[Work, ...]
    total_us: float
    num_represented: tuple[int, ...]
    peak_bytes: float

    @property
    def choice(self) -> Choice:
        """What is priced, without its experts."""
        return Choice(chain=self.chain.name, num_chunks=self.num_chunks)

    @property
    def sort_key(self) -> tuple[float, bool, int, int]:
        """The fastest first, of equal ones the plainest. Hosts differ in the last bit."""
        tie_break = self.chain.name != "alltoall", len(self.chain.stages), self.num_chunks
        return round(self.total_us, 1), *tie_break

    def busiest(self) -> tuple[str, float]:
        """The busiest resource, and for how long all passes occupy it."""
        busy_us = dict.fromkeys(RESOURCE_NAMES, 0.0)
        for work in self.works:
            if work.resource != "host":
                busy_us[work.resource] += sum(work.times_us)
        resource = max(busy_us, key=busy_us.__getitem__)
        return RESOURCE_NAMES[resource], busy_us[resource]

    def sent_bytes(self, resource: Resource) -> float:
        """Bytes that leave ranks for others by the chain's stages, over all ranks and passes."""
        traffic = (work.traffic for work in self.works if work.in_chain)
        return sum(moved.sent_bytes(resource, self.num_represented) for moved in traffic if moved)


def price(
    shape: Shape,
    cluster: Cluster,
    chain: Chain,
    num_chunks: int,
    phase: Phase = "forward_backward",
) -> Price:
    """Price one chain in a given number of chunks.

    Args:
        shape: the exchange.
        cluster: the cluster it runs on.
        chain: the chain that runs.
        num_chunks: number of chunks.
        phase: whether the backward passes are priced too.
    """
    cluster.check_has(shape.layout.num_nodes)
    programs, traffic, peak = _expected(shape, chain, num_chunks, phase, cluster.policy)
    works: list[Work] = []
    tasks: list[Task] = []
    for program, moved in zip(programs, traffic, strict=True):
        _add_pass(works, tasks, program, moved, cluster)
    return Price(
        chain=chain,
        num_chunks=num_chunks,
        works=tuple(works),
        total_us=max(simulate(tasks, cluster.factor)),
        num_represented=tuple(number for _, number in priced_ranks(shape.layout, shape.routing)),
        peak_bytes=peak,
    )


# The same for every cluster with such nodes, as at all corners of published ranges.
@lru_cache(maxsize=64)
def _expected(
    shape: Shape, chain: Chain, num_chunks: int, phase: Phase, policy: Policy
) -> tuple[tuple[Program, ...], tuple[PassTraffic, ...], float]:
    """Program and traffic of every pass, and the peak of memory."""
    ranks = priced_ranks(shape.layout, shape.routing)
    bound = [bind_expected(shape, chain, num_chunks, layout) for layout, _ in ranks]
    num_counts = message_size((chain,), shape.layout, blocks_for(num_chunks))
    programs = [
        [lower_expected(shape, bound_chain, pass_, policy) for bound_chain in bound]
        for pass_ in PASSES[phase]
    ]
    return (
        tuple(pass_programs[0].program for pass_programs in programs),
        tuple(
            pass_traffic(pass_programs, shape.tokens_per_rank, num_counts)
            for pass_programs in programs
        ),
        max(peak_bytes(program) for pass_programs in programs for program in pass_programs),
    )


def bind_expected(shape: Shape, chain: Chain, num_chunks: int, layout: Layout) -> BoundChain:
    """The chain bound to the expected rows of one rank.

    Args:
        shape: shape of the exchange.
        chain: the chain that runs.
        num_chunks: number of chunks.
        layout: the exchange as the rank sees it.
    """
    counts = shape.routing.counts(chain, layout, shape.tokens_per_rank, blocks_for(num_chunks))
    return chain.bind(layout, counts, num_chunks)


def lower_expected(
    shape: Shape, bound_chain: BoundChain, pass_: Pass, policy: Policy
) -> BoundProgram:
    """The program of one pass over a bound chain."""
    sum_bytes = max(MIN_SUM_BYTES, shape.value_bytes)
    if bound_chain.chain.rows == "permuted tokens":
        # Megatron reduces permuted tokens in the dtype of their probabilities.
        sum_bytes = max(sum_bytes, shape.prob_bytes)
    row = RowFormat(
        hidden_size=shape.hidden_size,
        value_bytes=shape.value_bytes,
        prob_bytes=shape.prob_bytes,
        sum_bytes=sum_bytes,
    )
    return lower(bound_chain, pass_, row, shape.routing.max_experts_per_token, policy)


def peak_bytes(bound: BoundProgram) -> float:
    """Peak of a pass's output, messages, and sums with their converted terms.

    Indices are left out. In a chain of tokens they take up to 32 bytes for each copy of a row, kept
    until backward, and about 25 for each row and part while the copies are found.

    Returns:
        Bytes on this rank beyond the pass's input.
    """
    program = bound.program
    sizes: dict[int, float] = {}
    for buffer in program.buffers:
        sizes[buffer.slot] = max(bound.num_bytes(buffer), sizes.get(buffer.slot, 0.0))
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


def _add_pass(
    works: list[Work],
    tasks: list[Task],
    program: Program,
    traffic: PassTraffic,
    cluster: Cluster,
) -> None:
    """Add one pass: around the stages, before the program, in it, after it.

    Args:
        works: stages of the earlier passes; this pass is appended.
        tasks: their operations; this pass is appended.
        program: program of the pass.
        traffic: traffic of the pass.
        cluster: cluster that the pass runs on.
    """
    first, pass_, host = len(tasks), program.pass_, cluster.host
    on_host = program.policy == "host"

    def open_ends() -> tuple[int, ...]:
        """Tasks that no other comes after."""
        followed = {
            number for task in tasks[first:] for number in (*task.after, *task.launch_after)
        }
        ends = tuple(sorted(set(range(first, len(tasks))) - followed))
        return ends or ((first - 1,) if first else ())

    def add_around(work: Work, launch_after: tuple[int, ...] = ()) -> None:
        """Work of one chunk, after everything so far; on CPU ranks the host waits for all that."""
        ends = open_ends()
        task = Task(
            resource="memory" if work.resource == "host" else work.resource,
            us=work.times_us[0],
            launch_us=work.launch_us,
            after=ends,
            launch_after=ends if on_host else launch_after,
        )
        works.append(work)
        tasks.append(task)

    def on_the_host(us: float) -> Work:
        return Work(
            pass_name=pass_.name,
            stage=AROUND_STAGES,
            resource="host",
            times_us=(0.0,),
            launch_us=us / host.speed,
        )

    # Step 1: before the program. The host launches all of it, then waits for the counts alone.
    add_around(on_the_host(host.pass_us))
    for stage in traffic.counting:
        add_around(_work_of(stage, program, cluster))
    counted = (len(tasks) - 1,)
    for stage in traffic.before:
        add_around(_work_of(stage, program, cluster))
    if traffic.counting:
        add_around(on_the_host(host.counts_to_host_us + host.counts_us), counted)

    # Step 2: the program.
    begin, offset, first_work = open_ends(), len(tasks), len(works)
    num_chunks = len(program.series[0]) if program.series else 1
    works += [_work_of(stage, program, cluster, num_chunks) for stage in traffic.pipeline]
    times = [iter(work.times_us) for work in works[first_work:]]
    for operation in program.operations:
        after = tuple(offset + number for number in operation.after)
        launch_after = tuple(offset + number for number in operation.launch_after)
        task = Task(
            resource=operation.resource,
            us=next(times[operation.series]),
            launch_us=works[first_work + operation.series].launch_us,
            after=after or begin,
            launch_after=launch_after or (begin if on_host else ()),
            copies_at_launch=operation.host == "starts",
        )
        tasks.append(task)

    # Step 3: after it.
    for stage in traffic.after:
        add_around(_work_of(stage, program, cluster))


def _work_of(
    stage: StageTraffic, program: Program, cluster: Cluster, num_chunks: int | None = None
) -> Work:
    """A stage with its times.

    Args:
        stage: traffic of the stage.
        program: program of the pass.
        cluster: cluster that the pass runs on.
        num_chunks: number of chunks of the program; None for a stage outside of it.
    """
    pass_, host = program.pass_, cluster.host
    operations = num_host_operations(
        stage.kind, pass_, program.row, program.policy, num_chunks or 1
    )
    host_us = launch_us(stage, operations, cluster)
    if num_chunks is not None and stage.kind not in FIND_PASSES:
        # Finding copies and making them is one stage to the host.
        host_us += host.stage_us / host.speed
    return Work(
        pass_name=pass_.name,
        stage=stage.stage,
        resource=stage.resource,
        times_us=times_us(stage, cluster),
        launch_us=host_us,
        traffic=stage,
        in_chain=num_chunks is not None,
    )


def launch_us(stage: StageTraffic, num_operations: float, cluster: Cluster) -> float:
    """Host time to launch a stage, per chunk.

    Args:
        stage: the stage.
        num_operations: operations on tensors, besides a collective.
        cluster: the cluster that the stage runs on.
    """
    host = cluster.host
    us = host.operation_us * num_operations
    if stage.operation in COLLECTIVES:
        num_peers = max((moved.group_size for moved in stage.moved.values()), default=1) - 1
        us += host.collective_us + host.collective_peer_us * num_peers
    return us * len(stage.message_bytes) / host.speed


def times_us(stage: StageTraffic, cluster: Cluster) -> tuple[float, ...]:
    """[C] how long a stage runs alone: the longest of its times in the resources that it uses."""
    times = [_times_us(stage, resource, cluster) for resource in stage.moved]
    return tuple(map(max, zip(*times, strict=True)))


def _times_us(stage: StageTraffic, resource: Resource, cluster: Cluster) -> list[float]:
    """[C] us in one resource, for all messages as a GPU stream or a host handles them."""
    num_bytes, group_size, ranks_on_node = stage.moved[resource]
    row_bytes, messages = sum(stage.message_bytes), stage.message_bytes
    if stage.messages_overlap and resource == "inter":
        messages = (row_bytes,)
    busiest: list[float] = num_bytes.max(axis=(0, 1)).tolist()
    # Most chunks are as large as others, so each size is looked up once.
    times_us = {
        moved: sum(
            cluster.time_us(
                stage.operation, resource, moved * message / row_bytes, group_size, ranks_on_node
            )
            for message in messages
        )
        for moved in set(busiest)
    }
    return [times_us[moved] for moved in busiest]
