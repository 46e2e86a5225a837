"""A point of a benchmark: its dispatchers checked against stock, then timed; rows and report.

Each repeat runs every candidate once, in an order of its own, on the benchmark's own data.
"""

import gc
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import PASSES, Phase
from monta_megatron.common import strict_yaml
from monta_megatron.common.files import commit, machine, versions
from monta_megatron.common.text import Progress, counted
from monta_megatron.core import Layout
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.exchange.agreement import find_busy_machines, find_nodes, gather_objects
from monta_megatron.exchange.collectives import (
    device_of_ranks,
    wait_for_all,
)
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.exchange.streams import gpu_name
from monta_megatron.integration.auto import AutoChooser
from monta_megatron.integration.planning import shape_of
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.price import price
from monta_megatron.planner.tuning import TIME_LAG
from monta_megatron.tools.bench.candidates import (
    Batch,
    Bench,
    BenchCandidate,
    build_experts,
    initialize_groups,
    layer_config,
    make_batch,
    no_experts,
    run_candidate,
    with_candidates,
)
from monta_megatron.tools.bench.report import MIN_FOR_PERCENTILES, MismatchError, Report, Row
from monta_megatron.tools.bench.settings import Settings
from monta_megatron.tools.record import record
from monta_megatron.tools.stock_collectives import sent_by

# Exchanges of an iteration; a training has more, and layers besides.
MICRO_BATCHES = 4
# Settings that are fields of a row.
ROW_SETTINGS = ("tokens", "top_k", "routing", "tp", "ep", "etp")
# Timed runs of a repeat on GPUs.
IN_A_ROW = 10
# Columns after which the signs of `signed_experts` repeat: those of 1,024 parts differ.
SIGN_BITS = 10


def measure_point(
    settings: Settings,
    cluster: Cluster | None,
    progress: Progress,
    build: Callable[[Bench], Bench] = with_candidates,
) -> Report:
    """Check every candidate of a point and time them side by side; all ranks call this together.

    Args:
        settings: settings of the point.
        cluster: costs for predictions, or None.
        progress: progress display of this rank.
        build: function that adds the dispatchers.

    Raises:
        UserError: a setting cannot run here.
        MismatchError: a candidate gives other results than stock alltoall; nothing was timed.
    """
    # Step 1: build, and tune.
    bench = build(prepare(settings, cluster))
    busy = find_busy_machines()
    progress.note(busy)
    if settings.tune_steps:
        _tune(bench, progress)
    # Step 2: check.
    progress.phase(f"checks of {counted(len(bench.candidates), 'dispatcher')}", 0)
    if wrong := differences_from_stock(bench.candidates, bench.layout):
        raise MismatchError("\n".join(wrong))
    # Step 3: time, and record.
    scopes: dict[str, Experts] = {"exchange": no_experts}
    if settings.layer:
        scopes["layer"] = build_experts(settings)
    rows = [
        row
        for scope, experts in scopes.items()
        for phase in settings.phase
        for row in _time(bench, scope, experts, phase, progress)
    ]
    # Needed on the first rank alone, which asks git.
    meta = {**provenance(bench), "busy": list(busy)} if dist.get_rank() == 0 else {}
    if settings.trace is not None:
        record(bench, meta, Path(settings.trace))
    return Report(meta=meta, rows=rows)


def prepare(settings: Settings, cluster: Cluster | None) -> Bench:
    """Megatron's groups, the exchange on them and the data; without dispatchers."""
    initialize_groups(settings)
    world, group = dist.group.WORLD, get_default_pg_collection().tp_ep
    assert world is not None, "the launch is joined"
    nodes = find_nodes(world, settings.ranks_per_node)
    layout = Layout(
        ep=settings.ep,
        etp=settings.etp,
        num_local_experts=settings.experts // settings.ep,
        rank=dist.get_rank(group),
        nodes=tuple(nodes[rank] for rank in dist.get_process_group_ranks(group)),
    )
    if cluster is not None:
        cluster.check_has(layout.num_nodes)
    return Bench(
        settings=settings,
        cluster=cluster,
        emulated=EmulatedCluster.from_environment(),
        nodes=nodes,
        layout=layout,
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
        "fused_permutation": layer_config(bench.settings).moe_permute_fusion,
    }


def _tune(bench: Bench, progress: Progress) -> None:
    """Open the tuning window of `auto`, as in a training."""
    (auto,) = (candidate for candidate in bench.candidates if candidate.requested is None)
    chooser, optimizer = auto.dispatcher.chooser, torch.optim.SGD([torch.zeros(1)])
    assert isinstance(chooser, AutoChooser), "it chooses"
    num_iterations = bench.settings.tune_steps + TIME_LAG
    progress.phase(f"tuning, {counted(num_iterations, 'iteration')}", num_iterations)
    for _ in range(num_iterations):
        for _ in range(MICRO_BATCHES):
            run_candidate(auto, no_experts)
        chooser.enter_step(optimizer)
        progress.step()


