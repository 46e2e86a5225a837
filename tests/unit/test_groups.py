"""The process groups of an exchange in one process, and the settings of those that are ours."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from monta_megatron.chains import CHAINS
from monta_megatron.common.torch_private import timeout_of
from monta_megatron.core import Layout
from monta_megatron.exchange import collectives
from monta_megatron.exchange.collectives import (
    UNSET,
    PeerGroup,
    are_open,
    close_groups,
    new_local_group,
    peer_groups,
    start_all_gather,
    start_all_to_all,
)

CHAIN = CHAINS["hierarchical_allgather"]
# Of one rank, rail and node are one group.
ALONE = Layout(ep=1, etp=1, num_local_experts=2, rank=0, nodes=(0,))
# Those that releases of torch since 2.8 have.
LATER_SETTINGS = [
    name
    for name in ("cta_policy", "nvls_ctas")
    if dist.is_nccl_available() and hasattr(dist.ProcessGroupNCCL.Options().config, name)
]


@pytest.fixture
def world() -> Iterator[dist.ProcessGroup]:
    """One of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def our_groups(world: dist.ProcessGroup) -> dict[str, PeerGroup]:
    return peer_groups([CHAIN], ALONE, dict.fromkeys(("ep", "etp", "tp_ep"), world))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
@pytest.mark.parametrize(("max_ctas", "min_ctas"), [(UNSET, UNSET), (32, 16)])
def test_our_groups_take_over_megatrons_settings(
    world: dist.ProcessGroup, max_ctas: int, min_ctas: int
) -> None:
    given = dist.ProcessGroupNCCL.Options()
    settings = {"max_ctas": max_ctas, "min_ctas": min_ctas, "cga_cluster_size": 2}
    settings |= dict.fromkeys(LATER_SETTINGS, 1)
    for name, value in settings.items():
        setattr(given.config, name, value)
    given.is_high_priority_stream = True
    with (
        mock.patch.object(collectives, "options_of", lambda group: given),
        mock.patch.object(collectives, "new_named_group", return_value=world) as new_named_group,
    ):
        our_groups(world)
    new_named_group.assert_called_once()
    options = new_named_group.call_args.kwargs["options"]
    assert options.is_high_priority_stream
    assert {name: getattr(options.config, name) for name in settings} == settings


def wrapped(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A framework's group around another: methods are forwarded, properties are not."""

    class Wrapped(dist.ProcessGroup):
        def _get_backend(self, device: torch.device) -> Any:
            return group._get_backend(device)

    return Wrapped(0, 1)


@pytest.mark.usefixtures("world")
def test_a_wrapper_around_a_group_of_a_device_alone() -> None:
    limit = timedelta(seconds=77)
    group = dist.new_group([0], backend="cuda:gloo", timeout=limit)
    assert isinstance(group, dist.ProcessGroup)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        group._get_backend(torch.device("cpu"))
    like = new_local_group([0], "ours", wrapped(group))
    assert [timeout_of(each) for each in (group, wrapped(group), like)] == [limit] * 3


def test_closed_groups_are_made_again_under_another_name(world: dist.ProcessGroup) -> None:
    names = []
    for close in (close_groups, dist.destroy_process_group, close_groups):
        made = our_groups(world)
        assert are_open(made)
        (ours,) = {each.process_group for each in made.values()}
        names.append(ours.group_name)
        if close is close_groups:
            close()
        else:
            close(ours)
        assert not are_open(made)
    assert len(set(names)) == 3


def test_what_is_wrapped_is_called_by_the_functions_of_torch(world: dist.ProcessGroup) -> None:
    """A device calls a group of torch itself; a wrapper need not have its methods."""
    rows = mock.MagicMock(is_cuda=True)
    for group, calls in ((world, [1, 1, 0, 0]), (wrapped(world), [0, 0, 1, 1])):
        peers = PeerGroup(name="ep", process_group=group, size=1, rank=0, nodes=(0,))
        # Asked before the functions are replaced here.
        assert peers.is_called == (group is world)
        with (
            mock.patch.object(dist.ProcessGroup, "alltoall_base") as itself,
            mock.patch.object(dist.ProcessGroup, "_allgather_base") as gathers_itself,
            mock.patch.object(dist, "all_to_all_single") as by_torch,
            mock.patch.object(dist, "all_gather_into_tensor") as gathers_by_torch,
        ):
            start_all_to_all(rows, rows, [1], [1], peers)
            start_all_gather(rows, rows, [1], [1], peers)
        functions = (itself, gathers_itself, by_torch, gathers_by_torch)
        assert [function.call_count for function in functions] == calls
    with mock.patch.object(dist, "all_to_all_single"):
        # As where messages go through the host: the group itself would not do what they do.
        peers = PeerGroup(name="ep", process_group=world, size=1, rank=0, nodes=(0,))
        assert not peers.is_called
