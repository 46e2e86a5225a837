"""One benchmark from settings to report, on one rank: check, then time, then add up."""

import functools
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from monta_megatron.benchmark import traffic
from monta_megatron.benchmark.ablation import ablation_steps, build_ablation
from monta_megatron.benchmark.bound import measure_bound
from monta_megatron.benchmark.candidates import (
    Candidate,
    build_candidates,
    count_traffic,
    identity_experts,
    run_candidate,
)
from monta_megatron.benchmark.checks import check_candidates
from monta_megatron.benchmark.launch import Launch
from monta_megatron.benchmark.prediction import predict
from monta_megatron.benchmark.report import Row, describe
from monta_megatron.benchmark.settings import Phase, Settings
from monta_megatron.benchmark.statistics import ratio_interval, ratio_of_medians, spread
from monta_megatron.benchmark.timing import time_interleaved, wait_for_all
from monta_megatron.benchmark.traffic import Traffic
from monta_megatron.benchmark.workload import Batch, make_batch
from monta_megatron.chains import Layout
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.exchange.groups import find_nodes
from monta_megatron.integration.bench_layer import (
    Experts,
    LayerShape,
    build_experts,
    exchange_layout,
    initialize_groups,
)
from monta_megatron.options import AUTO
from monta_megatron.planner.cluster import Cluster


class MismatchError(Exception):
    """A candidate does not do what stock alltoall does; one line for each difference."""


def run_benchmark(
    settings: Settings, launch: Launch, cluster: Cluster | None = None
) -> dict[str, Any]:
    """Check every candidate, time them side by side, and report.

    Args:
        settings: what to do.
        launch: this rank's place.
        cluster: costs from which to predict the times, if there are any.

    Returns:
        {"meta": ..., "rows": [...]}, the same on every rank; "ablation" and "bound" where asked
        for.

    Raises:
        ValueError: a setting that cannot run here.
        MismatchError: a candidate gives other results than stock alltoall; nothing was timed.
    """
    device = _start(launch)
    try:
        bench = _prepare(settings, launch, cluster, device)
    except ValueError:
        # The same on every rank; the first one is not far behind when the others leave.
        wait_for_all()
        raise

    wrong = check_candidates(bench.candidates, bench.layout)
    if wrong:
        raise MismatchError("\n".join(wrong))
    _say(f"{len(bench.candidates)} dispatchers checked against stock alltoall")

    scopes: dict[str, Experts] = {"exchange": identity_experts}
    if settings.layer:
        scopes["layer"] = build_experts(bench.shape)
    rows = [
        row
        for scope, experts in scopes.items()
        for phase in settings.phases
        for row in bench.rows(scope, experts, phase)
    ]

    gpu = torch.cuda.get_device_name() if bench.batch.hidden.is_cuda else None
    report: dict[str, Any] = {
        "meta": describe(settings, bench.nodes, bench.emulated, bench.skipped, gpu),
        "rows": [asdict(row) for row in rows],
    }
    if settings.ablation:
        report["ablation"] = [asdict(result) for result in ablation_steps(rows)]
    if settings.bound:
        _say("stages of alltoall_allgather alone")
        found = measure_bound(settings, bench.layout, bench.batch)
        report["bound"] = [asdict(result) for result in found]
    return report


