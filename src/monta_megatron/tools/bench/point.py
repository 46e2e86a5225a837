"""One point of a benchmark: its settings, the dispatchers on its data, and their rows."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from monta_megatron.chains.program import Phase
from monta_megatron.common import strict_yaml
from monta_megatron.common.nodes import is_named
from monta_megatron.common.ranks import ThisRank
from monta_megatron.common.tables import Progress
from monta_megatron.common.units import counted
from monta_megatron.core import Layout
from monta_megatron.emulation.cluster import EmulatedCluster, default_costs
from monta_megatron.exchange.collectives import find_nodes
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.integration.auto import AutoChooser
from monta_megatron.integration.options import AUTO
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.tuning import TIME_LAG
from monta_megatron.tools.bench import traffic
from monta_megatron.tools.bench.candidates import (
    Batch,
    BenchCandidate,
    Build,
    build_candidates,
    identity_experts,
    make_batch,
    run_candidate,
    traffic_of_run,
)
from monta_megatron.tools.bench.layer import (
    TimedExperts,
    build_experts,
    exchange_layout,
    initialize_groups,
)
from monta_megatron.tools.bench.measure import check_candidates, time_interleaved, wait_for_all
from monta_megatron.tools.bench.report import (
    Row,
    describe,
    ratio_interval,
    ratio_of_medians,
    spread,
)
from monta_megatron.tools.bench.settings import BenchPoint, Settings
from monta_megatron.tools.bench.traffic import Traffic, predict
from monta_megatron.tools.joined_ranks import join, on_first_rank

# Exchanges of an iteration; a training has more, and layers besides.
MICRO_BATCHES = 4


class Optimizer:
    """Key by which a chooser counts the steps of a training."""


@dataclass(frozen=True, kw_only=True)
class BenchTask:
    """Measurements of one point, and where.

    Attributes:
        name: prefix of its progress messages.
        settings: the settings.
        this_rank: this process among the ranks.
        cluster: costs for predictions, or None.
        emulated: the emulated cluster that it runs on, or None.
        progress: this rank's progress display.
    """

    name: str
    settings: Settings
    this_rank: ThisRank
    cluster: Cluster | None
    emulated: EmulatedCluster | None
    progress: Progress


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The candidates, and everything that their rows report.

    Attributes:
        task: the settings.
        nodes: node of every rank of the launch.
        layout: its exchange, as this rank sees it.
        batch: this rank's data.
        candidates: stock's dispatchers and ours.
        skipped: why chains were left out.
    """

    task: BenchTask
    nodes: tuple[int, ...]
    layout: Layout
    batch: Batch
    candidates: list[BenchCandidate]
    skipped: dict[str, str]

    def meta(self) -> dict[str, Any]:
        """Place and way of a run: the `meta` of a report."""
        gpu = torch.cuda.get_device_name() if self.batch.hidden.is_cuda else None
        return describe(self.task.settings, self.nodes, self.task.emulated, self.skipped, gpu)

    def rows(self, scope: str, experts: Experts, phase: Phase) -> list[Row]:
        """Time all candidates in one phase; one row for each."""
        task = self.task
        candidates = [other for other in self.candidates if scope == "layer" or not other.overlaps]
        settings, emulated = task.settings, task.emulated
        backward = phase == "forward_backward"
        num_runs = settings.warmup + settings.repeats
        task.progress.phase(
            f"{task.name}{scope}, {phase}, {settings.warmup} + "
            f"{counted(settings.repeats, 'repeat')}",
            num_runs,
        )
        for candidate in candidates:
            if candidate.kind == "monta":
                candidate.dispatcher.monitor.bytes_sent.clear()
        reads_nics = task.this_rank.local_rank == 0
        timings = time_interleaved(
            [functools.partial(run_candidate, other, experts, backward) for other in candidates],
            settings.repeats,
            settings.warmup,
            emulated.sent_bytes if emulated and reads_nics else lambda: 0,
            task.progress.step,
        )
        limit_ms = self._limit_ms(backward)
        ours = [other.key for other in candidates if other.kind == "monta"]
        predicted_ms, chosen = predict(
            settings, self.layout, task.cluster if scope == "exchange" else None, phase, ours
        )
        chosen = next((other.key for other in candidates if other.requested == AUTO), chosen)
        base = next(at for at, candidate in enumerate(candidates) if candidate.is_baseline)
        base_ms = timings.times_ms[:, base]

        rows = []
        for position, candidate in enumerate(candidates):
            times_ms = timings.times_ms[:, position]
            p10_ms, median_ms, p90_ms = spread(times_ms)
            low, high = ratio_interval(base_ms, times_ms)
            moved = _of_all_ranks(traffic_of_run(candidate, backward, num_runs))
            chain, num_chunks = candidate.key
            is_ours = candidate.kind == "monta"
            rows.append(
                Row(
                    dispatcher=candidate.kind,
                    chain=chain,
                    num_chunks=num_chunks,
                    requested=candidate.requested,
                    scope=scope,
                    phase=phase,
                    tokens=settings.tokens,
                    top_k=settings.topk,
                    routing=settings.routing,
                    experts=settings.num_experts,
                    hidden=settings.hidden,
                    dtype=settings.dtype,
                    tp=settings.tp,
                    ep=settings.ep,
                    etp=settings.etp,
                    inter_mbit=emulated.inter_mbit if emulated else None,
                    median_ms=median_ms,
                    p10_ms=p10_ms,
                    p90_ms=p90_ms,
                    inter_bytes=moved.inter_bytes,
                    intra_bytes=moved.intra_bytes,
                    nic_bytes=int(timings.nic_bytes[position]) if emulated else None,
                    pct_of_limit=None if limit_ms is None else 100 * limit_ms / median_ms,
                    ratio_to_alltoall=ratio_of_medians(base_ms, times_ms),
                    ratio_low=low,
                    ratio_high=high,
                    predicted_ms=predicted_ms.get(candidate.key) if is_ours else None,
                    chosen=is_ours and candidate.key == chosen and not candidate.overlaps,
                    experts_pipelined=candidate.experts_pipelined if scope == "layer" else None,
                    expert_ms=settings.expert_ms if scope == "layer" else None,
                    repeats_ms=tuple(round(ms, 3) for ms in times_ms.tolist()),
                )
            )
        return rows

    def check(self, candidates: list[BenchCandidate]) -> None:
        """Compare candidates with stock's; raises MismatchError."""
        wrong = check_candidates(candidates, self.layout)
        if wrong:
            raise MismatchError("\n".join(wrong))

    def tune(self) -> int:
        """Open the tuning window of `auto`, as in a training; returns its number of steps."""
        num_steps = self.task.settings.tune_steps
        for candidate in self.candidates:
            if not num_steps or not candidate.is_auto or candidate.overlaps:
                continue
            chooser, optimizer = candidate.dispatcher.chooser, Optimizer()
            assert isinstance(chooser, AutoChooser), "it chooses"
            num_iterations = num_steps + TIME_LAG
            self.task.progress.phase(
                f"{self.task.name}tuning, {counted(num_iterations, 'iteration')}", num_iterations
            )
            for _ in range(num_iterations):
                for _ in range(MICRO_BATCHES):
                    run_candidate(candidate, identity_experts, backward=True)
                chooser.enter_step(optimizer)
                self.task.progress.step()
        return num_steps

    def _limit_ms(self, backward: bool) -> float | None:
        """The least time that the links between nodes allow; None if unknown or nothing crosses."""
        settings, emulated, layout = self.task.settings, self.task.emulated, self.layout
        num_nodes = len(set(self.nodes))
        if emulated is None or num_nodes == 1:
            return None
        crossing = torch.zeros(num_nodes, num_nodes, dtype=torch.long)
        crossing[layout.nodes[layout.rank]] = torch.from_numpy(
            traffic.rows_that_cross(layout, self.batch.routing_map.cpu().numpy(), num_nodes)
        )
        dist.all_reduce(crossing)
        if not crossing.any():
            return None
        row_bytes = settings.crossing_bytes(backward)
        return traffic.limit_ms(crossing.numpy(), row_bytes, emulated.inter_mbit / 1e3)


