"""`monta calibrate` on one rank: its groups, the measurement, the cluster and the report."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from monta_megatron.calibration.fit import fit_contention, fit_curves, fit_host_costs
from monta_megatron.calibration.operations import starter_of
from monta_megatron.calibration.tasks import HostWork, choose_pairs, node_parts, points_of
from monta_megatron.calibration.timer import Timer
from monta_megatron.chains.program import Resource
from monta_megatron.common import strict_yaml
from monta_megatron.common.nodes import BOOT_ID
from monta_megatron.common.rules import require
from monta_megatron.common.tables import Progress, table
from monta_megatron.common.units import counted
from monta_megatron.exchange.collectives import (
    PeerGroup,
    find_nodes,
    gather_objects,
    nccl_settings,
    new_local_group,
)
from monta_megatron.exchange.kernel_choice import agreed_kernels
from monta_megatron.exchange.streams import gpu_name
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import RESOURCE_NAMES, Curve

# Those of a size, as nccl-tests heads them.
COLUMNS = ("operation", "link", ">ranks", "CTAs", ">size (B)", ">time (us)", ">algbw (GB/s)")
COLUMNS += (">busbw (GB/s)",)


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """Settings of a calibration.

    Attributes:
        begin_s: when the command began, by `time.perf_counter`.
        budget_s: for how long it may run.
        name: name of the cluster; None for its hardware and shape.
        hardware: what the ranks run on; None for the name of the GPU.
        ranks_per_node: ranks joined by the node link; None where the launcher knows.
        nics_per_node: network interfaces of a node; None on a single node.
    """

    begin_s: float
    budget_s: float
    name: str | None = None
    hardware: str | None = None
    ranks_per_node: int | None = None
    nics_per_node: int | None = None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Result of `monta calibrate`.

    Attributes:
        cluster: the measured cluster.
        runs: the fewest runs of any operation.
        ctas: by resource and ranks, the CTAs of each communicator; empty without NCCL.
    """

    cluster: Cluster
    runs: int
    ctas: Mapping[tuple[Resource, int], str]

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        ctas = {f"{resource} {size}": text for (resource, size), text in self.ctas.items()}
        return {"runs": self.runs, "ctas": ctas, "cluster": strict_yaml.plain(self.cluster)}

    def text(self) -> str:
        """Every size by the columns of nccl-tests, host costs and contention."""
        cluster, host = self.cluster, self.cluster.host
        rows = [
            (
                curve.operation,
                RESOURCE_NAMES[curve.resource],
                curve.group_size,
                self.ctas.get((curve.resource, curve.group_size)),
                *row,
            )
            for curve in cluster.curves
            for row in nccl_rows(curve, cluster.num_nodes)
        ]
        lines = [
            table(COLUMNS, rows, cluster.name),
            f"host: {host.collective_us:.1f} us to start a collective and "
            f"{host.collective_peer_us:.2f} for each peer, {host.operation_us:.1f} to start an",
            f"operation, {host.stage_us:.1f} for a stage, {host.pass_us:.1f} for a pass, "
            f"{host.counts_us:.1f} to read counts and bind a chain",
        ]
        for entry in cluster.contention:
            for first, second in (entry.pair, entry.pair[::-1]):
                names = f"{RESOURCE_NAMES[first]} beside {RESOURCE_NAMES[second]}"
                lines.append(f"{names}: {cluster.factor(first, second):.2f} times as long")
        return "\n".join([*lines, f"medians of {counted(self.runs, 'run')} or more"])


def nccl_rows(curve: Curve, num_nodes: int) -> list[Sequence[object]]:
    """Size, time, algbw and busbw of a curve's points, as nccl-tests counts them.

    The size of a collective is what a rank has for, or gets from, all ranks, itself among them; a
    curve counts what it sends through the link. busbw = algbw * (ranks - 1) / ranks.
    """
    ranks = curve.group_size
    # Ranks to which the resource does not lead, the rank itself among them.
    near = ranks // num_nodes if curve.resource == "inter" else 1
    rows: list[Sequence[object]] = []
    for num_bytes, us in zip(curve.sizes_bytes, curve.times_us, strict=True):
        size = num_bytes if ranks == 1 else num_bytes * ranks // (ranks - near)
        algbw = size / us / 1e3
        busbw = None if ranks == 1 else f"{algbw * (ranks - 1) / ranks:.2f}"
        rows.append((size, f"{us:.1f}", f"{algbw:.2f}", busbw))
    return rows


