"""The cost model's timeline: the schedules from which a chain is priced, laid end to end."""

from collections.abc import Iterator, Sequence

from monta_megatron.chains import BoundChain, Chain
from monta_megatron.chains.lanes import FORWARD_BACKWARD
from monta_megatron.planner.alike_ranks import priced_ranks
from monta_megatron.planner.chain_price import price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import Tier
from monta_megatron.planner.plan import Phase
from monta_megatron.planner.pricing import AROUND_STAGES, WalkPrice, resource_of
from monta_megatron.planner.schedule import Work
from monta_megatron.planner.traffic import walk_traffic
from monta_megatron.planner.workload import Workload
from monta_megatron.timeline.spans import Lane, Span, Timeline, Track

TRANSPOSE = {walk.name: walk.transpose for walk in FORWARD_BACKWARD}


def predict(
    workload: Workload, cluster: Cluster, chain: Chain, num_chunks: int, phase: Phase
) -> Timeline:
    """What the cost model expects of a chain.

    It prices the busiest rank of every stage, so one track stands for all ranks.
    """
    price = price_chain(workload, cluster, chain, num_chunks, phase)
    bound = workload.bind(chain, num_chunks)
    spans: list[Span] = []
    start_us = 0.0
    for walk in price.walks:
        spans += _spans_of(walk, bound, start_us)
        start_us += walk.total_us
    track = Track(name="busiest rank, predicted", spans=tuple(spans))
    return Timeline(source="predicted", tracks=(track,))


def lanes_of(workload: Workload, chain: Chain, num_chunks: int) -> dict[tuple[str, str], Tier]:
    """The resource that each stage of each walk occupies in the cost model, on any cluster."""
    layouts = priced_ranks(workload.layout, workload.routing, ranks_per_nic=1).layouts
    bound = [workload.bind(chain, num_chunks, layout) for layout in layouts]
    lanes: dict[tuple[str, str], Tier] = {}
    for walk in FORWARD_BACKWARD:
        # How much is gathered before the pipeline changes nothing in it.
        ranks = [walk_traffic(each, workload.row, walk, gathered_counts=0) for each in bound]
        for stages in zip(*(rank.pipeline for rank in ranks), strict=True):
            lanes[walk.name, stages[0].stage] = resource_of(stages)
    return lanes


def _spans_of(walk: WalkPrice, bound: BoundChain, start_us: float) -> Iterator[Span]:
    if walk.host_us > 0:
        yield Span(
            walk=walk.walk,
            stage=AROUND_STAGES,
            chunk=None,
            lane="host",
            action="run",
            start_us=start_us,
            end_us=start_us + walk.host_us,
        )
        start_us += walk.host_us

    def span(work: Work, chunk: int | None, lane: Lane, start_us: float, end_us: float) -> Span:
        return Span(
            walk=walk.walk,
            stage=work.stage,
            chunk=chunk,
            lane=lane,
            action="launch" if lane == "host" else "run",
            start_us=start_us,
            end_us=end_us,
        )

    def one_after_the_other(works: Sequence[Work], start_us: float) -> Iterator[Span]:
        for work in works:
            launched_us = start_us + work.launch_us
            if work.launch_us > 0:
                yield span(work, None, "host", start_us, launched_us)
            start_us = launched_us + sum(work.times_us)
            yield span(work, None, work.resource, launched_us, start_us)

    yield from one_after_the_other(walk.before, start_us)
    start_us += sum(work.launch_us + sum(work.times_us) for work in walk.before)

    schedule = walk.schedule
    for work, launched, starts, ends in zip(
        walk.pipeline, schedule.launched_us, schedule.starts_us, schedule.ends_us, strict=True
    ):
        for turn in range(len(starts)):
            chunk = bound.chunk(turn, TRANSPOSE[walk.walk])
            if work.launch_us > 0:
                end_us = start_us + launched[turn]
                yield span(work, chunk, "host", end_us - work.launch_us, end_us)
            yield span(work, chunk, work.resource, start_us + starts[turn], start_us + ends[turn])
    yield from one_after_the_other(walk.after, start_us + schedule.total_us)
