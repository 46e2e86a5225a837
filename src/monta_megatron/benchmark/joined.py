"""What a benchmark and a calibration do as ranks of one launch: join it, and agree."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def join(local_rank: int) -> torch.device:
    """Join the launch, with a GPU where there is one; Gloo carries what the ranks tell each other.

    Raises:
        ValueError: there is neither a GPU nor a stand-in.
    """
    if not torch.cuda.is_available():
        raise ValueError("MONTA_CPU_RANKS: not set, must be 1 where there is no GPU")
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl")
    # A CPU where CPU ranks stand in.
    return torch.empty(0, device="cuda").device


def on_first_rank(function: Callable[[], T]) -> T:
    """What the first rank finds, on all ranks.

    Raises:
        ValueError: the first rank's, on all of them.
    """
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = function()
        except ValueError as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise ValueError(found[1])
    result: T = found[0]
    return result