def prepare(
    task: BenchTask, device: torch.device, makes_groups: bool, build: Build = build_candidates
) -> Bench:
    """Megatron's groups, the data, and the dispatchers on both.

    Args:
        task: to measure.
        device: where.
        makes_groups: whether the groups of these sizes have to be made first.
        build: makes the dispatchers.

    Raises:
        ValueError: a setting cannot run here; raised on every rank, once all have come this far.
    """
    try:
        return _prepare(task, device, makes_groups, build)
    except ValueError:
        # The same on every rank: wait, so that none exits long before the first one has reported.
        wait_for_all()
        raise


def _prepare(task: BenchTask, device: torch.device, makes_groups: bool, build: Build) -> Bench:
    settings = task.settings
    if makes_groups:
        initialize_groups(settings)
    world = dist.group.WORLD
    assert world is not None, "start has joined the launch"
    nodes = find_nodes(world, settings.ranks_per_node)
    cluster = task.cluster
    # Unless they are named, a dispatcher takes its nodes from the cluster file, the benchmark from
    # the launch. Every rank compares the nodes of all ranks, so that all of them refuse.
    if (
        cluster is not None
        and settings.ranks_per_node is None
        and not is_named()
        and find_nodes(world, cluster.ranks_per_node) != nodes
    ):
        raise ValueError(
            f"--cluster: got one of {counted(cluster.ranks_per_node, 'rank')} per node, must have "
            f"{nodes.count(nodes[0])} as this launch, or --ranks-per-node says how many"
        )
    layout = exchange_layout(settings, nodes)
    batch = make_batch(settings, layout, task.this_rank.rank, device)
    costs = cluster
    if cluster is None and task.emulated is not None:
        # Nothing is predicted from costs that nobody measured, but `auto` has to choose by some.
        costs = default_costs(task.emulated)
    candidates, skipped = build(settings, costs, layout, batch)
    return Bench(
        task=task,
        nodes=nodes,
        layout=layout,
        batch=batch,
        candidates=candidates,
        skipped=skipped,
    )


