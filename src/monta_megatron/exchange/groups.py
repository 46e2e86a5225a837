"""The process groups of an exchange: Megatron's own, and the rails and nodes made from them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from monta_megatron.chains import Chain, Layout
from monta_megatron.chains.stages import AllGather, AllToAll
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.topology.nodes import node_here, number_nodes

# What Megatron's file of communicator settings may set.
NCCL_SETTINGS = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")

# Made once per set of ranks: layers share them, and a group is never freed while training.
_made: dict[tuple[int, ...], dist.ProcessGroup] = {}


def find_nodes(group: dist.ProcessGroup, ranks_per_node: int | None = None) -> tuple[int, ...]:
    """The node of every rank of `group`, numbered from 0 in their order.

    Args:
        group: the ranks of an exchange; unless `ranks_per_node` is given, all of them call this.
        ranks_per_node: where the ranks of a node follow each other and there are so many.
    """
    ranks = dist.get_process_group_ranks(group)
    if ranks_per_node is not None:
        return number_nodes([str(rank // ranks_per_node) for rank in ranks])
    names: list[str] = [""] * len(ranks)
    dist.all_gather_object(names, node_here(), group=group)
    return number_nodes(names)


def peer_groups(
    chains: Sequence[Chain], layout: Layout, megatron_groups: dict[str, dist.ProcessGroup]
) -> dict[str, PeerGroup]:
    """The group behind every group name that one of the chains uses.

    Rails and nodes are made by their own members alone: pipeline stages without MoE layers never
    come here, and a group that some ranks make for all would break the next one that all make.

    Args:
        chains: whose stages name groups.
        layout: this rank's place; gives the node of every rank of the exchange.
        megatron_groups: "ep", "etp" and "tp_ep".
    """
    ranks = dist.get_process_group_ranks(megatron_groups["tp_ep"])
    node_of = dict(zip(ranks, layout.nodes, strict=True))
    names = {
        stage.group
        for chain in chains
        for stage in chain.stages
        if isinstance(stage, AllToAll | AllGather)
    }
    groups: dict[str, dist.ProcessGroup] = dict(megatron_groups)
    # In this order on every rank.
    for name in ("node", "rail"):
        if name in names:
            members = layout.members(name, layout.rank)
            key = tuple(ranks[each] for each in members)
            # Those of a torch.distributed that was ended, and started anew, are no groups any more.
            if _made.get(key) not in distributed_c10d._world.pg_map:
                _made[key] = new_local_group(key, f"monta {name}", megatron_groups["ep"])
            groups[name] = _made[key]
    return {name: _peer_group(name, groups[name], node_of) for name in sorted(names)}


def new_local_group(
    ranks: Sequence[int], name: str, like: dist.ProcessGroup | None = None
) -> dist.ProcessGroup:
    """A group that its members alone make, whatever groups other ranks make meanwhile.

    Args:
        ranks: in ascending order, this one among them.
        name: for NCCL's logs; with the ranks it is the group's own.
        like: a group with the time limit and the settings of NCCL that this one is to have.
    """
    with _named(f"{name} {'_'.join(map(str, ranks))}"):
        group = dist.new_group(
            list(ranks),
            timeout=None if like is None else _timeout_of(like),
            use_local_synchronization=True,
            pg_options=None if like is None else _nccl_options_of(like),
            group_desc=name,
        )
    assert isinstance(group, dist.ProcessGroup), f"this rank is not one of {ranks}"
    return group


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Let `new_group` give a group this name, and leave no trace for the groups after it.

    torch names groups by counters that it takes to be the same on every rank: those that all ranks
    make together by the number of groups made before, and one that its members alone make by that
    number too, or (2.13) by the number of groups that this rank is in. A pipeline stage without MoE
    layers makes none of ours, so the next group of all ranks would have two names and hang. Where
    the launch has bound a device, it would be split off from all ranks together, which hangs too.
    """
    world, default = distributed_c10d._world, distributed_c10d._get_default_group()
    name_of, count = distributed_c10d._hash_ranks_to_str, world.group_count
    device = default.bound_device_id
    distributed_c10d._hash_ranks_to_str = lambda ranks: name
    default.bound_device_id = None
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str, world.group_count = name_of, count
        default.bound_device_id = device


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The time limit that Megatron gave its group (--distributed-timeout-minutes), for ours."""
    return getattr(_options_of(group), "_timeout", None)


def _nccl_options_of(group: dist.ProcessGroup) -> Any:
    """The settings of NCCL that Megatron gave its group (--nccl-communicator-config-path,
    --high-priority-stream-groups), for ours; None where it is not NCCL's."""
    if dist.get_backend(group) != "nccl":
        return None
    given, options = _options_of(group), dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = given.is_high_priority_stream
    for name in NCCL_SETTINGS:
        value = getattr(given.config, name)
        # None is left out: torch would copy a text that is not there.
        if value is not None:
            setattr(options.config, name, value)
    return options


def _options_of(group: dist.ProcessGroup) -> Any:
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    return getattr(group._get_backend(device), "options", None)


def _peer_group(name: str, group: dist.ProcessGroup, node_of: dict[int, int]) -> PeerGroup:
    ranks = dist.get_process_group_ranks(group)
    return PeerGroup(
        name=name,
        process_group=group,
        size=len(ranks),
        rank=dist.get_group_rank(group, dist.get_rank()),
        nodes=tuple(node_of[rank] for rank in ranks),
    )