def _prepare(
    settings: Settings, launch: Launch, cluster: Cluster | None, device: torch.device
) -> "_Bench":
    """Megatron's groups, the data, and the dispatchers on both."""
    shape = LayerShape(
        num_experts=settings.num_experts,
        topk=settings.topk,
        hidden=settings.hidden,
        ffn_hidden=settings.ffn_hidden,
        dtype=getattr(torch, settings.dtype),
        tp=settings.tp,
        ep=settings.ep,
        etp=settings.etp,
    )
    initialize_groups(shape)
    world = dist.group.WORLD
    assert world is not None, "_start has joined the launch"
    nodes = find_nodes(world, settings.ranks_per_node)
    layout = exchange_layout(shape, nodes)
    batch = make_batch(settings, layout, launch.rank, device)
    skipped: dict[str, str] = {}
    if settings.ablation:
        candidates = build_ablation(settings, shape, layout, batch)
    else:
        candidates, skipped = build_candidates(settings, shape, layout, batch)
    return _Bench(
        settings=settings,
        shape=shape,
        nodes=nodes,
        layout=layout,
        batch=batch,
        candidates=candidates,
        skipped=skipped,
        cluster=cluster,
        emulated=EmulatedCluster.from_environment(),
        reads_nics=launch.local_rank == 0,
    )


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """The candidates, and all that a row says of them.

    Attributes:
        settings: what was asked for.
        shape: of the layer.
        nodes: of every rank of the launch.
        layout: this rank's place in its exchange.
        batch: this rank's data.
        candidates: stock's dispatchers and ours.
        skipped: why chains were left out.
        cluster: costs for predictions, or None.
        emulated: what it runs on, or None.
        reads_nics: whether this rank reads the NICs of its node.
    """

    settings: Settings
    shape: LayerShape
    nodes: tuple[int, ...]
    layout: Layout
    batch: Batch
    candidates: list[Candidate]
    skipped: dict[str, str]
    cluster: Cluster | None
    emulated: EmulatedCluster | None
    reads_nics: bool

    def rows(self, scope: str, experts: Experts, phase: Phase) -> list[Row]:
        """Time all candidates in one phase; one row for each."""
        settings, candidates, emulated = self.settings, self.candidates, self.emulated
        backward = phase == "forward_backward"
        _say(f"{scope}, {phase}: {settings.warmup} + {settings.repeats} repeats")
        timings = time_interleaved(
            [functools.partial(run_candidate, each, experts, backward) for each in candidates],
            settings.repeats,
            settings.warmup,
            emulated.sent_bytes if emulated and self.reads_nics else lambda: 0,
        )
        limit_ms = self._limit_ms(backward)
        ours = [each.key for each in candidates if each.kind == "monta"]
        prediction = predict(
            settings, self.layout, self.cluster if scope == "exchange" else None, phase, ours
        )
        autos = [each.key for each in candidates if each.requested == AUTO]
        chosen = autos[0] if autos else prediction.chosen
        base = next(at for at, candidate in enumerate(candidates) if candidate.is_baseline)
        base_ms = timings.times_ms[:, base]

        rows = []
        for position, candidate in enumerate(candidates):
            times_ms = timings.times_ms[:, position]
            middle = spread(times_ms)
            low, high = ratio_interval(base_ms, times_ms)
            moved = _of_all_ranks(count_traffic(candidate, backward))
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
                    median_ms=middle.median_ms,
                    p10_ms=middle.p10_ms,
                    p90_ms=middle.p90_ms,
                    inter_bytes=moved.inter_bytes,
                    intra_bytes=moved.intra_bytes,
                    nic_bytes=int(timings.nic_bytes[position]) if emulated else None,
                    pct_of_limit=None if limit_ms is None else 100 * limit_ms / middle.median_ms,
                    ratio_to_alltoall=ratio_of_medians(base_ms, times_ms),
                    ratio_low=low,
                    ratio_high=high,
                    step=candidate.step,
                    predicted_ms=prediction.predicted_ms.get(candidate.key) if is_ours else None,
                    chosen=is_ours and candidate.key == chosen,
                )
            )
        return rows

    def _limit_ms(self, backward: bool) -> float | None:
        """The link's limit, where there is a link with a known rate."""
        settings, layout, emulated = self.settings, self.layout, self.emulated
        num_nodes = len(set(self.nodes))
        if emulated is None or emulated.measured_inter_gbit_s is None or num_nodes == 1:
            return None
        crossing = torch.zeros(num_nodes, num_nodes, dtype=torch.long)
        crossing[layout.nodes[layout.rank]] = torch.from_numpy(
            traffic.rows_that_cross(layout, self.batch.routing_map.cpu().numpy(), num_nodes)
        )
        dist.all_reduce(crossing)
        if not crossing.any():
            return None
        node_gbit_s = emulated.measured_inter_gbit_s * emulated.nics_per_node
        return traffic.limit_ms(crossing.numpy(), settings.row_bytes, node_gbit_s, backward)


def _start(launch: Launch) -> torch.device:
    """Join the launch; Gloo carries what the benchmark itself has to say."""
    if not torch.cuda.is_available():
        raise ValueError("MONTA_CPU_RANKS: not set, must be 1 where there is no GPU")
    torch.cuda.set_device(launch.local_rank % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return torch.device("cuda", torch.cuda.current_device())


def _of_all_ranks(own: Traffic) -> Traffic:
    total = torch.tensor([own.inter_bytes, own.intra_bytes])
    dist.all_reduce(total)
    inter_bytes, intra_bytes = total.tolist()
    return Traffic(inter_bytes=inter_bytes, intra_bytes=intra_bytes)


def _say(text: str) -> None:
    """Progress, on standard error of the first rank."""
    if dist.get_rank() == 0:
        print(f"monta bench: {text}", file=sys.stderr, flush=True)
