"""One point of a benchmark: the dispatchers on its data, their rows, its report."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from monta_megatron.chains.program import Phase
from monta_megatron.common import strict_yaml
from monta_megatron.common.presets import commit, machine, versions
from monta_megatron.common.tables import Progress
from monta_megatron.common.units import counted
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.exchange.collectives import find_nodes
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.exchange.streams import device_of_ranks, gpu_name
from monta_megatron.integration.auto import AutoChooser
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.tuning import TIME_LAG
from monta_megatron.tools.bench import traffic
from monta_megatron.tools.bench.candidates import (
    Bench,
    identity_experts,
    make_batch,
    run_candidate,
    with_candidates,
)
from monta_megatron.tools.bench.layer import (
    TimedExperts,
    build_experts,
    exchange_layout,
    initialize_groups,
)
from monta_megatron.tools.bench.measure import differences_from_stock, time_interleaved
from monta_megatron.tools.bench.report import Report, Row
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.joined_ranks import wait_for_all
from monta_megatron.tools.record import record

# Exchanges of an iteration; a training has more, and layers besides.
MICRO_BATCHES = 4


class MismatchError(Exception):
    """A candidate differs from stock alltoall; one line for each difference."""


class Optimizer:
    """Key by which a chooser counts the steps of a training."""


def measure_point(
    settings: Settings,
    cluster: Cluster | None,
    progress: Progress,
    build: Callable[[Bench], Bench] = with_candidates,
) -> Report:
    """Check every candidate of a point and time them side by side; all ranks call this together.

    Args:
        settings: of the point.
        cluster: costs for predictions, or None.
        progress: this rank's progress display.
        build: adds the dispatchers.

    Raises:
        ValueError: a setting cannot run here.
        MismatchError: a candidate gives other results than stock alltoall; nothing was timed.
    """
    # Step 1: build. A mistake is the same on every rank: none exits long before the first one has
    # reported it.
    try:
        bench = prepare(settings, cluster, build)
    except ValueError:
        wait_for_all()
        raise
    # Step 2: check; once more after tuning, whose winner may not have run before.
    progress.phase(f"checks of {counted(len(bench.candidates), 'dispatcher')}", 0)
    _check(bench)
    if settings.tune_steps:
        _tune(bench, progress)
        _check(bench)
    # Step 3: time, and record.
    scopes: dict[str, Experts] = {"exchange": identity_experts}
    if settings.expert_ms is not None:
        full_rows = settings.tokens * settings.top_k * settings.etp
        scopes["layer"] = TimedExperts(settings.expert_ms, full_rows)
    elif settings.layer:
        scopes["layer"] = build_experts(settings)
    rows = [
        row
        for scope, experts in scopes.items()
        for phase in settings.phase
        for row in _time(bench, scope, experts, phase, progress)
    ]
    meta = provenance(bench)
    if settings.trace is not None:
        record(bench, meta, Path(settings.trace))
    return Report(meta=meta, rows=rows)


def prepare(
    settings: Settings,
    cluster: Cluster | None,
    build: Callable[[Bench], Bench] = with_candidates,
) -> Bench:
    """Megatron's groups, the data, and the dispatchers on both; see `measure_point`."""
    initialize_groups(settings)
    world = dist.group.WORLD
    assert world is not None, "the launch is joined"
    nodes = find_nodes(world, settings.ranks_per_node)
    bench = Bench(
        settings=settings,
        cluster=cluster,
        emulated=EmulatedCluster.from_environment(),
        nodes=nodes,
        layout=exchange_layout(settings, nodes),
        batch=make_batch(settings, dist.get_rank(), device_of_ranks()),
    )
    return build(bench)


def provenance(bench: Bench) -> dict[str, Any]:
    """The `meta` of a report: enough to know the measurement, and to run it again."""
    return {
        "versions": versions(),
        "machine": {**machine(), "gpu": gpu_name()},
        "commit": commit(),
        "command": shlex.join(["monta", *sys.argv[1:]]),
        "settings": strict_yaml.plain(bench.settings),
        "nodes": list(bench.nodes),
        "emulated_cluster": None if bench.emulated is None else asdict(bench.emulated),
        "skipped": dict(bench.skipped),
    }


