"""The private names of torch that are used: all listed, and what they were, in this torch."""

import inspect
import pkgutil
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.autograd import profiler

from monta_megatron.common.torch_private import (
    is_profiling,
    new_named_group,
    options_of,
    timeout_of,
)

pytestmark = pytest.mark.old_end

# Where each is, with the parameters of a function in Python.
PRIVATE_NAMES = (
    # torch_private's; `get_future_result`, which is not documented, is the time limit's.
    "torch.autograd.profiler._is_profiler_enabled",
    "torch.distributed.distributed_c10d._hash_ranks_to_str(ranks)",
    "torch.distributed.distributed_c10d._new_group_with_tag",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.ProcessGroup._allgather_base",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroup.alltoall",
    "torch.distributed.ProcessGroup.alltoall_base",
    "torch.distributed.ProcessGroup.bound_device_id",
    "torch.distributed.ProcessGroupGloo._Options._timeout",
    "torch.distributed.Work.get_future_result",
    # The CPU ranks'.
    "torch.autograd._engine_run_backward(t_outputs, *args, **kwargs)",
    "torch.cuda._initialized",
    "torch.cuda._is_in_bad_fork",
    "torch.distributed.ProcessGroupGloo._Options",
    "torch.distributed.ProcessGroupGloo._Options._devices",
    "torch.distributed.ProcessGroupGloo._Options._threads",
)


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    store, limit = dist.HashStore(), timedelta(seconds=77)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=limit)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("listed", PRIVATE_NAMES)
def test_torch_has_it_still(listed: str) -> None:
    dotted, _, parameters = listed.partition("(")
    try:
        value = pkgutil.resolve_name(dotted)
    except AttributeError as error:
        pytest.fail(f"torch {torch.__version__} has no {dotted}: {error}")
    if parameters:
        takes = ", ".join(
            str(each.replace(annotation=inspect.Parameter.empty))
            for each in inspect.signature(value).parameters.values()
        )
        assert f"{takes})" == parameters, f"torch {torch.__version__}: {dotted} takes {takes}"


def test_a_group_tells_its_time_limit(world: dist.ProcessGroup) -> None:
    assert options_of(world) is not None
    assert timeout_of(world) == timedelta(seconds=77)


def test_a_named_group_leaves_no_trace(world: dist.ProcessGroup) -> None:
    counted = dist.distributed_c10d._world.group_count
    group = new_named_group([0], "of our own")
    assert group.group_name == group.group_desc == "of our own"
    assert dist.distributed_c10d._world.group_count == counted
    later = dist.new_group([0], use_local_synchronization=True)
    assert isinstance(later, dist.ProcessGroup) and later.group_name != "of our own"


def test_a_profile_is_noticed() -> None:
    assert not is_profiling()
    with profiler.profile():
        assert is_profiling()
    assert not is_profiling()
