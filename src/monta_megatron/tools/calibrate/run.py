"""One calibration on one rank: groups, estimates, rounds, and the cluster they give."""

import platform
import time
from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from monta_megatron.calibration.fitting import Machine, make_cluster
from monta_megatron.calibration.operations import COLD_BYTES, starts_of
from monta_megatron.calibration.points import (
    NUM_SIZES,
    NodeShape,
    all_points,
    choose_pairs,
    series_of_cluster,
)
from monta_megatron.calibration.tasks import HOST_WORK, Point, Sample, Task
from monta_megatron.calibration.timer import MAX_ROUNDS, RUN_US, Timer
from monta_megatron.chains.program import Resource
from monta_megatron.common.nodes import node_here
from monta_megatron.common.tables import Progress
from monta_megatron.common.units import counted
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.exchange.collectives import (
    PeerGroup,
    find_nodes,
    gather_objects,
    new_local_group,
)
from monta_megatron.exchange.kernel_choice import agreed_kernels
from monta_megatron.tools.calibrate.interfaces import SYS, count_interfaces, nics_of_nodes
from monta_megatron.tools.calibrate.machine import (
    counts_to_host_us,
    find_ranks_per_core,
    hardware_name,
)
from monta_megatron.tools.calibrate.permutation import PERMUTATION
from monta_megatron.tools.calibrate.record import Record, partial_of
from monta_megatron.tools.calibrate.report import Calibration
from monta_megatron.tools.joined_ranks import join, on_first_rank


def make_groups(shape: NodeShape, nodes: tuple[int, ...]) -> dict[tuple[Resource, int], PeerGroup]:
    """(resource, ranks) -> the group of this rank, made by all ranks in the same order.

    Args:
        shape: nodes and ranks.
        nodes: node of every rank, in order.
    """
    rank, on_node = dist.get_rank(), shape.ranks_per_node
    node, position = divmod(rank, on_node)
    groups: dict[tuple[Resource, int], PeerGroup] = {}
    for part in shape.parts:
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


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """Settings of a calibration.

    Attributes:
        out: the cluster file; samples are kept beside it.
        budget_s: time for everything; one round is always run.
        name: name of the cluster, or None.
        ranks_per_node: ranks joined by the node link, or None where the launcher knows.
        nics_per_node: network interfaces of a node; None takes the emulated cluster's number, or
            the fastest that every node shows.
    """

    out: Path
    budget_s: float
    name: str | None
    ranks_per_node: int | None
    nics_per_node: int | None


def calibrate(settings: CalibrationSettings, local_rank: int, progress: Progress) -> Calibration:
    """Measure; every rank calls this, and every rank gets the result.

    Raises:
        ValueError: the cluster cannot be calibrated, or the record is of another one.
    """
    device = join(local_rank)
    begin_s = time.perf_counter()
    # Step 1: the machine.
    world = dist.group.WORLD
    assert world is not None, "it has been joined"
    nodes = find_nodes(world, settings.ranks_per_node)
    shape = shape_of(nodes)
    nics_per_node = settings.nics_per_node or _find_nics_per_node(nodes, world)
    hosts = gather_objects(node_here(), world)
    per_host = hosts.count(hosts[0])
    machine = replace(
        _machine(settings, shape, nics_per_node, device, world),
        ranks_per_host=per_host if per_host < shape.ranks_per_node else None,
    )
    fused = machine.fused_kernels
    points = all_points(series_of_cluster(shape), NUM_SIZES[device.type], fused)
    ranks_per_core = find_ranks_per_core(world)

    # Step 2: what an earlier calibration has left.
    identity = _identity(machine, ranks_per_core)
    record = on_first_rank(lambda: Record.open(partial_of(settings.out), identity))

    # Step 3: first runs, whose times also decide which points are paired.
    progress.phase(f"first runs of {counted(len(points), 'point')}", len(points))
    # Where operations are mixed, others run between two runs of one and leave its buffers cold.
    cold_bytes = COLD_BYTES[device.type] if ranks_per_core == 1 else 0
    groups = make_groups(shape, nodes)
    start_of = starts_of(groups, nodes, device, cold_bytes, PERMUTATION, fused)
    timer = Timer(world, device, start_of, ranks_per_core, begin_s)

    def keep_first(point: Point, us: float | None) -> None:
        progress.step()
        if us is not None and dist.get_rank() == 0:
            record.add_first(point.name, us)

    times_us = timer.first_runs(points, record.first_us, keep_first)
    pairs = choose_pairs(times_us)

    # Step 4: rounds, each kept as it is measured.
    together = [task for contenders in pairs for task in contenders.tasks]
    # A pair takes long enough not to be repeated within a run; the host's work, too, is done only
    # once in a real exchange.
    tasks: list[tuple[Task, float]] = [
        *times_us.items(),
        *((task, RUN_US) for task in (*together, *HOST_WORK)),
    ]
    taken = Counter(sample.task for sample in record.samples)
    names = {task.name for task, _ in tasks}
    progress.phase("rounds", sum(max(MAX_ROUNDS - taken[name], 0) for name in names))

    def keep(sample: Sample) -> None:
        if sample.task in names:
            progress.step()
        if dist.get_rank() == 0:
            record.add(sample)
        else:
            record.samples.append(sample)

    timer.rounds(tasks, taken, settings.budget_s, keep)

    # Step 5: the cluster.
    counts = Counter(sample.task for sample in record.samples)
    return Calibration(
        cluster=make_cluster(machine, points, pairs, record.samples),
        rounds=min(counts.values()),
        kept_samples=taken.total(),
        out=settings.out,
    )


