"""The process groups of an exchange in one process, and the budget of those that are ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from monta_megatron.chains import CHAINS
from monta_megatron.chains.layout import DEFAULT_CTAS, Ctas, Layout
from monta_megatron.common import torch_private
from monta_megatron.common.torch_private import timeout_of
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
from monta_megatron.integration.options import Options
from monta_megatron.planner.chain_price import communicator_bytes

CHAIN = CHAINS["hierarchical_allgather"]
ALONE = Layout(ep=1, etp=1, num_local_experts=2, rank=0, nodes=(0,))
MIB = 1 << 20
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


def test_groups_do_not_outlive_their_torch_distributed() -> None:
    for _ in range(2):
        with one_rank() as megatron_groups:
            made = peer_groups([CHAIN], ALONE, megatron_groups)
            assert {name: group.size for name, group in made.items()} == {"node": 1, "rail": 1}
            ranks = [dist.get_process_group_ranks(each.process_group) for each in made.values()]
            assert ranks == [[0], [0]]


def test_groups_are_shared_by_layers_with_one_budget() -> None:
    with one_rank() as megatron_groups:
        budgets: tuple[dict[str, int | None] | None, ...] = (
            None,
            DEFAULT_CTAS._asdict(),
            {"rail": 2, "node": 8},
            {"rail": 2, "node": 8},
        )
        first, same, other, again = (
            {
                name: each.process_group
                for name, each in peer_groups([CHAIN], ALONE, megatron_groups, budget).items()
            }
            for budget in budgets
        )
    assert first == same and other == again
    assert not set(first.values()) & set(other.values())


def nccl_options(max_ctas: int = UNSET, min_ctas: int = UNSET) -> Any:
    """What Megatron gives its expert parallel group; made without a driver."""
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas, options.config.min_ctas = max_ctas, min_ctas
    options.config.cga_cluster_size = 2
    for name in LATER_SETTINGS:
        setattr(options.config, name, 1)
    options.is_high_priority_stream = True
    return options


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
@pytest.mark.parametrize(
    ("flags", "given", "expected"),
    [
        # (max_ctas, min_ctas) of node and rail: the flag of one comes before that of both, which
        # comes before Megatron's, which comes before our default.
        ({}, (UNSET, UNSET), [(DEFAULT_CTAS.node, UNSET), (DEFAULT_CTAS.rail, UNSET)]),
        ({}, (32, 1), [(32, 1), (32, 1)]),
        ({"max_ctas": 6}, (32, 1), [(6, 1), (6, 1)]),
        ({"max_ctas": 6, "node_ctas": 12}, (UNSET, UNSET), [(12, UNSET), (6, UNSET)]),
        ({"rail_ctas": 2}, (UNSET, UNSET), [(DEFAULT_CTAS.node, UNSET), (2, UNSET)]),
        # NCCL refuses a lower limit above the upper one.
        ({"max_ctas": 6, "node_ctas": 24}, (32, 16), [(24, 16), (6, 6)]),
    ],
)
def test_who_says_what_a_communicator_may_take(
    flags: dict[str, int], given: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    asked: list[Any] = []

    def new_named_group(ranks: list[int], *, options: Any, **_: Any) -> Any:
        asked.append(options)
        return dist.group.WORLD

    with (
        one_rank() as megatron_groups,
        mock.patch.object(collectives, "options_of", lambda group: nccl_options(*given)),
        mock.patch.object(collectives, "new_named_group", new_named_group),
    ):
        peer_groups([CHAIN], ALONE, megatron_groups, Options(**flags).ctas)
    # Of one rank, rail and node with one budget are one group.
    made = [(options.config.max_ctas, options.config.min_ctas) for options in asked]
    assert made == (expected if len(set(expected)) > 1 else expected[:1])
    for options in asked:
        assert options.config.cga_cluster_size == 2 and options.is_high_priority_stream
        assert all(getattr(options.config, name) == 1 for name in LATER_SETTINGS)


@pytest.mark.parametrize(
    ("chain_name", "layout", "ctas", "mib"),
    [
        # 2 nodes of 8. Node: 7 peers x 16 channels x 12 MiB. Rail: 4 channels x 4 MiB.
        ("hierarchical_alltoall", (16, 8), DEFAULT_CTAS, 7 * 16 * 12 + 4 * 4),
        # 2 nodes of 8. Node: 7 peers x 8 channels x 12 MiB. Rail: 8 channels x 4 MiB.
        ("hierarchical_alltoall", (16, 8), Ctas(rail=8, node=8), 7 * 8 * 12 + 8 * 4),
        # The AllGather's ring beside its transpose: 8 channels x 12 MiB more.
        ("hierarchical_allgather", (16, 8), Ctas(rail=8, node=8), 7 * 8 * 12 + 8 * 4 + 8 * 12),
        # Sends and receives take 4 channels for a budget of 3; the ring takes 3.
        ("hierarchical_allgather", (16, 8), Ctas(rail=3, node=3), 7 * 4 * 12 + 4 * 4 + 3 * 12),
        # More nodes have more peers on a rail, which share a channel's buffers.
        ("hierarchical_alltoall", (64, 8), Ctas(rail=8, node=8), 7 * 8 * 12 + 8 * 4),
        # One rank on each node: rails alone. One node: that alone.
        ("hierarchical_alltoall", (4, 1), Ctas(rail=8, node=8), 8 * 4),
        ("hierarchical_alltoall", (8, 8), Ctas(rail=8, node=8), 7 * 8 * 12),
        # Megatron's own groups are not ours to count.
        ("alltoall", (16, 8), Ctas(rail=8, node=8), 0),
        ("alltoall_dedup", (16, 8), Ctas(rail=8, node=8), 0),
    ],
)
def test_the_memory_of_our_communicators(
    chain_name: str, layout: tuple[int, int], ctas: Ctas, mib: int
) -> None:
    num_ranks, per_node = layout
    nodes = tuple(rank // per_node for rank in range(num_ranks))
    here = Layout(ep=num_ranks, etp=1, num_local_experts=2, rank=0, nodes=nodes)
    assert communicator_bytes(CHAINS[chain_name], here, ctas) == mib * MIB


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
            # Of one rank, rail and node are one group where their budgets are equal.
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
        calls = []
        for group in (plain, wrapped(plain)):
            peers = PeerGroup(name="ep", process_group=group, size=1, rank=0, nodes=(0,))
            rows = mock.MagicMock(is_cuda=True)
            # Asked before the functions are replaced here.
            assert peers.is_called == (group is plain)
            with (
                mock.patch.object(torch_private, "start_all_to_all") as itself,
                mock.patch.object(torch_private, "start_all_gather") as gathers_itself,
                mock.patch.object(dist, "all_to_all_single") as by_torch,
                mock.patch.object(dist, "all_gather_into_tensor") as gathers_by_torch,
            ):
                start_all_to_all(rows, rows, [1], [1], peers)
                start_all_gather(rows, rows, [1], [1], peers)
            functions = (itself, gathers_itself, by_torch, gathers_by_torch)
            calls.append([function.call_count for function in functions])
        with mock.patch.object(dist, "all_to_all_single"):
            # As where messages go through the host: the group itself would not do what they do.
            peers = PeerGroup(name="ep", process_group=plain, size=1, rank=0, nodes=(0,))
            assert not peers.is_called
    assert calls == [[1, 1, 0, 0], [0, 0, 1, 1]]
