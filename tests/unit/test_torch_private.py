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
    PRIVATE_NAMES,
    is_profiling,
    new_named_group,
    options_of,
    timeout_of,
)

pytestmark = pytest.mark.old_end


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
    value = pkgutil.resolve_name(dotted)
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
    group = new_named_group([0], "of our own", "for the log")
    assert (group.group_name, group.group_desc) == ("of our own", "for the log")
    assert dist.distributed_c10d._world.group_count == counted
    later = dist.new_group([0], use_local_synchronization=True)
    assert isinstance(later, dist.ProcessGroup) and later.group_name != "of our own"


def test_a_profile_is_noticed() -> None:
    assert not is_profiling()
    with profiler.profile():
        assert is_profiling()
    assert not is_profiling()
