"""Ranks of an exchange: their nodes, agreement, reports, and the registered MoE layers."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import torch.distributed as dist

from monta_megatron.common.nodes import (
    check_named_alike,
    consecutive_nodes,
    is_named,
    mixed_node,
    number_nodes,
)
from monta_megatron.common.text import shown
from monta_megatron.common.units import counted
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.integration.options import Options

_layers: WeakSet[Any] = WeakSet()


def add_layer(layer: Any) -> None:
    """Register an MoE layer; held weakly."""
    _layers.add(layer)


def layers() -> list[Any]:
    """The MoE layers that have our dispatcher now, by their numbers in the model.

    In inference Megatron may put another dispatcher in its place.
    """
    ours = [layer for layer in _layers if hasattr(layer.token_dispatcher, "chooser")]
    return sorted(ours, key=lambda layer: layer.layer_number or 0)


_reported: set[str] = set()


class Report:
    """Prints each line once, if this rank reports for its stage.

    Each stage may have a chain of its own.
    """

    def __init__(self, reports: bool) -> None:
        self._reports = reports

    def __call__(self, line: str) -> None:
        """Print a line, unless this process has printed it before."""
        if not self._reports or line in _reported:
            return
        _reported.add(line)
        rank = dist.get_rank()
        where = "monta" if rank == 0 else f"monta, rank {rank}"
        # Printed, as Megatron prints what users should see; its log starts at WARNING.
        print(shown(f"{where}: {line}"), flush=True)


def reports_for_stage(exchange: dist.ProcessGroup, pg_collection: Any) -> bool:
    """Whether this rank reports for its pipeline stage: the first rank of its first exchange."""
    exchanges = getattr(pg_collection, "expt_dp", None)
    if exchanges is None:
        return dist.get_rank() == 0
    return all(dist.get_group_rank(group, dist.get_rank()) == 0 for group in (exchange, exchanges))


T = TypeVar("T")

SAME_OPTIONS = "give every rank the same options and files"
ADVICE = {"step": "an optimizer has to make a step on all ranks or on none"}


def agree(rule: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Make sure that all ranks of an exchange choose by the same rule.

    Raises:
        ValueError: names the first rank that differs, and the field.
    """
    check_same_config(gather_objects(rule, group), dist.get_process_group_ranks(group))


def check_same_config(rules: Sequence[dict[str, Any]], ranks: Sequence[int]) -> None:
    """Make sure that the rules of all ranks are the same.

    Raises:
        ValueError: names the first rank that differs, and the field.
    """
    for rank, other in zip(ranks[1:], rules[1:], strict=True):
        for name in dict.fromkeys((*rules[0], *other)):
            values = rules[0].get(name), other.get(name)
            if values[0] != values[1]:
                raise ValueError(
                    f"moe_monta: ranks {ranks[0]} and {rank} differ in {name}: {values[0]} and "
                    f"{values[1]}; {ADVICE.get(name, SAME_OPTIONS)}"
                )


def on_every_exchange(
    set_up: Callable[[], T], exchanges: dist.ProcessGroup | None, rule: dict[str, Any]
) -> T:
    """Set up this rank's exchange, if all exchanges of the pipeline stage can be set up.

    Otherwise one would end for its nodes, and the ranks of the others wait for it forever.

    Args:
        set_up: raises ValueError on all ranks of an exchange, or on none.
        exchanges: the ranks that have this rank's position in the stage's other exchanges; None if
            they are not known.
        rule: what all exchanges have to agree on.

    Raises:
        ValueError: `set_up` raised it, here or on another exchange; or the exchanges differ in
            their rules, or in whether MONTA_NODE is set.
    """
    problems, result = [], None
    try:
        result = set_up()
    except ValueError as error:
        problems = [str(error)]
    if exchanges is not None and dist.get_world_size(exchanges) > 1:
        ranks = dist.get_process_group_ranks(exchanges)
        answers = gather_objects((problems, is_named(), rule), exchanges)
        problems += [
            f"{problem} (on the exchange of rank {rank})"
            for rank, (elsewhere, _, _) in zip(ranks, answers, strict=True)
            for problem in elsewhere
        ]
        if not problems:
            check_named_alike([named for _, named, _ in answers], ranks)
            check_same_config([rule for _, _, rule in answers], ranks)
    if problems:
        raise ValueError(problems[0])
    assert result is not None, "set up, or raised"
    return result


def find_nodes(
    options: Options, ranks: Sequence[int], hosts: Sequence[str]
) -> tuple[tuple[int, ...], str | None]:
    """Find the node of every rank of an exchange.

    Args:
        options: of the dispatcher.
        ranks: of the exchange.
        hosts: their hosts, or what MONTA_NODE names.

    Returns:
        The nodes, numbered from 0, and what users should know about them, or None.

    Raises:
        ValueError: the nodes of the cluster file cannot be these hosts.
    """
    cluster = options.cluster
    if options.ranks_per_node is not None:
        return consecutive_nodes(ranks, options.ranks_per_node), None
    if cluster is None or is_named():
        return number_nodes(hosts), None
    ranks_per_node = cluster.ranks_per_node
    nodes = consecutive_nodes(ranks, ranks_per_node)
    if nodes == number_nodes(hosts):
        return nodes, None
    if cluster.ranks_per_host is None and len(set(hosts)) > len(set(nodes)):
        # A host used in part: no node has ranks of two hosts.
        return number_nodes(hosts), (
            f"nodes are the hosts of this job, which have fewer ranks than the {ranks_per_node} of "
            f"a node of {cluster.name}"
        )
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
