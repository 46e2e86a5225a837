"""NCCL's launch order: operations of several communicators start as the host issued them.

That order is the same on every rank, so communicators on a GPU cannot wait for each other in a
circle. NCCL has it since 2.26, off unless NCCL_LAUNCH_ORDER_IMPLICIT is 1. Below CUDA 12.3, of
runtime or driver, it does not only order operations but runs them one after the other.

Elsewhere a chain's collectives run one after the other (`exchange.streams`), which has no circle
either, but no overlap of network and node link.
"""

import ctypes
import os
from functools import cache

from monta_megatron.common.ranks import is_first_rank, print_once

VARIABLE = "NCCL_LAUNCH_ORDER_IMPLICIT"
LEAST_NCCL, LEAST_CUDA = (2, 26), (12, 3)


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


@cache
def communicators_overlap() -> bool:
    """Whether collectives of several groups run at once, in launch order; on CPU ranks they do.

    First asked after the variable has its last value.
    """
    import torch

    is_on = is_useful()[0] and os.environ.get(VARIABLE) == "1"
    return is_on or not torch.accelerator.is_available()


def set_launch_order() -> None:
    """Set the variable to 1 where that is useful and the user has not set it.

    NCCL reads it once, so this is called before the first process group is made. The first rank
    prints a line for the user, unless the user's 1 does what it should or there are no GPUs.
    """
    import torch
    import torch.distributed as dist

    value = os.environ.get(VARIABLE)
    useful, by = is_useful()
    if not torch.accelerator.is_available() or (value == "1" and useful):
        return
    held = f"{VARIABLE} is {value or 'not set'}, {by}"
    note = f"collectives of different groups do not overlap: {held}"
    if useful and value is None and not dist.is_initialized():
        os.environ[VARIABLE] = "1"
        note = f"{VARIABLE}=1 set, so communicators cannot wait for each other in a circle ({by})"
    elif useful:
        note += "; set it to 1 before process groups are made"
    if is_first_rank():
        print_once(note)
