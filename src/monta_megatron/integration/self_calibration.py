"""Calibrates the exchange of a training that has no cluster file, when its dispatcher is built.

The ranks of the exchange measure on their own groups, as all exchanges of a job do at about the
same time, and nobody waits for another exchange: stages without MoE layers never get here. The
result is kept for the next start, in one file that the exchange's first rank reads and writes:

    SAVE/monta/cluster_ep8_etp1_rank_0.yaml              SAVE: Megatron's --save, the run's folder
    CACHE/monta_megatron/HARDWARE_2x4/cluster_....yaml   without it, in the user's cache

It is a cluster file like any other, and its source names the measured hardware.

Notation: T = tokens, E = experts, H = hidden size.
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils

from monta_megatron.chains.calibration_tasks import (
    HOST_WORK,
    NUM_EXPERTS,
    TOPK,
    Point,
    Sample,
    Task,
)
from monta_megatron.chains.layout import Layout
from monta_megatron.chains.program import Resource
from monta_megatron.common import __version__
from monta_megatron.common.files import cache_folder, make_folder, write_whole
from monta_megatron.common.units import counted, size_text
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.exchange.calibration.memory_operations import routing_map, rows_of
from monta_megatron.exchange.calibration.operations import starts_of
from monta_megatron.exchange.calibration.timer import RUN_US, Timer
from monta_megatron.exchange.collectives import gather_objects, peer_groups
from monta_megatron.exchange.kernel_choice import are_all_fused
from monta_megatron.exchange.streams import device_of_ranks, gpu_name
from monta_megatron.integration.options import Options
from monta_megatron.integration.ranks import Report
from monta_megatron.integration.strategies import KNOWS_ORDER
from monta_megatron.planner.calibration.fitting import Machine, make_cluster
from monta_megatron.planner.calibration.points import (
    PAIR_US,
    all_points,
    choose_pairs,
    series_of_exchange,
)
from monta_megatron.planner.chain_policy import chains_for
from monta_megatron.planner.chain_price import RESOURCE_NAMES
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import dump_measured, load_cluster, uncalibrated


def hardware_name() -> str:
    """Name of the GPU, or of the CPU ranks in its place."""
    emulated = EmulatedCluster.from_environment()
    if emulated is not None:
        return f"emulated at {emulated.inter_mbit:g} Mbit/s"
    return gpu_name() or "CPU ranks"


def find_nics_per_node(ranks_per_node: int) -> int:
    """Network interfaces of a node where they are known, else one for each rank."""
    emulated = EmulatedCluster.from_environment()
    return ranks_per_node if emulated is None else emulated.nics_per_node


def find_ranks_per_core(group: dist.ProcessGroup) -> float:
    """CPU ranks of a group per core that they may use, over all emulated nodes of a machine."""
    if gpu_name() is not None:
        return 1.0
    machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    by_machine: dict[str, list[set[int]]] = {}
    for name, cores in gather_objects((machine, os.sched_getaffinity(0)), group):
        by_machine.setdefault(name, []).append(cores)
    return max(1.0, *(len(ranks) / len(set().union(*ranks)) for ranks in by_machine.values()))


def counts_to_host_us(device: torch.device) -> float:
    """The time of a copy of some integers to the host, with the wait for it."""
    if device.type == "cpu":
        return 0.0
    num_runs = 20
    counts = torch.zeros(1024, dtype=torch.int64, device=device)
    counts.cpu()
    begin_s = time.perf_counter()
    for _ in range(num_runs):
        counts.cpu()
    return (time.perf_counter() - begin_s) * 1e6 / num_runs


def permute(point: Point, device: torch.device) -> Callable[[], object]:
    """Copies each token for each of its experts: [T, H] by [T, E] bool -> [T * topk, H]."""
    tokens, on_device = _tokens(point, device)
    return lambda: _permute(tokens, on_device)


def unpermute(point: Point, device: torch.device) -> Callable[[], object]:
    """Sums the copies of every token: the way back to [T, H]."""
    tokens, on_device = _tokens(point, device)
    rows, _, indices, *more = _permute(tokens, on_device)
    given: dict[str, Any] = {}
    if _is_batch_invariant_here():
        # Of this map it takes the width alone, which has to be a multiple of the EP ranks.
        wide = on_device.new_empty(0, NUM_EXPERTS * dist.get_world_size())
        given = {"routing_map": wide, "batch_invariant_inverse_map": more[0]}
    return lambda: moe_utils.unpermute(rows, indices, tokens.shape, **given)


PERMUTATION = {"permute": permute, "unpermute": unpermute}


def _tokens(point: Point, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    on_device = routing_map(point.num_rows, NUM_EXPERTS).to(device)
    return rows_of(point.num_rows, device), on_device


def _permute(tokens: torch.Tensor, on_device: torch.Tensor) -> tuple[torch.Tensor, ...]:
    asked = {"return_batch_invariant_inverse_map": True} if _is_batch_invariant_here() else {}
    permuted: tuple[torch.Tensor, ...] = moe_utils.permute(
        tokens, on_device, num_out_tokens=len(tokens) * TOPK, **asked
    )
    return permuted


def _is_batch_invariant_here() -> bool:
    """Whether the process is in the mode, by which `unpermute` goes."""
    return KNOWS_ORDER and moe_utils.is_batch_invariant_mode_enabled()


# Sizes in steps of 4x from 5 KiB, in memory from 20 KiB: up to 80 MiB on a GPU, whose memory is to
# be given back to a training.
NUM_SIZES: dict[str, dict[Resource, int]] = {
    "cpu": {"inter": 6, "intra": 7, "memory": 7},
    "cuda": {"inter": 8, "intra": 8, "memory": 7},
}
# The largest size is at most this part of a rank's free memory: all buffers together hold less.
PART_OF_FREE_MEMORY = 1 / 64
# Part of the time for points; pairs of them and the host's work take the rest.
PART_FOR_POINTS = 0.7
PAIR_PART = 1 / 500
# The largest messages take so many times as long as the smallest, if their bytes are what counts.
LEAST_GROWTH = 2
# Links and drivers change, and whoever shares the network does.
MOST_DAYS = 30
MEASURED = "; measured "

# Costs found for an exchange of this process, for its other layers: by default group, ranks, ETP
# and nodes.
_found: dict[
    tuple[dist.ProcessGroup | None, tuple[int, ...], int, tuple[int, ...]], Cluster | None
] = {}


def self_calibrated(
    options: Options, layout: Layout, groups: dict[str, dist.ProcessGroup], report: Report
) -> Cluster | None:
    """The costs of an exchange, kept from an earlier start or measured now.

    Args:
        options: of the dispatcher, alike on all ranks.
        layout: the exchange, over more than one node.
        groups: Megatron's "ep", "etp" and "tp_ep"; all ranks of the last one call this.
        report: prints a message.

    Returns:
        The costs, the same on all ranks; None where they cannot be measured, which is said.
    """
    group = groups["tp_ep"]
    ranks = dist.get_process_group_ranks(group)
    key = dist.group.WORLD, tuple(ranks), layout.etp, layout.nodes
    if key not in _found:
        _found[key] = _find(options, layout, groups, _path(layout, ranks[0]), report)
    return _found[key]


def _find(
    options: Options,
    layout: Layout,
    groups: dict[str, dist.ProcessGroup],
    path: Path,
    report: Report,
) -> Cluster | None:
    group = groups["tp_ep"]
    fused = are_all_fused(options.kernels, device_of_ranks().type, group)
    identity = _identity(layout, fused)
    is_first = layout.rank == 0
    # Step 1: what an earlier start has left, as the first rank sees it.
    kept = gather_objects(_read(path, identity) if is_first else None, group)[0]
    if isinstance(kept, Cluster):
        report(f"calibrated before: {path}, {kept.source.rpartition(MEASURED)[2]}")
        return kept
    if kept is not None:
        report(f"{path}: not taken: {kept}; calibrates again")

    # Step 2: measure.
    try:
        # By the layout alone, so all ranks refuse or none does.
        series_of_exchange(chains_for(layout), layout)
    except ValueError as error:
        report(f"not calibrated: {error}")
        return None
    # A model may be built without memory or gradients: Megatron's are made on "meta" first.
    with torch.device("cpu"), torch.enable_grad():
        made, said = _measure(options, layout, groups, identity, fused)
    cluster = gather_objects(made if is_first else None, group)[0]
    assert cluster is not None, "the first rank has sent its own"
    unknown = _without_rate(cluster)
    if unknown:
        report(
            f"not calibrated: {options.calibrate_seconds:g} s told no rate between nodes of "
            f"{unknown}; give --moe-monta-calibrate-seconds more"
        )
        return None

    # Step 3: keep it.
    if is_first:
        try:
            make_folder(path.parent, "moe_monta_calibrate_seconds")
            write_whole(path, dump_measured(cluster))
            said += f"; kept in {path}"
        except ValueError as error:
            said += f"; not kept for the next start: {error}"
    report(said)
    return cluster


def _measure(
    options: Options,
    layout: Layout,
    groups: dict[str, dist.ProcessGroup],
    identity: str,
    fused: bool,
) -> tuple[Cluster, str]:
    """Cluster and message that this rank makes of all ranks' measurements."""
    begin_s, seconds = time.perf_counter(), options.calibrate_seconds
    device, group = device_of_ranks(), groups["tp_ep"]
    on_cpu = device.type == "cpu"
    reserved_bytes, allocated_bytes = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()

    # Step 1: the points of the groups in which chains could run here.
    chains = chains_for(layout)
    peers = peer_groups(chains, layout, groups, options.ctas)
    series = series_of_exchange(chains, layout)
    on_groups = {(each.resource, each.group_size): peers[name] for each, name in series.items()}
    free_bytes = sys.maxsize if on_cpu else torch.cuda.mem_get_info()[0]
    most_bytes = min(gather_objects(free_bytes, group)) * PART_OF_FREE_MEMORY
    every_point = all_points(list(series), NUM_SIZES[device.type], fused)
    points = [point for point in every_point if point.num_bytes <= most_bytes]

    # Step 2: as many of their sizes as there is time for, then rounds over these. Other operations
    # run between two runs of one, and leave its buffers cold.
    start_of = starts_of(on_groups, layout.nodes, device, 0, PERMUTATION, fused)
    timer = Timer(group, device, start_of, find_ranks_per_core(group), begin_s)
    times_us = timer.first_runs(points, {}, lambda *_: None, seconds * PART_FOR_POINTS)
    pairs = choose_pairs(times_us, min(PAIR_US, seconds * 1e6 * PAIR_PART))
    together = [task for contenders in pairs for task in contenders.tasks]
    more: list[tuple[Task, float]] = [(task, RUN_US) for task in (*together, *HOST_WORK)]
    samples: list[Sample] = []
    timer.rounds([*times_us.items(), *more], Counter(), seconds, samples.append)

    # Step 3: give the memory back, and only where some was taken.
    peak_bytes = max(torch.cuda.max_memory_allocated() - allocated_bytes, 0)
    del start_of, timer
    if not on_cpu and torch.cuda.memory_reserved() > reserved_bytes:
        torch.cuda.empty_cache()

    # Step 4: the cluster. A resource without points, as where nodes are of one rank, is a preset's.
    machine = Machine(
        name=f"{hardware_name()}, {layout.num_nodes} x {layout.ranks_per_node}, self-calibrated",
        num_nodes=layout.num_nodes,
        ranks_per_node=layout.ranks_per_node,
        nics_per_node=min(find_nics_per_node(layout.ranks_per_node), layout.ranks_per_node),
        memory_gb_per_rank=None,
        on_cpu=on_cpu,
        counts_to_host_us=counts_to_host_us(device),
        source=f"{identity}{MEASURED}{_today()}",
        fused_kernels=fused,
        ctas=options.priced_ctas(),
    )
    most: dict[str, str] = {}
    for point in sorted(times_us, key=lambda point: point.num_bytes):
        most[point.resource] = size_text(point.num_bytes)
    links = tuple(x for x in uncalibrated(layout, gpu_name()).links if x.resource not in most)
    cluster = make_cluster(machine, list(times_us), pairs, samples, links)
    rounds = min(Counter(sample.task for sample in samples).values())
    return cluster, (
        f"calibrated for want of a cluster file, in {time.perf_counter() - begin_s:.1f} s: "
        f"{counted(len(cluster.curves), 'curve')} in {counted(rounds, 'round')}, "
        f"{', '.join(f'{name} to {most[r]}' for r, name in RESOURCE_NAMES.items() if r in most)} "
        "per rank; "
        f"{counted(len(every_point) - len(times_us), 'larger size')} left out, extrapolated; "
        f"held up to {size_text(peak_bytes)}, given back"
    )