def _time(
    bench: Bench, scope: str, experts: Experts, phase: Phase, progress: Progress
) -> list[Row]:
    """Time all candidates in one phase; returns one row per candidate."""
    settings, candidates = bench.settings, bench.candidates
    progress.phase(f"{scope}, {phase}, {counted(settings.repeats, 'repeat')}", settings.repeats)
    sent_bytes = [run_counted(candidate, experts, phase, bench.nodes) for candidate in candidates]
    runs = [partial(run_candidate, candidate, experts, phase) for candidate in candidates]
    times_ms = time_interleaved(runs, settings.repeats, progress.step)
    shortest_ms, stock_ms = limit_ms(bench, phase), float(np.median(times_ms[:, 0]))
    rows = []
    for candidate, ms, (inter_bytes, intra_bytes) in zip(
        candidates, times_ms.T, sent_bytes, strict=True
    ):
        min_ms, p10_ms, median_ms, p90_ms, max_ms = np.percentile(ms, [0, 10, 50, 90, 100]).tolist()
        has_percentiles = len(ms) >= MIN_FOR_PERCENTILES
        predicted_ms = _predicted_ms(bench, candidate, phase) if scope == "exchange" else None
        rows.append(
            Row(
                **{name: getattr(settings, name) for name in ROW_SETTINGS},
                dispatcher=candidate.kind,
                chain=candidate.choice.chain,
                num_chunks=candidate.choice.num_chunks,
                scope=scope,
                phase=phase,
                inter_mbit=bench.emulated.inter_mbit if bench.emulated else None,
                median_ms=median_ms,
                min_ms=min_ms,
                max_ms=max_ms,
                p10_ms=p10_ms if has_percentiles else None,
                p90_ms=p90_ms if has_percentiles else None,
                inter_bytes=inter_bytes,
                intra_bytes=intra_bytes,
                pct_of_limit=shortest_ms and 100 * shortest_ms / median_ms,
                ratio_to_alltoall=stock_ms / median_ms,
                predicted_ms=predicted_ms,
                chosen=candidate.requested is None,
            )
        )
    return rows


def _predicted_ms(bench: Bench, candidate: BenchCandidate, phase: Phase) -> float | None:
    """Predicted time of a candidate; None for stock's, or without a cluster file."""
    if bench.cluster is None or candidate.kind == "megatron":
        return None
    dispatcher, choice = candidate.dispatcher, candidate.choice
    shape = shape_of(dispatcher.config, dispatcher.setup.layout)
    shape = replace(shape, tokens_per_rank=bench.settings.tokens)
    chain = CHAINS[choice.chain]
    return price(shape, bench.cluster, chain, choice.num_chunks, phase).total_us / 1e3


def differences_from_stock(candidates: Sequence[BenchCandidate], layout: Layout) -> list[str]:
    """One line for each result that is not equal to the first candidate's, the same on every rank.

    Rows are -1, 0 or 1, probabilities 1 or 2, and experts multiply by 1 or -1: every sum is a small
    integer, exact in any order and any dtype (see `settings.MAX_TERMS`), so all results must be
    equal to the last bit.
    """
    experts = signed_experts(layout)
    lines_here = []
    expected: dict[str, torch.Tensor] = {}
    for candidate in candidates:
        integers = replace(candidate, batch=as_integers(candidate.batch))
        results = run_candidate(integers, experts)
        expected = expected or results
        # Stock's dispatchers may have other rows at the experts.
        names = [name for name in results if candidate.kind == "monta" or "experts" not in name]
        lines_here += [
            f"{candidate.kind} {candidate.choice.name}: {name} differ from stock's"
            for name in names
            if not torch.equal(results[name][candidate.tokens_here], expected[name])
        ]
    ranks_by_line: dict[str, list[int]] = {}
    for rank, lines in enumerate(gather_objects(lines_here)):
        for line in lines:
            ranks_by_line.setdefault(line, []).append(rank)
    return [f"{line} (rank {', '.join(map(str, ranks))})" for line, ranks in ranks_by_line.items()]


def as_integers(batch: Batch) -> Batch:
    """A batch of the same routing, of small integers."""
    shares = batch.probs * batch.routing_map.sum(dim=1, keepdim=True)
    return replace(
        batch,
        hidden=batch.hidden.round().sign(),
        probs=batch.routing_map * (1.0 + (shares > 1)),
        output_gradient=batch.output_gradient.round().sign(),
    )


def signed_experts(layout: Layout) -> Experts:
    """Experts that scale a row by its probability, and each column by a sign of their own.

    Each rank's part of an expert has the signs of its number's bits, so a row at the wrong expert,
    or with another's probability, changes the output.
    """

    def compute(
        rows: torch.Tensor, tokens_per_expert: torch.Tensor, row_probs: torch.Tensor
    ) -> torch.Tensor:
        experts = torch.arange(layout.num_local_experts) + layout.first_expert
        parts = experts * layout.etp + layout.rank % layout.etp
        # [L, 1] -> [L, H]
        bits = parts[:, None] >> (torch.arange(rows.shape[1]) % SIGN_BITS) & 1
        # [L, H] -> [N, H]
        signs = (1 - 2 * bits).repeat_interleave(torch.as_tensor(tokens_per_expert).cpu(), dim=0)
        return (rows * row_probs[:, None] * signs.to(rows.device)).to(rows.dtype)

    return compute


