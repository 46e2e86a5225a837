r"""How close the pipeline of `alltoall_allgather` comes to its bound: the slowest of its stages.

Each stage is timed alone, on the rows that it moves in the chain, in the same interleaved run as
the chain; "forward" covers both dispatch and combine. A perfect pipeline takes as long as its
slowest stage, so it is (A2A + AG + Permute) / max(A2A, AG, Permute) times faster than the stages
one after the other. Permutation and metadata, which every dispatcher has, are left out.

Takes the flags of `monta bench`, whose rows come first, and like it one process per rank:

    monta emulate --nodes 2 --ranks-per-node 2 --inter-mbit 500 -- \
        benchmarks/bound.py --tp 2 --experts 8 --top-k 2 --hidden 64 --tokens 64
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sweep import Study, start

from monta_megatron.chains import CHAINS, BoundChain, Counts
from monta_megatron.chains.layout import Layout
from monta_megatron.chains.stages import BoundStage, Permute
from monta_megatron.common.tables import table
from monta_megatron.exchange.collectives import peer_groups
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.state import Exchange
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.bench.candidates import Batch, Candidate, build_candidates
from monta_megatron.tools.bench.layer import exchange_groups
from monta_megatron.tools.bench.measure import time_interleaved
from monta_megatron.tools.bench.point import Bench
from monta_megatron.tools.bench.report import Row
from monta_megatron.tools.bench.settings import Settings

CHAIN = CHAINS["alltoall_allgather"]
TIMES = ("alltoall_ms", "allgather_ms", "permute_ms", "pipelined_ms")


@dataclass(frozen=True, kw_only=True)
class BoundResult:
    """The pipeline with one number of chunks, in one phase.

    Attributes:
        phase: "forward" or "forward_backward".
        num_chunks: number of chunks of the pipeline.
        alltoall_ms, allgather_ms, permute_ms: median of the slowest rank's times, each stage alone.
        pipelined_ms: the same for the whole chain.
        speedup: how many times faster the chain is than its stages one after the other.
        bound: the largest speedup that any pipeline of these stages can have.
        pct_of_bound: `speedup` in percent of `bound`.
    """

    phase: str
    num_chunks: int
    alltoall_ms: float
    allgather_ms: float
    permute_ms: float
    pipelined_ms: float
    speedup: float
    bound: float
    pct_of_bound: float


def build(
    settings: Settings, cluster: Cluster | None, layout: Layout, batches: tuple[Batch, ...]
) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates of `monta bench`.

    Raises:
        ValueError: there is no AllGather(ETP).
    """
    if settings.etp == 1:
        raise ValueError("--etp: got 1, must be above 1: it is about AllGather(ETP)")
    return build_candidates(settings, cluster, layout, batches)


def finish(timed: Bench, rows: list[Row]) -> dict[str, Any]:
    """The stages alone, and the pipeline."""
    timed.task.progress.phase(f"{timed.task.name}stages of {CHAIN.name} alone", 0)
    results = measure_bound(timed.task.settings, timed.layout, timed.batches[0])
    return {"bound": [asdict(result) for result in results]}


def measure_bound(settings: Settings, layout: Layout, batch: Batch) -> list[BoundResult]:
    """Time the stages alone and the chain with every number of chunks."""
    counts = _gather_counts(layout, batch)
    groups = peer_groups((CHAIN,), layout, exchange_groups())

    def exchange_of(bound: BoundChain) -> Exchange:
        return Exchange(bound=bound, groups=groups, sum_dtype=torch.float32, monitor=Monitor())

    serial = CHAIN.bind(layout, counts, 1)
    # A2A, AG and the Permute into expert order; one chunk needs no packing.
    alone = [_alone(serial, stage) for stage in serial.stages[1:]]
    pipelines = [CHAIN.bind(layout, counts, num_chunks) for num_chunks in settings.num_chunks]
    results = []
    for phase in settings.phases:
        timings = time_interleaved(
            [
                _run_passes(exchange_of(bound), batch, backward=phase == "forward_backward")
                for bound in (*alone, *pipelines)
            ],
            settings.repeats,
            settings.warmup,
            lambda: 0,
        )
        medians_ms: list[float] = np.median(timings.times_ms, axis=0).tolist()
        for bound, pipelined_ms in zip(pipelines, medians_ms[len(alone) :], strict=True):
            results.append(
                bound_result(phase, bound.num_chunks, medians_ms[: len(alone)], pipelined_ms)
            )
    return results


