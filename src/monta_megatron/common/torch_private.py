"""Uses of private names of torch.

All but the patches of the CPU ranks (emulation/), which stay beside the public names that they
patch, and a checkpoint's index (tools/placed_checkpoint.py) are in this file.
tests/unit/test_torch_private.py lists the names, for every torch.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed import distributed_c10d


def _beside_the_current_stream(options: Any) -> Any:
    """The options with which torch's functions start a collective without waiting for it."""
    # In releases without the option a collective always runs beside the current stream.
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


# Of a collective that is started by a method of its group, as the exchange does: torch's public
# functions make such options in each call, look up the group, and take the host twice as long.
ALL_TO_ALL = _beside_the_current_stream(distributed_c10d.AllToAllOptions())
ALL_GATHER = _beside_the_current_stream(distributed_c10d.AllgatherOptions())


def is_profiling() -> bool:
    """Whether a profile is being taken in this process."""
    return profiler._is_profiler_enabled


def is_in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread, as around a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)


def options_of(group: dist.ProcessGroup) -> Any:
    """The options with which a group was made; None if its backend keeps none.

    A group may have a backend for each device: that for GPUs counts, if it has one. The group is
    asked for it by a method alone, which frameworks that wrap groups forward.
    """
    for device in ("cuda", "cpu"):
        try:
            backend = group._get_backend(torch.device(device))
        except RuntimeError:
            # It serves the other device alone.
            continue
        return getattr(backend, "options", None)
    return None


def default_store() -> dist.Store:
    """The store behind the process groups, which all ranks of the launch reach."""
    return distributed_c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """A group's time limit; None if its backend does not tell it."""
    return getattr(options_of(group), "_timeout", None)


def was_group_made() -> bool:
    """Whether a default process group was ever made in this process, even if it was destroyed.

    torch notes the backend of the first one, and forgets it with none. In a torch that does not
    have the name nobody knows, and the answer is yes.
    """
    return getattr(distributed_c10d, "_backend", "unknown") is not None


def is_open(group: dist.ProcessGroup) -> bool:
    """Whether a group was not destroyed, as far as this process can see."""
    return is_wrapped(group) or group in distributed_c10d._world.pg_map


def is_wrapped(group: dist.ProcessGroup) -> bool:
    """Whether a framework has put an object of its own around a group, to exchange what is in it.

    Such frameworks replace torch's public functions by some that take such objects.
    """
    return isinstance(group, dist.ProcessGroup) and type(group) is not dist.ProcessGroup


def new_named_group(
    ranks: Sequence[int],
    name: str,
    timeout: timedelta | None = None,
    options: Any = None,
) -> dist.ProcessGroup:
    """A group made by its members alone, without affecting the groups made after it.

    torch names groups by counters that it assumes to be the same on every rank. A pipeline stage
    without MoE layers makes none of ours, so the next group of all ranks would have two names and
    hang. If the launch has bound a device, torch would split the group off the default group, which
    needs all ranks and so hangs too. `new_group` itself is not called: frameworks that close groups
    and make them again replace it, and repeat its calls without the name.

    Args:
        ranks: in ascending order, this one among them.
        name: unique among all groups that were ever made; the same on all members; NCCL logs it.
        timeout: the group's time limit; None for that of its backend.
        options: of its backend.
    """
    world, default = distributed_c10d._world, dist.group.WORLD
    assert default is not None, "torch.distributed is not initialised"
    name_of, count = distributed_c10d._hash_ranks_to_str, world.group_count
    device = default.bound_device_id
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    default.bound_device_id = None
    try:
        group = distributed_c10d._new_group_with_tag(
            list(ranks),
            timeout,
            None,
            options,
            use_local_synchronization=True,
            group_desc=name,
        )
    finally:
        distributed_c10d._hash_ranks_to_str, world.group_count = name_of, count
        default.bound_device_id = device
    assert isinstance(group, dist.ProcessGroup), f"this rank is not one of {ranks}"
    return group
