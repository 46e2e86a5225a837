"""Finds which ranks share a node: the set of ranks joined by the node link.

A rank learns from its launcher and its host name on which host it runs; the ranks of an exchange
share this once. A host is a node, unless a cluster file says how many consecutive ranks are one,
MONTA_NODE names the nodes, or `--moe-monta-ranks-per-node` overrides all of that.
"""

import os
import socket
from collections.abc import Mapping, Sequence

from monta_megatron.common.texts import check_printable


def is_named(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether MONTA_NODE gives the name of this rank's node, such as that of its NVLink domain."""
    return bool(environ.get("MONTA_NODE"))


def node_here(environ: Mapping[str, str] = os.environ) -> str:
    """A name that exactly the ranks of this node share.

    It is MONTA_NODE if that is set. Otherwise it is that of this host: torchrun numbers its agents
    (GROUP_RANK), of which one runs on each host, and srun numbers the hosts (SLURM_NODEID). Host
    names alone could be the same, and numbers too, in a job of several parts.

    Raises:
        ValueError: MONTA_NODE is not one line of printable characters.
    """
    if is_named(environ):
        return check_printable(environ["MONTA_NODE"], "MONTA_NODE")
    host = socket.gethostname()
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        if name in environ:
            return f"{host} ({name} {environ[name]})"
    return host


def check_named_alike(named: Sequence[bool], ranks: Sequence[int]) -> None:
    """Make sure that MONTA_NODE is set on all ranks, or on none.

    Args:
        named: `is_named` of each rank.
        ranks: their numbers, for the message.

    Raises:
        ValueError: MONTA_NODE is set on some of them only.
    """
    if len(set(named)) > 1:
        with_name, without = ranks[named.index(True)], ranks[named.index(False)]
        raise ValueError(
            f"MONTA_NODE: set on rank {with_name} and not on rank {without}, must be set on every "
            "rank or on none"
        )


def number_nodes(names: Sequence[str]) -> tuple[int, ...]:
    """The node of every rank, numbered from 0 in the order of first appearance."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def consecutive_nodes(ranks: Sequence[int], ranks_per_node: int) -> tuple[int, ...]:
    """The node of every rank, where `ranks_per_node` consecutive ones are on each."""
    return number_nodes([str(rank // ranks_per_node) for rank in ranks])


def mixed_node(nodes: Sequence[int], hosts: Sequence[str]) -> tuple[int, int] | None:
    """Positions of two ranks of one node on two hosts, the first of which has other nodes too.

    None if every node is made of whole hosts or lies on one. A host may be several nodes, and a
    node several hosts, but where ranks were dealt out to hosts in turn they are neither.
    """
    nodes_of: dict[str, set[int]] = {}
    for node, host in zip(nodes, hosts, strict=True):
        nodes_of.setdefault(host, set()).add(node)
    # node -> its first rank on each host.
    firsts: dict[int, dict[str, int]] = {}
    for position, (node, host) in enumerate(zip(nodes, hosts, strict=True)):
        firsts.setdefault(node, {}).setdefault(host, position)
    for first_on in firsts.values():
        for host, position in first_on.items():
            if len(first_on) > 1 and len(nodes_of[host]) > 1:
                other = next(name for name in first_on if name != host)
                return position, first_on[other]
    return None