def shape_of(nodes: tuple[int, ...]) -> NodeShape:
    """The shape of nodes that have equally many ranks each, in order.

    Raises:
        ValueError: they have not, or there is only one rank.
    """
    shape = NodeShape(num_nodes=len(set(nodes)), ranks_per_node=nodes.count(nodes[0]))
    in_order = tuple(node for node in range(shape.num_nodes) for _ in range(shape.ranks_per_node))
    if nodes != in_order:
        raise ValueError(
            f"ranks: got nodes {list(nodes)}, must be the same number on every node, in order"
        )
    if shape.num_nodes == shape.ranks_per_node == 1:
        raise ValueError("ranks: got 1, must be at least 2, of one node or of several")
    return shape


def _find_nics_per_node(nodes: tuple[int, ...], world: dist.ProcessGroup) -> int:
    emulated = EmulatedCluster.from_environment()
    if emulated is not None:
        return emulated.nics_per_node
    host = Path("/proc/sys/kernel/random/boot_id").read_text()
    return nics_of_nodes(nodes, gather_objects((host, count_interfaces(SYS)), world))


def _machine(
    settings: CalibrationSettings,
    shape: NodeShape,
    nics_per_node: int,
    device: torch.device,
    world: dist.ProcessGroup,
) -> Machine:
    kind, on_cpu = hardware_name(), device.type == "cpu"
    day = datetime.now(timezone.utc).date().isoformat()
    return Machine(
        name=settings.name or f"{kind}, {shape.num_nodes} x {shape.ranks_per_node}",
        num_nodes=shape.num_nodes,
        ranks_per_node=shape.ranks_per_node,
        nics_per_node=nics_per_node,
        memory_gb_per_rank=None
        if on_cpu
        else torch.cuda.get_device_properties(device).total_memory / 1e9,
        on_cpu=on_cpu,
        counts_to_host_us=counts_to_host_us(device),
        source=f"monta calibrate, {kind}, torch {torch.__version__}, {day}",
        fused_kernels=agreed_kernels("auto", device.type, world)[0] == "fused",
    )


def _identity(machine: Machine, ranks_per_core: float) -> dict[str, Any]:
    """Values that two calibrations must share for their samples to be put together."""
    # Another job has other nodes; CPU ranks measure their machine itself.
    on_cpu = machine.on_cpu
    return {
        "name": machine.name,
        "num_nodes": machine.num_nodes,
        "ranks_per_node": machine.ranks_per_node,
        "nics_per_node": machine.nics_per_node,
        "ranks_per_core": ranks_per_core,
        "torch": torch.__version__,
        "fused_kernels": machine.fused_kernels,
        "machine": platform.node() if on_cpu else torch.cuda.get_device_name(),
    }
