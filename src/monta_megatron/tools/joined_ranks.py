"""Ranks of a command: joining their launch, and waiting for each other."""

import torch
import torch.distributed as dist

from monta_megatron.common.launch_order import set_launch_order
from monta_megatron.exchange.streams import device_of_ranks


def join(local_rank: int, transport: str = "nccl") -> torch.device:
    """Join the launch, and take a GPU where there is one; tensors on the host go through Gloo.

    Args:
        local_rank: number among the ranks of this node, which take its GPUs in turn.
        transport: backend for tensors on GPUs.

    Raises:
        ValueError: there is neither a GPU nor a stand-in.
    """
    if not torch.cuda.is_available():
        raise ValueError("MONTA_CPU_RANKS: not set, must be 1 where there is no GPU")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    # As in a training.
    set_launch_order()
    dist.init_process_group(f"cpu:gloo,cuda:{transport}")
    return device_of_ranks()


def wait_for_all() -> None:
    """A barrier by tensors on the host, so that it needs no GPU."""
    dist.all_reduce(torch.zeros(1))
