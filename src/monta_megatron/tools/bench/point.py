"""One point of a benchmark: the dispatchers on its data, their rows, its report."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import Phase
from monta_megatron.common import strict_yaml
from monta_megatron.common.files import commit, machine, versions
from monta_megatron.common.text import Progress, counted
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.exchange.collectives import find_nodes
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.exchange.streams import device_of_ranks, gpu_name
from monta_megatron.integration.auto import AutoChooser
from monta_megatron.integration.options import AUTO
from monta_megatron.integration.planning import shape_of
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.price import price
from monta_megatron.planner.tuning import TIME_LAG
from monta_megatron.tools.bench import layer, measure
from monta_megatron.tools.bench.candidates import (
    Bench,
    BenchCandidate,
    make_batch,
    run_candidate,
    with_candidates,
)
from monta_megatron.tools.bench.report import Report, Row
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.record import record

# Exchanges of an iteration; a training has more, and layers besides.
MICRO_BATCHES = 4
# Settings that are fields of a row.
ROW_SETTINGS = ("tokens", "top_k", "routing", "tp", "ep", "etp")


class MismatchError(Exception):
    """A candidate differs from stock alltoall; one line for each difference."""


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
    # Step 1: build, and tune.
    bench = build(prepare(settings, cluster))
    if settings.tune_steps:
        _tune(bench, progress)
    # Step 2: check.
    progress.phase(f"checks of {counted(len(bench.candidates), 'dispatcher')}", 0)
    if wrong := measure.differences_from_stock(bench.candidates, bench.layout):
        raise MismatchError("\n".join(wrong))
    # Step 3: time, and record.
    scopes: dict[str, Experts] = {"exchange": layer.NO_EXPERTS}
    if settings.expert_ms is not None:
        full_rows = settings.tokens * settings.top_k * settings.etp
        scopes["layer"] = layer.TimedExperts(settings.expert_ms, full_rows)
    elif settings.layer:
        scopes["layer"] = layer.build_experts(settings)
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


def prepare(settings: Settings, cluster: Cluster | None) -> Bench:
    """Megatron's groups and the data; without dispatchers."""
    layer.initialize_groups(settings)
    world = dist.group.WORLD
    assert world is not None, "the launch is joined"
    return Bench(
        settings=settings,
        cluster=cluster,
        emulated=EmulatedCluster.from_environment(),
        nodes=find_nodes(world, settings.ranks_per_node),
        batch=make_batch(settings, dist.get_rank(), device_of_ranks()),
    )


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


def _tune(bench: Bench, progress: Progress) -> None:
    """Open the tuning window of `auto`, as in a training."""
    (auto,) = (each for each in bench.candidates if each.requested == AUTO and not each.overlaps)
    chooser, optimizer = auto.dispatcher.chooser, torch.optim.SGD([torch.zeros(1)])
    assert isinstance(chooser, AutoChooser), "it chooses"
    num_iterations = bench.settings.tune_steps + TIME_LAG
    progress.phase(f"tuning, {counted(num_iterations, 'iteration')}", num_iterations)
    for _ in range(num_iterations):
        for _ in range(MICRO_BATCHES):
            run_candidate(auto, layer.NO_EXPERTS)
        chooser.enter_step(optimizer)
        progress.step()


def _time(
    bench: Bench, scope: str, experts: Experts, phase: Phase, progress: Progress
) -> list[Row]:
    """Time all candidates in one phase; one row for each."""
    settings = bench.settings
    candidates = [each for each in bench.candidates if scope == "layer" or not each.overlaps]
    progress.phase(f"{scope}, {phase}, {counted(settings.repeats, 'repeat')}", settings.repeats)
    sent_bytes = [measure.run_counted(each, experts, phase, bench.nodes) for each in candidates]
    runs = [partial(run_candidate, each, experts, phase) for each in candidates]
    times_ms = measure.time_interleaved(runs, settings.repeats, progress.step)
    least_ms, stock_ms = measure.limit_ms(bench, phase), float(np.median(times_ms[:, 0]))
    rows = []
    for candidate, ms, (inter_bytes, intra_bytes) in zip(
        candidates, times_ms.T, sent_bytes, strict=True
    ):
        chain, num_chunks = candidate.key
        p10_ms, median_ms, p90_ms = np.percentile(ms, [10, 50, 90]).tolist()
        inside = candidate.overlaps and candidate.dispatcher.computes
        predicted_ms = _predicted_ms(bench, candidate, phase) if scope == "exchange" else None
        rows.append(
            Row(
                **{name: getattr(settings, name) for name in ROW_SETTINGS},
                dispatcher=candidate.kind,
                chain=chain,
                num_chunks=num_chunks,
                scope=scope,
                phase=phase,
                inter_mbit=bench.emulated.inter_mbit if bench.emulated else None,
                median_ms=median_ms,
                p10_ms=p10_ms,
                p90_ms=p90_ms,
                inter_bytes=inter_bytes,
                intra_bytes=intra_bytes,
                pct_of_limit=least_ms and 100 * least_ms / median_ms,
                ratio_to_alltoall=stock_ms / median_ms,
                predicted_ms=predicted_ms,
                chosen=candidate.requested == AUTO,
                experts_pipelined=inside if scope == "layer" else None,
            )
        )
    return rows


def _predicted_ms(bench: Bench, candidate: BenchCandidate, phase: Phase) -> float | None:
    """Predicted time of a candidate; None for stock's, or without a cluster file."""
    if bench.cluster is None or candidate.kind == "megatron":
        return None
    dispatcher, (chain, num_chunks) = candidate.dispatcher, candidate.key
    shape = shape_of(dispatcher.config, dispatcher.setup.layout)
    shape = replace(shape, tokens_per_rank=bench.settings.tokens)
    return price(shape, bench.cluster, CHAINS[chain], num_chunks, phase).total_us / 1e3
