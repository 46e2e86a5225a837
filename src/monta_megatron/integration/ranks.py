"""Ranks of an expert group: their nodes, agreement and reports.

An expert group is the TP x EP ranks that share the experts of a layer (Megatron's `tp_ep` group).
The expert groups of a pipeline stage are replicas of each other.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from monta_megatron.common.errors import UserError
from monta_megatron.common.nodes import consecutive_nodes, number_nodes
from monta_megatron.exchange.collectives import share_with_group
from monta_megatron.integration.options import Options


def reports_for_stage(expert_group: dist.ProcessGroup, pg_collection: Any) -> bool:
    """Whether this rank is its pipeline stage's first: the first of its first expert group."""
    replicas = getattr(pg_collection, "expt_dp", None)
    if replicas is None:
        return dist.get_rank() == 0
    groups = expert_group, replicas
    return all(dist.get_group_rank(group, dist.get_rank()) == 0 for group in groups)


T = TypeVar("T")

SAME_OPTIONS = "give every rank the same options and files"
ADVICE = {"step": "an optimizer has to make a step on all ranks or on none"}


def check_same_config(by_rank: Sequence[dict[str, Any]], ranks: Sequence[int]) -> None:
    """Check that the values of all ranks are the same.

    Raises:
        UserError: a rank differs; the message names the first such rank and the field.
    """
    for rank, other in zip(ranks[1:], by_rank[1:], strict=True):
        for name in dict.fromkeys((*by_rank[0], *other)):
            values = by_rank[0].get(name), other.get(name)
            if values[0] != values[1]:
                raise UserError(
                    f"moe_monta: ranks {ranks[0]} and {rank} differ in {name}: {values[0]} and "
                    f"{values[1]}; {ADVICE.get(name, SAME_OPTIONS)}"
                )


def on_every_expert_group(
    set_up: Callable[[], tuple[T, dict[str, Any]]],
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None,
) -> T:
    """Set up this rank's expert group, or fail with all ranks of the stage's groups.

    Args:
        set_up: also returns values that all groups have to share.
        group: the expert group.
        replicas: the ranks with this rank's position in the stage's groups; None if unknown.

    Raises:
        UserError: as `share_with_group`, like other exceptions; or the groups differ.
    """

    def in_group() -> tuple[T, dict[str, Any]]:
        result, (agreed, *_) = share_with_group(set_up, group)
        return result, agreed

    if replicas is None:
        return in_group()[0]
    result, by_group = share_with_group(in_group, replicas, "in the expert group of rank")
    check_same_config(by_group, dist.get_process_group_ranks(replicas))
    return result


def nodes_of_ranks(
    options: Options, ranks: Sequence[int], hosts: Sequence[str]
) -> tuple[tuple[int, ...], str | None]:
    """The node of each rank by options and hosts (or MONTA_NODE); see `Cluster.nodes_of`."""
    if options.ranks_per_node is not None:
        return consecutive_nodes(ranks, options.ranks_per_node), None
    if options.cluster is None or os.environ.get("MONTA_NODE"):
        return number_nodes(hosts), None
    return options.cluster.nodes_of(ranks, hosts)