def calibrate(
    settings: CalibrationSettings, device: torch.device, progress: Progress
) -> Calibration:
    """Measure; all ranks of a launch call this, and get the same result.

    Raises:
        ValueError: the cluster cannot be calibrated.
    """
    world, on_cpu = dist.group.WORLD, device.type == "cpu"
    assert world is not None, "the launch has been joined"
    # Step 1: nodes and groups.
    nodes = find_nodes(world, settings.ranks_per_node)
    num_nodes, ranks_per_node = len(set(nodes)), nodes.count(nodes[0])
    in_order = tuple(node for node in range(num_nodes) for _ in range(ranks_per_node))
    require(nodes == in_order, "ranks", nodes, "be as many on every node, node by node")
    require(len(nodes) > 1, "ranks", 1, "be at least 2")
    nics = settings.nics_per_node or (None if num_nodes > 1 else ranks_per_node)
    require(nics is not None, "--nics-per-node", nics, "be the network interfaces of a node")
    groups = make_groups(nodes)
    fused = agreed_kernels("auto", device.type, world)[0] == "fused"

    # Step 2: sizes, as far as the budget allows.
    points = points_of(num_nodes, ranks_per_node, device.type, fused)
    timer = Timer(
        group=world,
        device=device,
        starter=starter_of(groups, nodes, device, fused),
        ranks_per_core=find_ranks_per_core(world) if on_cpu else 1.0,
        begin_s=settings.begin_s,
        budget_s=settings.budget_s,
    )
    progress.phase(f"{counted(len(points), 'size')} of operations", len(points))
    points = timer.run_sizes(points, progress)

    # Step 3: host work, pairs, and all sizes again for as long as the budget lasts.
    pairs = choose_pairs({point: timer.samples[point][0].us for point in points})
    progress.phase("more runs, by seconds", round(settings.budget_s))
    runs = timer.run_rounds([*HostWork, *chain.from_iterable(pairs), *points], progress)

    # Step 4: the cluster.
    hardware = settings.hardware or gpu_name() or "CPU ranks"
    day = datetime.now(timezone.utc).date().isoformat()
    source = f"monta calibrate, {hardware}, torch {torch.__version__}, {day}"
    memory = None if on_cpu else torch.cuda.get_device_properties(device).total_memory / 1e9
    cluster = Cluster(
        name=settings.name or f"{hardware}, {num_nodes} x {ranks_per_node}",
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        nics_per_node=nics,
        source=source,
        memory_gb_per_rank=memory,
        policy="host" if on_cpu else "fused" if fused else "streams",
        host=fit_host_costs(timer.samples, on_cpu, source),
        curves=fit_curves(timer.samples, on_cpu),
        contention=fit_contention(pairs, timer.excesses),
        calibrated_node=(ranks_per_node, nics),
    )
    ctas = {key: text for key, group in groups.items() if (text := ctas_of(group))}
    return Calibration(cluster=cluster, runs=runs, ctas=ctas)


def make_groups(nodes: tuple[int, ...]) -> dict[tuple[Resource, int], PeerGroup]:
    """(resource, ranks) -> the group of this rank, made by all ranks in the same order.

    Args:
        nodes: node of every rank, in order.
    """
    rank, on_node = dist.get_rank(), nodes.count(nodes[0])
    node, position = divmod(rank, on_node)
    groups: dict[tuple[Resource, int], PeerGroup] = {}
    for part in node_parts(on_node):
        stride = on_node // part
        # inter: the same positions on every node, `stride` apart; intra: neighbours on this node.
        members: dict[Resource, list[int]] = {
            "inter": [r for r in range(len(nodes)) if r % on_node % stride == position % stride],
            "intra": [node * on_node + p for p in range(on_node) if p // part == position // part],
        }
        for resource, ranks in members.items():
            groups[resource, len(ranks)] = PeerGroup(
                name=f"{resource} {len(ranks)}",
                process_group=new_local_group(ranks, f"monta {resource} {part}", dist.group.WORLD),
                size=len(ranks),
                rank=ranks.index(rank),
                nodes=tuple(nodes[other] for other in ranks),
            )
    return groups


def ctas_of(group: PeerGroup) -> str | None:
    """The fewest and the most CTAs that a communicator may use; None without NCCL."""
    settings = nccl_settings(group.process_group)
    ends = (
        os.environ.get(f"NCCL_{end}_CTAS") or settings.get(f"{end.lower()}_ctas") or "default"
        for end in ("MIN", "MAX")
    )
    return " to ".join(map(str, ends)) if settings else None


def find_ranks_per_core(world: dist.ProcessGroup) -> float:
    """CPU ranks per core that they may use, over all emulated nodes of a machine."""
    by_machine: dict[str, list[set[int]]] = {}
    for name, cores in gather_objects((BOOT_ID.read_text(), os.sched_getaffinity(0)), world):
        by_machine.setdefault(name, []).append(cores)
    return max(1.0, *(len(ranks) / len(set().union(*ranks)) for ranks in by_machine.values()))
