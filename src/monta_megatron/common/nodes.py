"""Nodes: the name of this rank's, and numbers for those of all ranks.

Ranks that share a node are joined by the node link. The ranks of an exchange share their names
once. A host is a node, unless a cluster file says how many consecutive ranks are one, MONTA_NODE
names the nodes, or `--moe-monta-ranks-per-node` overrides all of that.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

# The same in all containers of a host, and another on every host.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_here(environ: Mapping[str, str] = os.environ) -> str:
    """A name that exactly the ranks of this node share.

    It is MONTA_NODE if that is set, such as the name of an NVLink domain. Otherwise it is that of
    this host, as NCCL finds it, which uses the node link only where this is the same: NCCL_HOSTID,
    or else the host's name and the identity of its last start, since containers on several hosts
    may have one name. Launchers' numbers do not tell: torchrun may have several agents on a host.
    """
    given = environ.get("MONTA_NODE") or environ.get("NCCL_HOSTID")
    # A sandbox may lack the file.
    boot = BOOT_ID.read_text(encoding="ascii").strip() if BOOT_ID.exists() else "unknown"
    return given or f"{socket.gethostname()} (boot {boot})"


def number_nodes(names: Sequence[str]) -> tuple[int, ...]:
    """The node of every rank, numbered from 0 in the order of first appearance."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def consecutive_nodes(ranks: Sequence[int], ranks_per_node: int) -> tuple[int, ...]:
    """The node of every rank, where `ranks_per_node` consecutive ones are on each."""
    return number_nodes([str(rank // ranks_per_node) for rank in ranks])
