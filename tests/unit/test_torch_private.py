"""The private names of torch that are used: all listed, and what they were, in this torch."""

import pkgutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.autograd import profiler

from monta_megatron.common.torch_private import (
    is_profiling,
    new_named_group,
    options_of,
    timeout_of,
)

pytestmark = pytest.mark.old_end

# The last seven are the CPU ranks'.
PRIVATE_NAMES = Path(__file__).with_name("torch_private.txt").read_text().splitlines()


def test_torch_has_them_still() -> None:
    absent = []
    for name in PRIVATE_NAMES:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            absent.append(name)
    assert absent == []


def test_a_named_group_leaves_no_trace() -> None:
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        world = dist.group.WORLD
        assert world is not None and options_of(world) is not None and timeout_of(world) == limit
        counted = dist.distributed_c10d._world.group_count
        group = new_named_group([0], "of our own")
        assert group.group_name == group.group_desc == "of our own"
        assert dist.distributed_c10d._world.group_count == counted
        later = dist.new_group([0], use_local_synchronization=True)
        assert isinstance(later, dist.ProcessGroup) and later.group_name != "of our own"
    finally:
        dist.destroy_process_group()


def test_a_profile_is_noticed() -> None:
    assert not is_profiling()
    with profiler.profile():
        assert is_profiling()
    assert not is_profiling()
