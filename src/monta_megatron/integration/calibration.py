"""Machine and permutation of a calibration: hardware, cores, copies to the host, stock's permute.

Notation: T = tokens, E = experts, H = hidden size.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import moe_utils

from monta_megatron.chains.calibration_tasks import NUM_EXPERTS, TOPK, Point
from monta_megatron.emulation.cluster import EmulatedCluster
from monta_megatron.exchange.calibration.memory_operations import routing_map, rows_of
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


def permute(point: Point, device: torch.device) -> Callable[[], object]:
    """Copies each token for each of its experts: [T, H] by [T, E] bool -> [T * topk, H]."""
    tokens, on_device = _tokens(point, device)
    return lambda: _permute(tokens, on_device)


def unpermute(point: Point, device: torch.device) -> Callable[[], object]:
    """Sums the copies of every token: the way back to [T, H]."""
    tokens, on_device = _tokens(point, device)
    rows, _, indices, *_ = _permute(tokens, on_device)
    return lambda: moe_utils.unpermute(rows, indices, tokens.shape)


PERMUTATION = {"permute": permute, "unpermute": unpermute}


def _tokens(point: Point, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    on_device = routing_map(point.num_rows, NUM_EXPERTS).to(device)
    return rows_of(point.num_rows, device), on_device


def _permute(tokens: torch.Tensor, on_device: torch.Tensor) -> tuple[torch.Tensor, ...]:
    permuted: tuple[torch.Tensor, ...] = moe_utils.permute(
        tokens, on_device, num_out_tokens=len(tokens) * TOPK
    )
    return permuted
