"""What the ranks run on, as far as a calibration has to know it."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.exchange.streams import gpu_name


def hardware_name() -> str:
    """A GPU, or what stands for it."""
    emulated = EmulatedCluster.from_environment()
    if emulated is not None:
        return f"emulated at {emulated.inter_mbit:g} Mbit/s"
    return gpu_name() or "CPU ranks"


def find_nics_per_node(ranks_per_node: int) -> int:
    """Network interfaces of a node, as far as they are known: else one for each rank."""
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