def _check(bench: Bench) -> None:
    wrong = differences_from_stock(bench.candidates, bench.layout)
    if wrong:
        raise MismatchError("\n".join(wrong))


def _tune(bench: Bench, progress: Progress) -> None:
    """Open the tuning window of `auto`, as in a training."""
    (auto,) = (each for each in bench.candidates if each.is_auto and not each.overlaps)
    chooser, optimizer = auto.dispatcher.chooser, Optimizer()
    assert isinstance(chooser, AutoChooser), "it chooses"
    num_iterations = bench.settings.tune_steps + TIME_LAG
    progress.phase(f"tuning, {counted(num_iterations, 'iteration')}", num_iterations)
    for _ in range(num_iterations):
        for _ in range(MICRO_BATCHES):
            run_candidate(auto, identity_experts, backward=True)
        chooser.enter_step(optimizer)
        progress.step()


def _time(
    bench: Bench, scope: str, experts: Experts, phase: Phase, progress: Progress
) -> list[Row]:
    """Time all candidates in one phase; one row for each."""
    settings, backward = bench.settings, phase == "forward_backward"
    candidates = [each for each in bench.candidates if scope == "layer" or not each.overlaps]
    num_runs = settings.warmup + settings.repeats
    repeats = f"{settings.warmup} + {counted(settings.repeats, 'repeat')}"
    progress.phase(f"{scope}, {phase}, {repeats}", num_runs)
    for candidate in candidates:
        candidate.clear_sent_bytes()
    times_ms = time_interleaved(
        [partial(run_candidate, each, experts, backward) for each in candidates],
        settings.repeats,
        settings.warmup,
        progress.step,
    )
    percentiles_ms = np.percentile(times_ms, [10, 50, 90], axis=0)  # [3, candidates]
    base_ms = float(percentiles_ms[1, 0])
    limit_ms = _limit_ms(bench, backward)
    rows = []
    for candidate, (p10_ms, median_ms, p90_ms) in zip(
        candidates, percentiles_ms.T.tolist(), strict=True
    ):
        chain, num_chunks = candidate.key
        predicted_ms = None
        if bench.cluster is not None and candidate.kind == "monta" and scope == "exchange":
            shape = traffic.shape_of(settings, bench.layout)
            predicted_ms = traffic.predict_ms(shape, bench.cluster, chain, num_chunks, phase)
        sent_bytes = torch.tensor(candidate.sent_bytes(backward, num_runs))
        dist.all_reduce(sent_bytes)
        inter_bytes, intra_bytes = sent_bytes.tolist()
        rows.append(
            Row(
                dispatcher=candidate.kind,
                chain=chain,
                num_chunks=num_chunks,
                scope=scope,
                phase=phase,
                tokens=settings.tokens,
                top_k=settings.top_k,
                routing=settings.routing,
                tp=settings.tp,
                ep=settings.ep,
                etp=settings.etp,
                inter_mbit=bench.emulated.inter_mbit if bench.emulated else None,
                median_ms=median_ms,
                p10_ms=p10_ms,
                p90_ms=p90_ms,
                inter_bytes=inter_bytes,
                intra_bytes=intra_bytes,
                pct_of_limit=None if limit_ms is None else 100 * limit_ms / median_ms,
                ratio_to_alltoall=base_ms / median_ms,
                predicted_ms=predicted_ms,
                chosen=candidate.is_auto,
                experts_pipelined=candidate.experts_pipelined if scope == "layer" else None,
            )
        )
    return rows


def _limit_ms(bench: Bench, backward: bool) -> float | None:
    """The least time that the links between nodes allow; None if unknown or nothing crosses."""
    emulated = bench.emulated
    if emulated is None:
        return None
    routing_map = bench.batch.routing_map.cpu().numpy()
    crossing = torch.from_numpy(
        traffic.rows_that_cross(bench.layout, routing_map, len(set(bench.nodes)))
    )
    dist.all_reduce(crossing)
    row_bytes = (4 if backward else 2) * bench.batch.hidden[0].nbytes
    return traffic.limit_ms(crossing.numpy(), row_bytes, emulated.inter_mbit / 1e3)
