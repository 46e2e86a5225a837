"""The process groups of an exchange in one process, and the budget of those that are ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from monta_megatron.chains import CHAINS
from monta_megatron.chains.communicator_memory import communicator_bytes
from monta_megatron.chains.communicators import DEFAULT_MAX_CTAS
from monta_megatron.chains.layout import Layout
from monta_megatron.exchange import groups
from monta_megatron.exchange.groups import UNSET, peer_groups

CHAIN = CHAINS["hierarchical_allgather"]
ALONE = Layout(ep=1, etp=1, num_local_experts=2, rank=0, nodes=(0,))
MIB = 1 << 20


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
        budgets = (None, DEFAULT_MAX_CTAS, 4, 4)
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
    options.is_high_priority_stream = True
    return options


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
@pytest.mark.parametrize(
    ("flag", "given", "expected"),
    [
        # (max_ctas, min_ctas): the flag comes before Megatron's, which comes before our default.
        (None, (UNSET, UNSET), (DEFAULT_MAX_CTAS, UNSET)),
        (None, (32, 1), (32, 1)),
        (4, (32, 1), (4, 1)),
        (4, (UNSET, UNSET), (4, UNSET)),
        # NCCL refuses a lower limit above the upper one.
        (4, (32, 16), (4, 4)),
        (None, (UNSET, 16), (DEFAULT_MAX_CTAS, DEFAULT_MAX_CTAS)),
    ],
)
def test_who_says_what_a_communicator_may_take(
    flag: int | None, given: tuple[int, int], expected: tuple[int, int]
) -> None:
    asked: list[Any] = []

    def new_named_group(ranks: list[int], *, options: Any, **_: Any) -> Any:
        asked.append(options)
        return dist.group.WORLD

    with (
        one_rank() as megatron_groups,
        mock.patch.object(groups, "options_of", lambda group: nccl_options(*given)),
        mock.patch.object(groups, "new_named_group", new_named_group),
    ):
        peer_groups([CHAIN], ALONE, megatron_groups, flag)
    # Of one rank, rail and node are one group.
    (options,) = asked
    assert (options.config.max_ctas, options.config.min_ctas) == expected
    assert options.config.cga_cluster_size == 2 and options.is_high_priority_stream


@pytest.mark.parametrize(
    ("chain_name", "layout", "max_ctas", "mib"),
    [
        # 2 nodes of 8. Node: 7 peers x 8 channels x 12 MiB. Rail: 8 channels x 4 MiB.
        ("hierarchical_alltoall", (16, 8), 8, 7 * 8 * 12 + 8 * 4),
        # The AllGather's ring beside its transpose: 8 channels x 12 MiB more.
        ("hierarchical_allgather", (16, 8), 8, 7 * 8 * 12 + 8 * 4 + 8 * 12),
        # Sends and receives take 4 channels for a budget of 3; the ring takes 3.
        ("hierarchical_allgather", (16, 8), 3, 7 * 4 * 12 + 4 * 4 + 3 * 12),
        # More nodes have more peers on a rail, which share a channel's buffers.
        ("hierarchical_alltoall", (64, 8), 8, 7 * 8 * 12 + 8 * 4),
        # One rank on each node: rails alone. One node: that alone.
        ("hierarchical_alltoall", (4, 1), 8, 8 * 4),
        ("hierarchical_alltoall", (8, 8), 8, 7 * 8 * 12),
        # Megatron's own groups are not ours to count.
        ("alltoall", (16, 8), 8, 0),
        ("alltoall_dedup", (16, 8), 8, 0),
    ],
)
def test_the_memory_of_our_communicators(
    chain_name: str, layout: tuple[int, int], max_ctas: int, mib: int
) -> None:
    num_ranks, per_node = layout
    nodes = tuple(rank // per_node for rank in range(num_ranks))
    here = Layout(ep=num_ranks, etp=1, num_local_experts=2, rank=0, nodes=nodes)
    assert communicator_bytes(CHAINS[chain_name], here, max_ctas) == mib * MIB
