"""Benchmarks from settings to reports, on one rank: check, then time, then summarise."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from monta_megatron.common.ranks import ThisRank
from monta_megatron.common.tables import Progress
from monta_megatron.common.units import counted
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.bench.candidates import build_candidates, identity_experts
from monta_megatron.tools.bench.layer import Experts, TimedExperts, build_experts
from monta_megatron.tools.bench.measure import check_candidates
from monta_megatron.tools.bench.point import Task, prepare
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.bench.sweep import Study, SweepPoint, settings_document
from monta_megatron.tools.joined_ranks import join, on_first_rank


class MismatchError(Exception):
    """A candidate differs from stock alltoall; one line for each difference."""


# Whether a point has been measured before, on this emulated cluster.
IsKept = Callable[[Settings, EmulatedCluster | None], bool]


def run_benchmarks(
    points: Sequence[SweepPoint],
    this_rank: ThisRank,
    cluster: Cluster | None,
    progress: Progress,
    is_kept: IsKept,
    study: Study | None = None,
) -> Iterator[dict[str, Any]]:
    """Join the launch, then at each point check every candidate and time them side by side.

    Args:
        points: to measure.
        this_rank: this process among the ranks.
        cluster: costs from which to predict the times, or None.
        progress: this rank's progress display.
        is_kept: whether a point was measured before and is left out; called on the first rank.
        study: what is done beyond `monta bench`, if anything.

    Yields:
        {"settings": ..., "meta": ..., "rows": [...]}, the same on every rank, and what the study
        adds.

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
            study,
        )


def _run_benchmark(
    task: Task, device: torch.device, makes_groups: bool, study: Study | None
) -> dict[str, Any]:
    """Check and time one point."""
    settings = task.settings
    if settings.expert_ms is not None and device.type == "cuda":
        raise ValueError(
            f"--expert-ms: got {settings.expert_ms:g}, must be left out on GPUs, where experts "
            "compute beside the host anyway"
        )
    build = build_candidates if study is None else study.build
    bench = prepare(task, device, makes_groups, build)
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

    report: dict[str, Any] = {
        "settings": settings_document(settings, study),
        "meta": bench.meta(),
        "rows": [asdict(row) for row in rows],
    }
    if study is not None:
        report["meta"]["command"] = shlex.join(sys.argv)
        report |= study.finish(bench, rows)
    return report