def _of_all_ranks(here: Traffic) -> Traffic:
    total = torch.tensor([here.inter_bytes, here.intra_bytes])
    dist.all_reduce(total)
    inter_bytes, intra_bytes = total.tolist()
    return Traffic(inter_bytes=inter_bytes, intra_bytes=intra_bytes)


class MismatchError(Exception):
    """A candidate differs from stock alltoall; one line for each difference."""


def run_benchmarks(
    points: Sequence[BenchPoint],
    this_rank: ThisRank,
    cluster: Cluster | None,
    progress: Progress,
    is_kept: Callable[[Settings, EmulatedCluster | None], bool] = lambda *_: False,
    build: Build = build_candidates,
) -> Iterator[dict[str, Any]]:
    """Join the launch, then at each point check every candidate and time them side by side.

    Args:
        points: to measure.
        this_rank: this process among the ranks.
        cluster: costs from which to predict the times, or None.
        progress: this rank's progress display.
        is_kept: whether a point was measured before, on this emulated cluster, and is left out;
            called on the first rank.
        build: makes the candidates.

    Yields:
        {"settings": ..., "meta": ..., "rows": [...]}, the same on every rank.

    Raises:
        ValueError: a setting cannot run here.
        MismatchError: a candidate gives other results than stock alltoall; it was not timed.
    """
    # A flag of the launch, so the same at all points.
    device = join(this_rank.local_rank, points[0].settings.transport)
    emulated = EmulatedCluster.from_environment()
    left = on_first_rank(
        lambda: [point for point in points if not is_kept(point.settings, emulated)]
    )
    if len(left) < len(points):
        progress.phase(
            f"{len(points) - len(left)} of {counted(len(points), 'point')} kept from before", 0
        )
    sizes = None
    for number, point in enumerate(left, 1):
        settings = point.settings
        # Groups live until the end, so new ones are made only where the sizes change.
        is_new = sizes != (settings.tp, settings.ep, settings.etp)
        sizes = (settings.tp, settings.ep, settings.etp)
        name = f"point {number} of {len(left)} ({point.name}): " if len(left) > 1 else ""
        yield _run_benchmark(
            BenchTask(
                name=name,
                settings=settings,
                this_rank=this_rank,
                cluster=cluster,
                emulated=emulated,
                progress=progress,
            ),
            device,
            is_new,
            build,
        )


def _run_benchmark(
    task: BenchTask, device: torch.device, makes_groups: bool, build: Build
) -> dict[str, Any]:
    """Check and time one point."""
    settings = task.settings
    if settings.expert_ms is not None and device.type == "cuda":
        raise ValueError(
            f"--expert-ms: got {settings.expert_ms:g}, must be left out on GPUs, where experts "
            "compute beside the host anyway"
        )
    bench = prepare(task, device, makes_groups, build)
    task.progress.phase(f"{task.name}checks of {counted(len(bench.candidates), 'dispatcher')}", 0)
    bench.check(bench.candidates)
    if bench.tune():
        # What has won may not have run before.
        bench.check([each for each in bench.candidates if each.is_baseline or each.is_auto])
    scopes: dict[str, Experts] = {"exchange": identity_experts}
    if settings.layer:
        if settings.expert_ms is None:
            scopes["layer"] = build_experts(settings)
        else:
            scopes["layer"] = TimedExperts(
                settings.expert_ms, settings.tokens * settings.topk * settings.etp
            )
    rows = [
        row
        for scope, experts in scopes.items()
        for phase in settings.phases
        for row in bench.rows(scope, experts, phase)
    ]

    return {
        "settings": strict_yaml.plain(settings),
        "meta": bench.meta(),
        "rows": [asdict(row) for row in rows],
    }
