"""`monta calibrate` on one rank: its groups, the measurement, the cluster and the report."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import torch
import torch.distributed as dist

from monta_megatron.calibration import tasks
from monta_megatron.calibration.fit import (
    fit_contention,
    fit_curves,
    fit_host_costs,
    medians_of,
)
from monta_megatron.calibration.judge import marks, refusals
from monta_megatron.calibration.timer import Timer, starter_of
from monta_megatron.chains.program import Policy, Resource
from monta_megatron.common import strict_yaml
from monta_megatron.common.errors import UserError
from monta_megatron.common.nodes import BOOT_ID
from monta_megatron.common.text import Progress, counted, table
from monta_megatron.core import GroupName, Layout
from monta_megatron.exchange import agreement, collectives
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.kernels import agreed_kernels
from monta_megatron.exchange.launch_order import communicators_overlap
from monta_megatron.exchange.streams import gpu_name
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.curves import RESOURCE_NAMES, Curve, Rate

COLUMNS = "operation", "link", ">ranks", ">size (B)", ">time (us)", ">algbw (GB/s)", ">busbw (GB/s)"
REMEDY = "calibrate where nothing else runs, or with more --budget-seconds; nothing was written"


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Result of `monta calibrate`.

    Attributes:
        cluster: the measured cluster.
        runs: smallest number of runs of any operation.
        ctas: communicator -> range of its CTAs; empty without NCCL.
        notes: machines that were busy before the start, and sizes with doubtful times.
    """

    cluster: Cluster
    runs: int
    ctas: dict[str, str]
    notes: tuple[str, ...] = ()

    def document(self) -> object:
        """The JSON document."""
        return strict_yaml.plain(self)

    def text(self) -> str:
        """Every size by the columns of nccl-tests, CTAs, contention and notes."""
        cluster = self.cluster
        rows = [row for curve in cluster.curves for row in nccl_rows(curve, cluster.num_nodes)]
        return "\n".join(
            [
                table(COLUMNS, rows, cluster.name),
                *(f"communicator of {name}: CTAs {text}" for name, text in self.ctas.items()),
                *(
                    f"contention: {first} is {factor:g} times as slow beside {second}"
                    for first, second, factor in cluster.contention
                ),
                f"fitted to medians of {counted(self.runs, 'run')} or more",
                *self.notes,
            ]
        )


def nccl_rows(curve: Curve, num_nodes: int) -> list[Sequence[object]]:
    """The points of a curve by `COLUMNS`, as nccl-tests counts them.

    The size of a collective is what a rank has for, or gets from, all ranks, itself among them; a
    curve counts what it sends through the link. busbw = algbw * (ranks - 1) / ranks.
    """
    link, ranks = RESOURCE_NAMES[curve.resource], curve.group_size
    # Ranks to which the resource does not lead, the rank itself among them.
    near = ranks // num_nodes if curve.resource == "inter" else 1
    rows: list[Sequence[object]] = []
    for num_bytes, us in zip(curve.sizes_bytes, curve.times_us, strict=True):
        size = num_bytes if ranks == 1 else num_bytes * ranks // (ranks - near)
        algbw = size / us / 1e3
        busbw = None if ranks == 1 else f"{algbw * (ranks - 1) / ranks:.2f}"
        rows.append((curve.operation, link, ranks, size, f"{us:.1f}", f"{algbw:.2f}", busbw))
    return rows