def bound_result(
    phase: str, num_chunks: int, stages_ms: Sequence[float], pipelined_ms: float
) -> BoundResult:
    """The figures that follow from the times of A2A, AG and Permute alone, and of the pipeline."""
    alltoall_ms, allgather_ms, permute_ms = stages_ms
    speedup, bound = sum(stages_ms) / pipelined_ms, sum(stages_ms) / max(stages_ms)
    return BoundResult(
        phase=phase,
        num_chunks=num_chunks,
        alltoall_ms=alltoall_ms,
        allgather_ms=allgather_ms,
        permute_ms=permute_ms,
        pipelined_ms=pipelined_ms,
        speedup=speedup,
        bound=bound,
        pct_of_bound=100 * speedup / bound,
    )


def bound_text(reports: Sequence[Mapping[str, Any]]) -> str:
    """One line per phase and number of chunks."""
    return "\n\n".join(
        table(
            [
                *("phase", ">chunks", ">A2A", ">AG", ">Permute", ">chain"),
                *(">speedup", ">bound", ">%"),
            ],
            [
                [
                    result["phase"].replace("_", " + "),
                    result["num_chunks"],
                    *(f"{result[name]:.1f}" for name in TIMES),
                    f"{result['speedup']:.2f}",
                    f"{result['bound']:.2f}",
                    f"{result['pct_of_bound']:.0f}",
                ]
                for result in report["bound"]
            ],
            title="alltoall_allgather against its stages alone (ms)",
        )
        for report in reports
    )


def _alone(serial: BoundChain, stage: BoundStage) -> BoundChain:
    """A chain of one stage, between two ends that move nothing."""

    def end(num_rows: int) -> BoundStage:
        rows = np.full((1, 1), num_rows)
        return BoundStage(stage=Permute(name="end"), send=rows, receive=rows)

    num_rows = int(stage.rows_before.sum())
    before, after = end(num_rows), end(int(stage.rows_after.sum()))
    stages = (before, stage) if stage is serial.stages[-1] else (before, stage, after)
    return replace(serial, stages=stages, num_source_rows=num_rows)


def _run_passes(exchange: Exchange, batch: Batch, backward: bool) -> Callable[[int], None]:
    """A function that dispatches and combines over a chain, on rows of the batch's width."""
    hidden = batch.hidden
    source = hidden.new_ones(int(exchange.bound.num_source_rows), hidden.shape[-1])
    probs = batch.probs.new_ones(len(source))

    def run(repeat: int) -> None:
        rows, row_probs = dispatch(
            exchange, source.detach().requires_grad_(), probs.detach().requires_grad_()
        )
        output = combine(exchange, rows)
        if backward:
            torch.autograd.backward(
                [output, row_probs], [torch.ones_like(output), torch.ones_like(row_probs)]
            )

    return run


def _gather_counts(layout: Layout, batch: Batch) -> Counts:
    """The counts of permuted tokens, from the routing maps of all ranks of the exchange."""
    # [E]
    here = batch.routing_map.sum(dim=0).long()
    by_rank = [torch.empty_like(here) for _ in layout.nodes]
    dist.all_gather(by_rank, here, group=exchange_groups()["tp_ep"])
    table = torch.stack(by_rank).cpu().numpy()
    first = layout.first_expert
    # [S, E] -> [EP, ETP, L] -> [ETP, EP, L]
    received = table[:, first : first + layout.num_local_experts].reshape(layout.ep, layout.etp, -1)
    return Counts(
        sent=table[layout.rank].reshape(layout.ep, -1), received=received.transpose(1, 0, 2)
    )


STUDY = Study(name="bound", build=build, finish=finish, text=bound_text)

if __name__ == "__main__":
    sys.exit(start(STUDY, __doc__))
