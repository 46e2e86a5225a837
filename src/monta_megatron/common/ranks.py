"""The rank of this process, its node, and the lines that ranks print for users.

Ranks that share a node are joined by the node link. A rank learns from its system on which host it
runs; the ranks of an exchange share this once. A host is a node, unless a cluster file says how
many consecutive ranks are one, MONTA_NODE names the nodes, or `--moe-monta-ranks-per-node`
overrides all of that.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from monta_megatron.common.text import shown

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


OTHER_RANKS_LINGER_S = 5.0
OTHER_NODES_LINGER_S = 10.0
_printed: set[str] = set()


def is_first_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank reports for all; also true in a process that no launcher started."""
    return environ.get("RANK", "0") == "0"


def print_once(line: str) -> None:
    """Print a line, unless this process has printed it before; ranks above 0 name themselves."""
    # Commands use the other functions without torch.
    import torch.distributed as dist

    if line in _printed:
        return
    _printed.add(line)
    rank = dist.get_rank() if dist.is_initialized() else 0
    where = "monta" if rank == 0 else f"monta, rank {rank}"
    # Printed, as Megatron prints what users should see; its log starts at WARNING.
    print(shown(f"{where}: {line}"), flush=True)


def linger(time_s: float = OTHER_RANKS_LINGER_S) -> None:
    """Let the first rank report why before a silent rank's exit makes torchrun end all ranks."""
    time.sleep(time_s)


def report(line: str, environ: Mapping[str, str] = os.environ) -> None:
    """Report a mistake on standard error, if possible in one line for all ranks that make it.

    The first rank does so at once, and its end ends the launch. A rank that is still there after a
    while has made the mistake without it, as where one node lacks a file, and reports it too; first
    ranks of nodes come before the others. Where a launcher lets nodes end by themselves, that is
    one line per node.
    """
    line = shown(line)
    if not is_first_rank(environ):
        is_first_of_node = environ.get("LOCAL_RANK") == "0"
        linger(OTHER_NODES_LINGER_S + (0 if is_first_of_node else OTHER_RANKS_LINGER_S))
        line += f" (rank {environ['RANK']} on {os.uname().nodename})"
    print(line, file=sys.stderr, flush=True)
