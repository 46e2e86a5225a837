"""Runs chains under a launch, as `monta bench` does, and records them.

Of several passes the one with the median time is kept: a picture of a disturbed run says nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from monta_megatron.common.ranks import ThisRank
from monta_megatron.common.tables import Progress
from monta_megatron.common.units import counted
from monta_megatron.exchange.recording import spans_of
from monta_megatron.exchange.step_times import DeviceRecorder, HostRecorder, PassRecord
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.bench.candidates import (
    Bench,
    BenchCandidate,
    identity_experts,
    run_candidate,
)
from monta_megatron.tools.bench.point import prepare, provenance
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.joined_ranks import join, wait_for_all
from monta_megatron.tools.timeline.clock import Clock
from monta_megatron.tools.timeline.recording import RankRecord, Recording
from monta_megatron.tools.timeline.spans import pipeline_name


def record(
    settings: Settings, this_rank: ThisRank, cluster: Cluster | None, progress: Progress
) -> list[Recording] | None:
    """Record chains, which run in turn.

    Args:
        settings: what to run, each chain in one number of chunks, and one phase; `repeats` passes
            of each are recorded, of which one is kept.
        this_rank: this process among the ranks.
        cluster: costs by which `auto` chooses, or None.
        progress: this rank's progress display.

    Returns:
        The recordings on the first rank, in the order of the chains; None on the others.

    Raises:
        ValueError: a setting cannot run here.
    """
    join(this_rank.local_rank)
    bench = prepare(settings, cluster)
    candidates = [candidate for candidate in bench.candidates if candidate.kind == "monta"]
    # Step 1: run, with the recorder in place from the first pass on, so that it is warm too.
    taken = _run(bench, candidates, progress)
    # Step 2: keep a pass of each.
    clock = Clock()
    recordings = [_kept(bench, *each, clock) for each in zip(candidates, taken, strict=True)]
    kept = [recording for recording in recordings if recording is not None]
    return kept if dist.get_rank() == 0 else None


def _run(
    bench: Bench, candidates: Sequence[BenchCandidate], progress: Progress
) -> list[list[PassRecord]]:
    """The passes of each candidate, without those that warm up."""
    settings = bench.settings
    (phase,) = settings.phase
    recorder = DeviceRecorder() if bench.batch.hidden.is_cuda else HostRecorder()
    num_passes = settings.warmup + settings.repeats
    names = ", ".join(candidate.requested for candidate in candidates)
    progress.phase(f"{names}, {settings.warmup} + {settings.repeats} passes", num_passes)
    for candidate in candidates:
        candidate.dispatcher.monitor.recorder = recorder
    taken: list[list[PassRecord]] = [[] for _ in candidates]
    for _ in range(num_passes):
        for candidate, passes in zip(candidates, taken, strict=True):
            wait_for_all()
            run_candidate(candidate, identity_experts, backward=phase == "forward_backward")
            passes.append(recorder.take())
        progress.step()
    for candidate in candidates:
        candidate.dispatcher.monitor.recorder = None
    return [passes[settings.warmup :] for passes in taken]


def _kept(
    bench: Bench, candidate: BenchCandidate, passes: Sequence[PassRecord], clock: Clock
) -> Recording | None:
    """The pass with the median time, where a pass takes as long as its slowest rank.

    It is on the first rank, on all ranks' common clock.
    """
    settings = bench.settings
    (phase,) = settings.phase
    times_us = torch.tensor([_time_us(taken_pass) for taken_pass in passes], dtype=torch.float64)
    dist.all_reduce(times_us, op=dist.ReduceOp.MAX)
    middle = passes[int(times_us.argsort()[len(passes) // 2])]

    chain, num_chunks = candidate.key
    spans_here = [span.shifted(-clock.offset_us) for span in spans_of(middle.steps, middle.ends_us)]
    all_spans: list[Any] | None = [None] * len(bench.nodes) if dist.get_rank() == 0 else None
    dist.gather_object(spans_here, all_spans)
    if all_spans is None:
        return None
    first_us = min(span.start_us for spans in all_spans for span in spans)
    return Recording(
        title=_title(bench, chain, num_chunks),
        chain=chain,
        num_chunks=num_chunks,
        phase=phase,
        settings=settings,
        clock=clock.name,
        clock_error_us=clock.error_us,
        meta=provenance(bench),
        ranks=tuple(
            RankRecord(node=node, spans=tuple(span.shifted(-first_us) for span in spans))
            for node, spans in zip(bench.nodes, all_spans, strict=True)
        ),
    )


def _title(bench: Bench, chain: str, num_chunks: int) -> str:
    settings, emulated = bench.settings, bench.emulated
    ranks = "GPUs" if bench.batch.hidden.is_cuda else "CPU ranks"
    rate = "" if emulated is None else f" at {emulated.inter_mbit:g} Mbit/s"
    return (
        f"{pipeline_name(chain, num_chunks)}, recorded on {len(bench.nodes)} {ranks} of "
        f"{counted(len(set(bench.nodes)), 'node')}{rate}: TP {settings.tp}, EP {settings.ep}, "
        f"ETP {settings.etp}, top-{settings.top_k} of {settings.experts} experts, "
        f"{settings.routing} routing, H {settings.hidden}, "
        f"{counted(settings.tokens, 'token')} per rank, {settings.dtype}"
    )


def _time_us(taken: PassRecord) -> float:
    times = [step.device_us for step in taken.steps]
    return max(times) - min(times)
