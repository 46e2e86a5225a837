"""Benchmarks from settings to reports, on one rank: check, then time, then summarise."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from monta_megatron.common import strict_yaml
from monta_megatron.common.ranks import ThisRank
from monta_megatron.common.tables import Progress
from monta_megatron.common.units import counted
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.bench.candidates import build_candidates, identity_experts
from monta_megatron.tools.bench.layer import Experts, TimedExperts, build_experts
from monta_megatron.tools.bench.measure import check_candidates
from monta_megatron.tools.bench.point import Task, prepare
from monta_megatron.tools.bench.settings import Hooks, Point
from monta_megatron.tools.joined_ranks import join, on_first_rank


class MismatchError(Exception):
    """A candidate differs from stock alltoall; one line for each difference."""


def run_benchmarks(
    points: Sequence[Point],
    this_rank: ThisRank,
    cluster: Cluster | None,
    progress: Progress,
    hooks: Hooks,
) -> Iterator[dict[str, Any]]:
    """Join the launch, then at each point check every candidate and time them side by side.

    Args:
        points: to measure.
        this_rank: this process among the ranks.
        cluster: costs from which to predict the times, or None.
        progress: this rank's progress display.
        hooks: of a script.

    Yields:
        {"settings": ..., "meta": ..., "rows": [...]}, the same on every rank, and what the hooks
        add.

    Raises:
        ValueError: a setting cannot run here.
        MismatchError: a candidate gives other results than stock alltoall; it was not timed.
    """
    # A flag of the launch, so the same at all points.
    device = join(this_rank.local_rank, points[0].settings.transport)
    emulated = EmulatedCluster.from_environment()
    left = on_first_rank(
        lambda: [point for point in points if not hooks.is_kept(point.settings, emulated)]
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
            Task(
                name=name,
                settings=settings,
                this_rank=this_rank,
                cluster=cluster,
                emulated=emulated,
                progress=progress,
            ),
            device,
            is_new,
            hooks,
        )


def _run_benchmark(
    task: Task, device: torch.device, makes_groups: bool, hooks: Hooks
) -> dict[str, Any]:
    """Check and time one point."""
    settings = task.settings
    if settings.expert_ms is not None and device.type == "cuda":
        raise ValueError(
            f"--expert-ms: got {settings.expert_ms:g}, must be left out on GPUs, where experts "
            "compute beside the host anyway"
        )
    bench = prepare(task, device, makes_groups, hooks.build or build_candidates)
    task.progress.phase(f"{task.name}checks of {counted(len(bench.candidates), 'dispatcher')}", 0)
    wrong = check_candidates(bench.candidates, bench.layout)
    if wrong:
        raise MismatchError("\n".join(wrong))

    bench.tune()
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
        **hooks.finish(bench, rows),
    }