def run_counted(
    candidate: BenchCandidate, experts: Experts, phase: Phase, nodes: Sequence[int]
) -> tuple[int, int]:
    """Run a candidate once, as a warm-up, and count the payload that all ranks send together.

    Args:
        candidate, experts, phase: see `run_candidate`.
        nodes: node of every rank of the launch.

    Returns:
        Bytes between nodes, and between the ranks of a node.
    """
    run = partial(run_candidate, candidate, experts, phase)
    if candidate.kind == "megatron":
        sent_bytes: Mapping[Any, int] = sent_by(run, nodes)
    else:
        monitor = candidate.dispatcher.monitor
        monitor.bytes_sent.clear()
        run()
        sent_bytes = monitor.bytes_by_resource()
    totals = torch.tensor([sent_bytes["inter"], sent_bytes["intra"]])
    dist.all_reduce(totals)
    inter_bytes, intra_bytes = totals.tolist()
    return inter_bytes, intra_bytes


def time_interleaved(
    runs: Sequence[Callable[[], object]], repeats: int, on_repeat: Callable[[], None]
) -> NDArray[np.float64]:
    """[N, runs] times of single runs in ms, each that of its slowest rank.

    Args:
        runs: one function per candidate, called by all ranks together, in an order of its own in
            each repeat.
        repeats: number of repeats; N equals it on CPU ranks, and is 10 times as large on GPUs.
        on_repeat: called after each repeat.
    """
    in_a_row, time_runs = (1, _time_one) if gpu_name() is None else (IN_A_ROW, _time_in_a_row)
    times_ms = torch.zeros(repeats, in_a_row, len(runs), dtype=torch.float64)
    orders = np.random.default_rng(0)
    # No garbage is collected inside a run, and none of the objects that exist already.
    gc.freeze()
    gc.disable()
    try:
        for repeat in range(repeats):
            gc.collect()
            # The same on all ranks; a rotation would give each run the same predecessor throughout.
            for position in orders.permutation(len(runs)):
                wait_for_all()
                times_ms[repeat, :, position] = torch.tensor(time_runs(runs[position]))
            on_repeat()
    finally:
        gc.enable()
        gc.unfreeze()
    dist.all_reduce(times_ms, op=dist.ReduceOp.MAX)
    return times_ms.flatten(end_dim=1).numpy()


def _time_one(run: Callable[[], object]) -> list[float]:
    """A run by the host's clock."""
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return [(time.perf_counter() - start) * 1e3]


def _time_in_a_row(run: Callable[[], object]) -> list[float]:
    """Runs by the GPU's clock, behind one that is not timed.

    Ranks do not leave the barrier at once, which counts where an exchange takes a millisecond: that
    run waits for the last of them.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(IN_A_ROW + 1)]
    for event in events:
        run()
        event.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in pairwise(events)]


def limit_ms(bench: Bench, phase: Phase) -> float | None:
    """The shortest time that the links between nodes allow; None if unknown or nothing crosses.

    The busiest direction of the busiest node decides. Every pass sends the same rows once, in
    alternating directions, so that node stays the busiest. A node has the rate of its emulated
    interface, or that of the cluster file for each of its ranks.
    """
    if bench.emulated is not None:
        # 1e6 bit/s are 1e3 bits per ms.
        bytes_per_ms = bench.emulated.inter_mbit * 1e3 / 8
    elif bench.cluster is not None and "inter" in bench.cluster.resources:
        rank_rate, num_ranks = bench.cluster.rate_of("inter"), max(Counter(bench.nodes).values())
        bytes_per_ms = rank_rate.gbytes_per_s * 1e6 * num_ranks
    else:
        return None
    crossing = rows_that_cross(bench.layout, bench.batch.routing_map.cpu(), len(set(bench.nodes)))
    dist.all_reduce(crossing)
    row_bytes = len(PASSES[phase]) * bench.batch.hidden[0].nbytes
    return int(crossing.max()) * row_bytes / bytes_per_ms or None


def rows_that_cross(layout: Layout, map_TE: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """[2, nodes] tokens of this rank that leave each node, and that arrive there.

    A node needs a token, once, if one of its ranks holds an expert, or a part of one, of the token.
    """
    crossing = torch.zeros(2, num_nodes, dtype=torch.int64)
    node_by_part = torch.tensor(layout.nodes).view(layout.ep, layout.etp)
    # [T, E] -> [T, EP] tokens with an expert of that EP rank
    wanted = map_TE.view(len(map_TE), layout.ep, -1).any(dim=2)
    here = layout.nodes[layout.rank]
    for node in set(layout.nodes) - {here}:
        num_rows = wanted[:, (node_by_part == node).any(dim=1)].any(dim=1).sum()
        crossing[0, here] += num_rows
        crossing[1, node] += num_rows
    return crossing
