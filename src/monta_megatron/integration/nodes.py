"""The nodes of an exchange, by an option, by MONTA_NODE, by the cluster file, or by the hosts."""

import torch.distributed as dist

from monta_megatron.chains.layout import (
    check_named_alike,
    consecutive_nodes,
    is_named,
    mixed_node,
    node_here,
    number_nodes,
)
from monta_megatron.common.units import counted
from monta_megatron.common.version import __version__
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.integration.agreement import check_same_rule
from monta_megatron.integration.options import AUTO, Options


def nodes_of_exchange(
    options: Options, group: dist.ProcessGroup
) -> tuple[tuple[int, ...], str | None]:
    """Find the node of every rank of an exchange; all of its ranks call this.

    Args:
        options: of the dispatcher.
        group: the ranks of the exchange.

    Returns:
        The nodes, numbered from 0, and what users should know about them, or None.

    Raises:
        ValueError: the ranks differ in their options, or the nodes of the cluster file cannot
            be these hosts; on all ranks.
    """
    cluster, ranks_per_node = options.cluster, options.ranks_per_node
    if cluster is None or ranks_per_node is not None or is_named():
        cluster = None
    else:
        ranks_per_node = cluster.ranks_per_node
    rule = {
        "monta_megatron": __version__,
        # Those that calibrate do it together, before they agree on how they choose.
        "chain": AUTO if options.named_chain is None else options.named_chain.name,
        "moe_monta_calibrate_seconds": options.calibrate_seconds,
        "ranks_per_node": ranks_per_node,
        # Only its nodes are held against the hosts, which all ranks do or none does.
        "the cluster of ranks_per_node": None if cluster is None else cluster.name,
    }
    ranks = dist.get_process_group_ranks(group)
    hosts, named, rules = zip(*gather_objects((node_here(), is_named(), rule), group), strict=True)
    check_named_alike(named, ranks)
    check_same_rule(rules, ranks)
    if ranks_per_node is None:
        return number_nodes(hosts), None
    nodes = consecutive_nodes(ranks, ranks_per_node)
    if cluster is None or nodes == number_nodes(hosts):
        return nodes, None
    mixed = mixed_node(nodes, hosts)
    if mixed is not None:
        first, second = mixed
        raise ValueError(
            f"moe_monta_cluster: {cluster.name} has nodes of {ranks_per_node} consecutive ranks, "
            f"but of one node rank {ranks[first]} is on {hosts[first]}, which has other nodes too, "
            f"and rank {ranks[second]} on {hosts[second]}; number the ranks host by host (srun "
            "--distribution=block), or set MONTA_NODE or --moe-monta-ranks-per-node"
        )
    return nodes, (
        f"nodes of {counted(ranks_per_node, 'rank')}, as {cluster.name} has them, but "
        f"{hosts.count(hosts[0])} of the {len(ranks)} ranks of an exchange are on {hosts[0]}; "
        "--moe-monta-ranks-per-node decides"
    )
