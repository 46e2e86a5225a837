"""Ranks of an expert group: their nodes, agreement and reports.

An expert group is the TP x EP ranks that share the experts of a layer (Megatron's `tp_ep` group).
The expert groups of a pipeline stage are replicas of each other.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from monta_megatron.common.errors import UserError
from monta_megatron.common.nodes import consecutive_nodes, number_nodes
from monta_megatron.integration.options import Options


def reports_for_stage(expert_group: dist.ProcessGroup, pg_collection: Any) -> bool:
    """Whether this rank is its pipeline stage's first: the first of its first expert group."""
    replicas = getattr(pg_collection, "expt_dp", None)
    if replicas is None:
        return dist.get_rank() == 0
    groups = expert_group, replicas
    return all(dist.get_group_rank(group, dist.get_rank()) == 0 for group in groups)


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


def nodes_of_ranks(
    options: Options, ranks: Sequence[int], hosts: Sequence[str]
) -> tuple[tuple[int, ...], str | None]:
    """The node of each rank by options and hosts (or MONTA_NODE); see `Cluster.nodes_of`."""
    if options.ranks_per_node is not None:
        return consecutive_nodes(ranks, options.ranks_per_node), None
    if options.cluster is None or os.environ.get("MONTA_NODE"):
        return number_nodes(hosts), None
    return options.cluster.nodes_of(ranks, hosts)
