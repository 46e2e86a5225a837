"""The process groups of an exchange in one process, and the settings of those that are ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from monta_megatron.chains import CHAINS
from monta_megatron.common import torch_private
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
ALONE = Layout(ep=1, etp=1, num_local_experts=2, rank=0, nodes=(0,))
# Those that releases of torch since 2.8 have.
LATER_SETTINGS = [
    name
    for name in ("cta_policy", "nvls_ctas")
    if dist.is_nccl_available() and hasattr(dist.ProcessGroupNCCL.Options().config, name)
]


@contextmanager
def one_rank() -> Iterator[dict[str, dist.ProcessGroup]]:
    """Megatron's groups, in a world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dict.fromkeys(("ep", "etp", "tp_ep"), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
@pytest.mark.parametrize(("max_ctas", "min_ctas"), [(UNSET, UNSET), (32, 16)])
def test_our_groups_take_over_megatrons_settings(max_ctas: int, min_ctas: int) -> None:
    given = dist.ProcessGroupNCCL.Options()
    given.config.max_ctas, given.config.min_ctas = max_ctas, min_ctas
    given.config.cga_cluster_size = 2
    for name in LATER_SETTINGS:
        setattr(given.config, name, 1)
    given.is_high_priority_stream = True
    asked: list[Any] = []

    def new_named_group(ranks: list[int], *, options: Any, **_: Any) -> Any:
        asked.append(options)
        return dist.group.WORLD

    with (
        one_rank() as megatron_groups,
        mock.patch.object(collectives, "options_of", lambda group: given),
        mock.patch.object(collectives, "new_named_group", new_named_group),
    ):
        peer_groups([CHAIN], ALONE, megatron_groups)
    # Of one rank, rail and node are one group.
    (options,) = asked
    assert (options.config.max_ctas, options.config.min_ctas) == (max_ctas, min_ctas)
    assert options.config.cga_cluster_size == 2 and options.is_high_priority_stream
    assert all(getattr(options.config, name) == 1 for name in LATER_SETTINGS)


def wrapped(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A framework's group around another: methods are forwarded, properties are not."""

    class Wrapped(dist.ProcessGroup):
        def _get_backend(self, device: torch.device) -> Any:
            return group._get_backend(device)

    return Wrapped(0, 1)


def test_a_wrapper_around_a_group_of_a_device_alone() -> None:
    limit = timedelta(seconds=77)
    with one_rank():
        group = dist.new_group([0], backend="cuda:gloo", timeout=limit)
        assert isinstance(group, dist.ProcessGroup)
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            group._get_backend(torch.device("cpu"))
        assert (timeout_of(group), timeout_of(wrapped(group))) == (limit, limit)
        like = new_local_group([0], "ours", wrapped(group))
        assert timeout_of(like) == limit


def test_closed_groups_are_made_again_under_another_name() -> None:
    names = []
    with one_rank() as megatron_groups:
        for close in (close_groups, dist.destroy_process_group, close_groups):
            made = peer_groups([CHAIN], ALONE, megatron_groups)
            assert are_open(made)
            # Of one rank, rail and node are one group.
            ours = {each.process_group for each in made.values()}
            names += [group.group_name for group in ours]
            if close is close_groups:
                close()
            else:
                for group in ours:
                    close(group)
            assert not are_open(made)
    assert len(set(names)) == 3 * len(ours)
    # Without torch.distributed there are none.
    close_groups()


def test_what_is_wrapped_is_called_by_the_functions_of_torch() -> None:
    """A device calls a group of torch itself; a wrapper need not have its methods."""
    with one_rank():
        plain = dist.group.WORLD
        assert plain is not None
        for group in (plain, wrapped(plain)):
            peers = PeerGroup(name="ep", process_group=group, size=1, rank=0, nodes=(0,))
            # Asked before the functions are replaced here.
            assert peers.is_called == (group is plain)
            rows = mock.MagicMock(is_cuda=True)
            for start, name in (
                (start_all_to_all, "all_to_all_single"),
                (start_all_gather, "all_gather_into_tensor"),
            ):
                with (
                    mock.patch.object(torch_private, start.__name__) as itself,
                    mock.patch.object(dist, name) as by_torch,
                ):
                    start(rows, rows, [1], [1], peers)
                assert (itself.called, by_torch.called) == (group is plain, group is not plain)
        with mock.patch.object(dist, "all_to_all_single"):
            # As where messages go through the host: the group itself would not do what they do.
            peers = PeerGroup(name="ep", process_group=plain, size=1, rank=0, nodes=(0,))
            assert not peers.is_called