def calibrate(
    device: torch.device,
    budget_s: float,
    ranks_per_node: int | None,
    nics_per_node: int | None,
    hardware: str | None,
    nic_rate: Rate | None,
    progress: Progress,
    begin_s: float,
) -> Calibration:
    """Measure; all ranks of a launch call this, and get the same result.

    Args:
        device: device of this rank.
        budget_s: time budget of the calibration.
        ranks_per_node: ranks joined by the node link; None to take the launcher's.
        nics_per_node: network interfaces per node; required with several nodes.
        hardware: description of the hardware; None for the name of the GPU.
        nic_rate: rate of a network interface, where an emulator sets it.
        progress: progress display of the measurement.
        begin_s: start of the calibration, by `time.perf_counter`.

    Raises:
        UserError: the cluster cannot be calibrated, or curves are refused.
    """
    world, on_cpu = dist.group.WORLD, device.type == "cpu"
    assert world is not None, "the launch has been joined"
    # Step 1: nodes and groups, and others on the machines.
    nodes = agreement.find_nodes(world, ranks_per_node)
    layout = Layout(ep=len(nodes), etp=1, num_local_experts=1, rank=dist.get_rank(), nodes=nodes)
    if len(nodes) == 1 or layout.uneven_nodes() is not None:
        raise UserError(f"ranks: got nodes {list(nodes)}, must be several, evenly in order")
    if nics_per_node is None and layout.num_nodes > 1:
        raise UserError("--nics-per-node: not given, must be the network interfaces of a node")
    busy = agreement.find_busy_machines()
    progress.note(busy)
    groups = make_groups(layout)
    fused = agreed_kernels("auto", device.type, world)[0] == "fused"

    # Step 2: sizes, as far as the budget allows.
    points = tasks.points_of(layout, device.type)
    timer = Timer(
        group=world,
        device=device,
        starter=starter_of(groups, device, fused),
        ranks_per_core=find_ranks_per_core(world) if on_cpu else 1.0,
        begin_s=begin_s,
        budget_s=budget_s,
    )
    progress.phase(f"{counted(len(points), 'size')} of operations", len(points))
    points = timer.run_sizes(points, progress)

    # Step 3: host work, pairs, and all sizes again for as long as the budget lasts.
    pairs = tasks.choose_pairs({point: timer.samples[point][0].us for point in points})
    if not communicators_overlap():
        pairs = [pair for pair in pairs if pair.second.resource == "memory"]
    progress.phase("more runs, by seconds", round(budget_s))
    runs = timer.run_rounds([tasks.PASSES, tasks.CHUNKED_PASSES, *pairs, *points], progress)

    # Step 4: the curves, judged by their medians.
    hardware = hardware or gpu_name() or "CPU ranks"
    day = datetime.now(timezone.utc).date().isoformat()
    source = f"monta calibrate, {hardware}, torch {torch.__version__}, {day}"
    policy: Policy = "host" if on_cpu else "fused" if fused else "streams"
    host = fit_host_costs(timer.samples, policy, source)
    medians = medians_of(points, timer.samples, policy, host)
    num_nics = nics_per_node or layout.ranks_per_node
    nic_share = None if nic_rate is None else nic_rate.times(num_nics / layout.ranks_per_node)
    if refused := refusals(medians, nic_share, layout.ranks_per_node):
        raise UserError(
            "; ".join([f"{counted(len(refused), 'curve')} refused", *refused, *busy, REMEDY])
        )

    # Step 5: the cluster.
    memory = None if on_cpu else torch.cuda.get_device_properties(device).total_memory / 1e9
    cluster = Cluster(
        name=f"{hardware}, {layout.num_nodes} x {layout.ranks_per_node}",
        num_nodes=layout.num_nodes,
        ranks_per_node=layout.ranks_per_node,
        nics_per_node=num_nics,
        source=source,
        memory_gb_per_rank=memory,
        policy=policy,
        host=host,
        curves=fit_curves(medians),
        contention=fit_contention(timer.excesses),
    )
    if not communicators_overlap():
        cluster = cluster.with_links_in_turn()
    ctas = {group.name: text for group in groups.values() if (text := ctas_of(group))}
    notes = (*busy, *marks(medians))
    return Calibration(cluster=cluster, runs=runs, ctas=ctas, notes=notes)


def make_groups(layout: Layout) -> dict[tuple[Resource, int], PeerGroup]:
    """(resource, ranks) -> the group of this rank, made by all ranks in the same order."""
    groups: dict[tuple[Resource, int], PeerGroup] = {}
    node_of = dict(enumerate(layout.nodes))
    for etp in tasks.etp_sizes(layout.ranks_per_node):
        etp_layout = replace(layout, ep=len(layout.nodes) // etp, etp=etp)
        names: dict[Resource, GroupName] = {"intra": "etp"}
        if layout.num_nodes > 1:
            names["inter"] = "ep"
        for resource, name in names.items():
            ranks = etp_layout.members(name, layout.rank)
            group = collectives.new_local_group(ranks, f"monta {resource} {etp}", dist.group.WORLD)
            text = f"{counted(len(ranks), 'rank')}, {RESOURCE_NAMES[resource]}"
            groups[resource, len(ranks)] = collectives.peer_group(text, group, node_of)
    return groups


def ctas_of(group: PeerGroup) -> str | None:
    """The fewest and the most CTAs that a communicator may use; None without NCCL."""
    settings = collectives.nccl_settings(group.process_group)
    ends = (
        os.environ.get(f"NCCL_{end}_CTAS") or settings.get(f"{end.lower()}_ctas") or "default"
        for end in ("MIN", "MAX")
    )
    return " to ".join(map(str, ends)) if settings and group.size > 1 else None


def find_ranks_per_core(world: dist.ProcessGroup) -> float:
    """CPU ranks per core that they may use, over all emulated nodes of a machine."""
    by_machine: dict[str, list[set[int]]] = {}
    for name, cores in agreement.gather_objects(
        (BOOT_ID.read_text(), os.sched_getaffinity(0)), world
    ):
        by_machine.setdefault(name, []).append(cores)
    return max(1.0, *(len(ranks) / len(set().union(*ranks)) for ranks in by_machine.values()))
