"""The machine of a calibration: hardware, cores, copies to the host."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.exchange.streams import gpu_name


def hardware_name() -> str:
    """Name of the GPU, or of the CPU ranks in its place."""
    emulated = EmulatedCluster.from_environment()
    if emulated is not None:
        return f"emulated at {emulated.inter_mbit:g} Mbit/s"
    return gpu_name() or "CPU ranks"


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
