"""What a processor takes for the host's part of an exchange: `scripts/launch_budget.py --host`.

Nothing reaches a GPU. A collective of a fake group ends with c10d, which copies each rank's part on
the host in place of NCCL's send and receive; a Triton launch ends before the driver. What NCCL and
the driver take besides comes from published figures: docs/calibration.md adds the two up. All are
this thread's time, the least of several rounds, so that what else runs matters less.
"""

import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import linear_regression

import torch
import torch.distributed as dist
from compiled_kernels import no_driver
from fake_world import RANK
from launch_counts import count_launches
from launch_times import host_us

from monta_megatron.common.torch_private import ALL_TO_ALL
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.kernels.sums import reduce_ranks
from monta_megatron.exchange.kernels.tiles import Launches

GROUP_SIZES = (2, 8, 16, 64)
ROUNDS, CALLS = 30, 50
# The chain whose layer is timed, and its chunks.
CHAIN, EP, FEW, MANY, REPEATS = "hierarchical_alltoall", 16, 1, 4, 60
# A pass in which nothing is found or bound, and its operations: three of Triton, two collectives.
PASS, OPERATIONS = "combine_backward", 5


def host_figures() -> dict[str, float | str]:
    """Microseconds by the names of `HostCosts`, and what they were measured on."""
    sizes = {size: _collective_us(size) for size in GROUP_SIZES}
    peers = [size - 1 for size in sizes]
    peer_us, collective_us = linear_regression(peers, list(sizes.values()))
    launch_us, allocation_us = _launch_us(), _least_us(lambda: torch.empty(64, 64))
    timed = {chunks: host_us(CHAIN, EP, chunks, REPEATS, "fused", min) for chunks in (FEW, MANY)}
    counted = {chunks: count_launches(CHAIN, EP, chunks, "fused") for chunks in timed}

    def python_us(row: str, chunks: int = FEW) -> float:
        """A row of the layer without its launches and allocations; its collectives do nothing."""
        counts = counted[chunks][row]
        allocations = counts.tensor_operations - counts.kernel_launches
        launched_us = launch_us * counts.kernel_launches + allocation_us * allocations
        return timed[chunks][row] - launched_us

    stage_us = (python_us(PASS, MANY) - python_us(PASS)) / (MANY - FEW) / OPERATIONS
    return {
        "processor": _processor(),
        "torch": torch.__version__,
        **{f"collective of {size} ranks": us for size, us in sizes.items()},
        "collective_us": collective_us,
        "collective_peer_us": peer_us,
        "launch of a Triton kernel": launch_us,
        "allocation": allocation_us,
        "stage_us": stage_us,
        "pass_us": python_us(PASS) - OPERATIONS * stage_us,
        # The exchange of counts is a collective of a fake group.
        "counts_us": python_us("counts") - sizes[EP] + python_us("dispatch") - python_us(PASS),
    }


def _collective_us(size: int) -> float:
    """An uneven AllToAll of so many ranks, as the executor starts it."""
    members = sorted((RANK + other) % dist.get_world_size() for other in range(size))
    group = dist.new_group(members)
    splits = [3 + rank % 3 for rank in range(size)]
    rows, received = torch.empty(2, sum(splits), 8)
    return _least_us(lambda: group.alltoall_base(received, rows, splits, splits, ALL_TO_ALL))


def _launch_us() -> float:
    """A repeated launch, whose variant is known, with a wrapper's arithmetic before it."""
    rows, into = map(Columns, torch.empty(2, 16, 256, dtype=torch.bfloat16))
    launches: Launches = {}
    with no_driver():
        return _least_us(lambda: reduce_ranks(rows, into, torch.float32, 1, launches=launches))


def _least_us(call: Callable[[], object]) -> float:
    rounds = []
    call()
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        rounds.append((time.thread_time() - start) / CALLS * 1e6)
    return min(rounds)


def _processor() -> str:
    """As the kernel names it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    named = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): value.strip() for name, value in named.items()}
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    of_model = [f"{name} {fields[name]}" for name in ("cpu family", "model") if name in fields]
    return ", ".join([fields["model name"], *of_model])