def _without_rate(cluster: Cluster) -> str:
    """The collectives between nodes of which only starts were measured, whatever their bytes.

    Their time for more bytes would be a guess, by which a chain may seem ten times too fast.
    """
    return ", ".join(
        f"{curve.operation} in {counted(curve.group_size, 'rank')}"
        for curve in cluster.curves
        if curve.resource == "inter" and curve.times_us[-1] < LEAST_GROWTH * curve.times_us[0]
    )


def _today() -> date:
    return datetime.now(timezone.utc).date()


def _identity(layout: Layout, fused: bool) -> str:
    """Measured hardware and versions: costs of others are not taken."""
    nccl, kernels = "Gloo", "Triton kernels, " * fused
    if gpu_name() is not None:
        nccl = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return (
        f"{hardware_name()}, {layout.num_nodes} x {layout.ranks_per_node} ranks, EP {layout.ep} x "
        f"ETP {layout.etp}, torch {torch.__version__}, {nccl}, {kernels}"
        f"monta-megatron {__version__}"
    )


def _path(layout: Layout, first_rank: int) -> Path:
    """The file of an exchange."""
    # Nothing of Megatron's training is imported for it: without it there is no --save.
    training = sys.modules.get("megatron.training.global_vars")
    save = None
    with suppress(AssertionError):
        # It refuses where nothing was parsed.
        save = None if training is None else training.get_args().save
    if save:
        folder = Path(save) / "monta"
    else:
        hardware = re.sub(r"[^a-z0-9]+", "_", hardware_name().lower())
        folder = cache_folder() / f"{hardware}_{layout.num_nodes}x{layout.ranks_per_node}"
    return folder / f"cluster_ep{layout.ep}_etp{layout.etp}_rank_{first_rank}.yaml"


def _read(path: Path, identity: str) -> Cluster | str | None:
    """The costs in a file, or why they are not taken; None if there is no file."""
    if not path.exists():
        return None
    try:
        cluster = load_cluster(path)
        of_file, _, day = cluster.source.rpartition(MEASURED)
        age_days = (_today() - date.fromisoformat(day)).days
    except ValueError as error:
        return f"no costs of a calibration: {error}"
    if of_file != identity:
        return f"measured on {of_file}, and here is {identity}"
    if age_days > MOST_DAYS:
        return f"measured {age_days} days ago, at most {MOST_DAYS} are trusted"
    return cluster
