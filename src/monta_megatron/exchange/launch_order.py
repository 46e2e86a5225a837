"""NCCL's launch order: operations of several communicators start as the host issued them.

That order is the same on every rank, so communicators on a GPU cannot wait for each other in a
circle. NCCL has it since 2.26, off unless NCCL_LAUNCH_ORDER_IMPLICIT is 1. Below CUDA 12.3, of
runtime or driver, it does not only order operations but runs them one after the other.

Elsewhere a chain's collectives run one after the other (`exchange.streams`), which has no circle
either, but no overlap of network and node link.

The order holds for every communicator of the process: a collective that has nothing to do with the
exchange, issued behind a pass, starts when the last collective of the pass has started. The 1F1B
overlap of Megatron issues the collectives of tensor and context parallelism of one micro-batch
behind the passes of another, so there the variable is left alone. From NCCL 2.31 on the order is a
setting of a communicator (`launchOrderImplicit` of ncclConfig_t), which would hold up nobody else;
torch 2.14 does not expose it.

NCCL reads the variable once per process. What it has read is known if the variable was seen before
the first process group was made and is the same now; what is not known is not relied upon.
"""

import ctypes
import os
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from monta_megatron.common.ranks import is_first_rank, print_once

VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"
LEAST_NCCL, LEAST_CUDA = (2, 26), (12, 3)


def _at_start() -> str:
    """The value in the environment that this process began with, if that was 1; else "unknown"."""
    try:
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return "unknown"
    return "1" if f"{VARIABLE}=1".encode() in given else "unknown"


@dataclass
class _Process:
    """What is known about the variable in this process.

    Attributes:
        seen: value when it was last seen before the first process group was made.
        is_ours: whether `set_launch_order` has set it, not the user.
        is_left_alone: whether a model of this process needs it left alone.
    """

    seen: str | None = field(default_factory=_at_start)
    is_ours: bool = False
    is_left_alone: bool = False


_process = _Process()


def observe() -> bool:
    """Note the value of the variable if no process group was ever made; returns whether that is so.

    Called as early as possible, so that a value that the launch has set is seen in time.
    """
    # Without torch there are no groups, and it is not imported for this question.
    if "torch.distributed.distributed_c10d" in sys.modules:
        from monta_megatron.common.torch_private import was_group_made

        if was_group_made():
            return False
    _process.seen = os.environ.get(VARIABLE)
    return True


def versions() -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Versions of NCCL and of CUDA, the older of runtime and driver; None without both."""
    import torch
    import torch.distributed as dist

    # None with ROCm, whose RCCL crashes with the variable (ROCm/aorta 512).
    runtime = torch.version.cuda
    # CPU ranks say that CUDA is there.
    if runtime is None or not (torch.accelerator.is_available() and dist.is_nccl_available()):
        return None
    driver = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
    except OSError:
        return None
    # 12030 is 12.3.
    of_driver = divmod(driver.value // 10, 100)
    return torch.cuda.nccl.version(), min(tuple(map(int, runtime.split(".")[:2])), of_driver)


def is_useful() -> tuple[bool, str]:
    """Whether the variable keeps communicators overlapping here, and the versions or the reason."""
    found = versions()
    if found is None:
        return False, "no GPU with NCCL"
    nccl, cuda = (".".join(map(str, version)) for version in found)
    if found[0] < LEAST_NCCL:
        return False, f"NCCL {nccl} does not know it (2.26 does)"
    if found[1] < LEAST_CUDA:
        return False, f"CUDA {cuda} would run communicators one after the other (12.3 would not)"
    return True, f"NCCL {nccl}, CUDA {cuda}"


def _is_on() -> bool:
    """Whether NCCL is known to run with 1, or will, where no process group was made yet."""
    observe()
    return _process.seen == "1" and os.environ.get(VARIABLE) == "1"


@cache
def communicators_overlap() -> bool:
    """Whether collectives of several groups run at once, in launch order; on CPU ranks they do.

    The answer is one for all models of the process.
    """
    import torch

    return (is_useful()[0] and _is_on()) or not torch.accelerator.is_available()


def set_launch_order(holds_up_others: bool = False) -> None:
    """Set the variable to 1 where that is useful, unless the user has set it or it is too late.

    NCCL reads it once, so this is called before the first process group is made, where the
    configuration is known by then. The first rank prints which mode holds, and what it costs;
    nothing without GPUs.

    Args:
        holds_up_others: whether the order would hold up collectives that a model overlaps with
            passes. Then the variable is left alone, for all models of the process.
    """
    import torch

    if not torch.accelerator.is_available():
        return
    useful, by = is_useful()
    _process.is_left_alone |= holds_up_others
    if observe():
        value = os.environ.get(VARIABLE)
        if useful and value is None and not _process.is_left_alone:
            os.environ[VARIABLE] = "1"
            _process.is_ours = True
        elif value == "1" and _process.is_ours and _process.is_left_alone:
            # A model that was configured earlier did not need it left alone.
            del os.environ[VARIABLE]
            _process.is_ours = False
    communicators_overlap.cache_clear()
    if is_first_rank():
        print_once(_mode(useful, by))


def _mode(useful: bool, by: str) -> str:
    """The mode that holds, why, and what it costs others.

    Args:
        useful, by: see `is_useful`.
    """
    value = os.environ.get(VARIABLE)
    if communicators_overlap():
        note = (
            "collectives of different groups overlap, and cannot wait for each other in a circle: "
            f"{VARIABLE} is 1, {'set by monta' if _process.is_ours else 'as given'}, {by}; each "
            "collective of this process, of any group, starts behind those issued before it"
        )
        if _process.is_left_alone:
            note += ", which holds up the other micro-batch of overlap_moe_expert_parallel_comm"
        return note
    reason = f"{VARIABLE} is {value or 'not set'}, {by}"
    if useful and _process.is_left_alone:
        reason += "; overlap_moe_expert_parallel_comm with TP x CP > 1 needs it so"
    elif useful and value == "1":
        reason += (
            "; set it where the job starts, as it was not seen to be 1 before groups were made"
        )
    elif useful and value is None:
        reason += "; set it to 1 where the job starts, as process groups were made before"
    turns = "collectives of different groups do not overlap but take turns, and hold up no others"
    return f"{turns}: {reason}"
