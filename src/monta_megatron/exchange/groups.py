"""The process groups of an exchange: Megatron's own, and the rails and nodes made from them."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from monta_megatron.chains import Chain, Layout
from monta_megatron.chains.stages import AllGather, AllToAll
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.topology.nodes import node_here, node_of_rank, number_nodes

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
        return number_nodes([str(node_of_rank(rank, ranks_per_node)) for rank in ranks])
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
    timeout = _timeout_of(megatron_groups["tp_ep"])
    # In this order on every rank.
    for name in ("node", "rail"):
        if name in names:
            members = layout.members(name, layout.rank)
            groups[name] = _group_of([ranks[each] for each in members], timeout)
    return {name: _peer_group(name, groups[name], node_of) for name in sorted(names)}


def _group_of(ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup:
    key = tuple(ranks)
    if key not in _made:
        group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup), f"this rank is not one of {ranks}"
        _made[key] = group
    return _made[key]


def _timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """The time limit that Megatron gave its group (--distributed-timeout-minutes), for ours."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def _peer_group(name: str, group: dist.ProcessGroup, node_of: dict[int, int]) -> PeerGroup:
    ranks = dist.get_process_group_ranks(group)
    return PeerGroup(
        name=name,
        process_group=group,
        size=len(ranks),
        rank=dist.get_group_rank(group, dist.get_rank()),
        nodes=tuple(node_of[rank] for rank in ranks),
    )
