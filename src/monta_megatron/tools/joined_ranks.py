"""Ranks of a command: joining their launch, waiting for each other, sharing rank 0's results."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from monta_megatron.common.launch_order import set_launch_order
from monta_megatron.exchange.streams import device_of_ranks

T = TypeVar("T")


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


def on_first_rank(function: Callable[[], T]) -> T:
    """Call a function on the first rank alone, and return its result on all ranks.

    Raises:
        ValueError: the function raised it on the first rank; raised again on all of them.
    """
    # The result, and what is wrong.
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except ValueError as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    result, mistake = outcome
    if mistake is not None:
        raise ValueError(mistake)
    return cast(T, result)
