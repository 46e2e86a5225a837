"""Private names of torch on which this package rests, and their uses.

A test goes over `PRIVATE_NAMES` with every supported torch, and finds a use that is not listed.
All but the patches of the CPU ranks (emulation/), which stay beside the public names that they
patch, are used in this file alone.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed import distributed_c10d

# Where each is, with the parameters of a function in Python, and why it is needed.
PRIVATE_NAMES = {
    "torch.distributed.distributed_c10d._hash_ranks_to_str(ranks)": "names a group that its "
    "members make alone; replaced while we make one",
    "torch.distributed.distributed_c10d._new_group_with_tag": "makes a group; `new_group`, which "
    "calls it, may be replaced by one that records what it makes, to make it again without a name",
    "torch.distributed.distributed_c10d._world": "its `group_count` names the groups that all "
    "ranks make, so ours must not count; its `pg_map` holds the groups that are open",
    "torch.distributed.ProcessGroup.bound_device_id": "of the default group: makes torch split new "
    "groups off it, for which all ranks would have to call; put aside while we make one",
    "torch.distributed.ProcessGroup._get_backend": "holds the options that Megatron gave a group, "
    "which ours take over",
    "torch.distributed.ProcessGroupGloo._Options._timeout": "of any backend's options: the group's "
    "time limit, which ours take over",
    "torch.distributed.ProcessGroup.alltoall_base": "starts an AllToAll with options made before: "
    "the public function takes its host twice as long",
    "torch.distributed.ProcessGroup._allgather_base": "likewise an AllGather of equal parts",
    "torch.distributed.ProcessGroup.alltoall": "likewise an AllToAll of lists of tensors",
    "torch.distributed.Work.get_future_result": "tells whether a collective of NCCL has ended: not "
    "documented; without a call of CUDA, and without holding tensors",
    "torch.autograd.profiler._is_profiler_enabled": "says whether a profile is being taken, so "
    "that a pass names its operations only then",
    # The CPU ranks'.
    "torch.distributed.ProcessGroupGloo._Options": "the only way to let the Gloo groups of a "
    "process share one device",
    "torch.distributed.ProcessGroupGloo._Options._devices": "that device",
    "torch.distributed.ProcessGroupGloo._Options._threads": "the threads of that device",
    "torch.cuda._initialized": "set, so that torch.cuda seeds at once and waits for no driver",
    "torch.cuda._is_in_bad_fork": "replaced: once torch was asked for GPUs, it takes every fork "
    "for broken",
    "torch.autograd._engine_run_backward(t_outputs, *args, **kwargs)": "wrapped: the mode that "
    "puts CPU in the place of CUDA is off inside torch.autograd.backward",
}


def has_async_option() -> bool:
    """Whether a collective's options say that it runs beside the current stream.

    In releases that have no such option it always does.
    """
    return hasattr(distributed_c10d.AllToAllOptions(), "asyncOp")


def _beside_the_current_stream(options: Any) -> Any:
    """The options with which torch's functions start a collective without waiting for it."""
    if has_async_option():
        options.asyncOp = True
    return options


_ALL_TO_ALL = _beside_the_current_stream(distributed_c10d.AllToAllOptions())
_ALL_GATHER = _beside_the_current_stream(distributed_c10d.AllgatherOptions())


def start_all_to_all(
    group: dist.ProcessGroup,
    output: torch.Tensor,
    input_: torch.Tensor,
    receive: list[int],
    send: list[int],
) -> dist.Work:
    """`all_to_all_single` with `async_op`, of contiguous tensors of one dtype."""
    return group.alltoall_base(output, input_, receive, send, _ALL_TO_ALL)


def start_all_to_all_of_lists(
    group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor]
) -> dist.Work:
    """`all_to_all` with `async_op`, of contiguous tensors of one dtype."""
    return group.alltoall(outputs, inputs, _ALL_TO_ALL)


def start_all_gather(
    group: dist.ProcessGroup, output: torch.Tensor, input_: torch.Tensor
) -> dist.Work:
    """`all_gather_into_tensor` with `async_op`, of contiguous tensors of one dtype."""
    return group._allgather_base(output, input_, _ALL_GATHER)


def result_of(work: Any) -> torch.futures.Future[int]:
    """Future of a collective of NCCL; a RuntimeError with other backends."""
    return work.get_future_result()


def is_profiling() -> bool:
    """Whether a profile is being taken in this process."""
    return profiler._is_profiler_enabled


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


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """A group's time limit; None if its backend does not tell it."""
    return getattr(options_of(group), "_timeout", None)


def is_open(group: dist.ProcessGroup) -> bool:
    """Whether a group was made in this `torch.distributed`, and not destroyed since."""
    return group in distributed_c10d._world.pg_map


def is_wrapped(group: dist.ProcessGroup) -> bool:
    """Whether a framework has put an object of its own around a group, to exchange what is in it.

    Such frameworks replace torch's public functions by some that take such objects.
    """
    return isinstance(group, dist.ProcessGroup) and type(group) is not dist.ProcessGroup


def is_usable(group: dist.ProcessGroup) -> bool:
    """Whether a group was not destroyed, as far as this process can see."""
    return is_wrapped(group) or is_open(group)


def new_named_group(
    ranks: Sequence[int],
    name: str,
    description: str,
    timeout: timedelta | None = None,
    options: Any = None,
) -> dist.ProcessGroup:
    """A group made by its members alone, without affecting the groups made after it.

    torch names groups by counters that it assumes to be the same on every rank: a group made by all
    ranks together by the number of groups made before, and a group made by its members alone by
    that number too, or (2.13) by the number of groups that this rank is in. A pipeline stage
    without MoE layers makes none of ours, so the next group of all ranks would have two names and
    hang. If the launch has bound a device, torch would split the group off the default group, which
    needs all ranks and so hangs too.

    Frameworks that close groups and make them again replace `new_group`, and repeat its calls. Ours
    must not be among these, for the same reason.

    Args:
        ranks: in ascending order, this one among them.
        name: unique among all groups that were ever made; the same on all members.
        description: for NCCL's logs.
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
            group_desc=description,
        )
    finally:
        distributed_c10d._hash_ranks_to_str, world.group_count = name_of, count
        default.bound_device_id = device
    assert isinstance(group, dist.ProcessGroup), f"this rank is not one of {ranks}"
    return group
