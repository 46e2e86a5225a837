"""Layout of an exchange: a rank's place, its nodes, and the groups that stages name. No torch.

Ranks that share a node are joined by the node link. A rank learns from its system on which host it
runs; the ranks of an exchange share this once. A host is a node, unless a cluster file says how
many consecutive ranks are one, MONTA_NODE names the nodes, or `--moe-monta-ranks-per-node`
overrides all of that.

Rails and nodes have communicators of ours.

Notation: S = source ranks = EP * ETP, L = local experts per EP rank.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from monta_megatron.common.text import check_printable

GroupName: TypeAlias = Literal["ep", "etp", "tp_ep", "rail", "node"]
# The groups that do not depend on the nodes; only even nodes have rails.
FLAT_GROUPS: tuple[GroupName, ...] = ("ep", "etp", "tp_ep")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One rank's place in the exchange: all that a chain needs besides the counts.

    Attributes:
        ep: expert parallel size.
        etp: expert tensor parallel size.
        num_local_experts: L.
        rank: this rank's position among the S = ep * etp ranks of the exchange, ETP fastest.
        nodes: [S] node of every rank of the exchange.
    """

    ep: int
    etp: int
    num_local_experts: int
    rank: int
    nodes: tuple[int, ...]

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes that the ranks of the exchange lie on."""
        return len(set(self.nodes))

    @property
    def ranks_per_node(self) -> int:
        """Ranks of the exchange on each node, if they are spread evenly."""
        return len(self.nodes) // self.num_nodes

    @property
    def node(self) -> int:
        """Position of this rank's node among the nodes of the exchange."""
        return self.rank // self.ranks_per_node

    @property
    def position(self) -> int:
        """Position of this rank on its node."""
        return self.rank % self.ranks_per_node

    @property
    def num_experts(self) -> int:
        """Experts of the exchange."""
        return self.ep * self.num_local_experts

    @property
    def first_expert(self) -> int:
        """The first expert of this rank."""
        return self.rank // self.etp * self.num_local_experts

    def members(self, group: GroupName, rank: int) -> range:
        """The ranks of the exchange in the group named `group` that contains `rank`."""
        size, etp, per_node = len(self.nodes), self.etp, self.ranks_per_node
        first_of_etp, first_of_node = rank - rank % etp, rank - rank % per_node
        by_name: dict[GroupName, range] = {
            "ep": range(rank % etp, size, etp),
            "etp": range(first_of_etp, first_of_etp + etp),
            "tp_ep": range(size),
            "rail": range(rank % per_node, size, per_node),
            "node": range(first_of_node, first_of_node + per_node),
        }
        return by_name[group]

    @cached_property
    def crossing_groups(self) -> frozenset[GroupName]:
        """Names of the groups of which at least one has ranks on several nodes."""
        names = get_args(GroupName) if self.uneven_nodes() is None else FLAT_GROUPS
        return frozenset(
            name
            for name in names
            if any(
                len({self.nodes[member] for member in members}) > 1
                for members in {self.members(name, rank) for rank in range(len(self.nodes))}
            )
        )

    def uneven_nodes(self) -> str | None:
        """Why the ranks are not in order on even nodes of whole ETP groups; None if they are."""
        in_order = tuple(sorted(self.nodes)) == self.nodes
        sizes = {self.nodes.count(node) for node in set(self.nodes)}
        if not in_order or len(sizes) > 1:
            return f"the ranks of the exchange lie on nodes {list(self.nodes)}, not evenly in order"
        if self.ranks_per_node % self.etp != 0:
            return (
                f"an expert tensor parallel group of {self.etp} ranks spans nodes of "
                f"{self.ranks_per_node} ranks"
            )
        return None


# The same in all containers of a host, and another on every host.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

HOST_NUMBERS = ("GROUP_RANK", "SLURM_NODEID")


def is_named(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether MONTA_NODE gives the name of this rank's node, such as that of its NVLink domain."""
    return bool(environ.get("MONTA_NODE"))


def node_here(environ: Mapping[str, str] = os.environ) -> str:
    """A name that exactly the ranks of this node share.

    It is MONTA_NODE if that is set. Otherwise it is that of this host, as NCCL finds it, which uses
    the node link only where this is the same: NCCL_HOSTID if it is set, or else the host's name and
    the identity of its last start, since containers on several hosts may have one name. Launchers'
    numbers do not tell: torchrun may have several agents on a host.

    Raises:
        ValueError: MONTA_NODE is not one line of printable characters.
    """
    if is_named(environ):
        return check_printable(environ["MONTA_NODE"], "MONTA_NODE")
    if environ.get("NCCL_HOSTID"):
        return check_printable(environ["NCCL_HOSTID"], "NCCL_HOSTID")
    host = socket.gethostname()
    try:
        return f"{host} (boot {BOOT_ID.read_text(encoding='ascii').strip()})"
    except OSError:
        # No Linux, or a sandbox without it: numbers of torchrun's agents and of srun's hosts.
        numbers = (f"{name} {environ[name]}" for name in HOST_NUMBERS if name in environ)
        number = next(numbers, None)
        return host if number is None else f"{host} ({number})"


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


OWN_GROUPS = ("node", "rail")
