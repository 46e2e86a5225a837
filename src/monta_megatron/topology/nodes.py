"""Finds which ranks share a node: the set of ranks joined by the fast tier.

A rank learns from its launcher, or else from its host name, on which node it runs; the ranks of an
exchange share this once. Where that is wrong, `--moe-monta-ranks-per-node` overrides it.
"""

import os
import socket
from collections.abc import Mapping, Sequence


def node_here(environ: Mapping[str, str] = os.environ) -> str:
    """A name that exactly the ranks of this node share.

    torchrun numbers its agents (GROUP_RANK), of which one runs on each node; srun numbers the
    nodes (SLURM_NODEID). With any other launcher it is the host name.
    """
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        if name in environ:
            return f"{name}={environ[name]}"
    return f"host {socket.gethostname()}"


def number_nodes(names: Sequence[str]) -> tuple[int, ...]:
    """The node of every rank, numbered from 0 in the order of first appearance."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def ranks_per_node_from_launcher(environ: Mapping[str, str] = os.environ) -> int | None:
    """Ranks on this rank's node according to the launcher; None if it does not say.

    torchrun sets LOCAL_WORLD_SIZE; srun sets SLURM_NTASKS_PER_NODE if it was asked for.

    Raises:
        ValueError: the launcher's variable is not a positive integer.
    """
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = environ.get(name)
        if value is None:
            continue
        if not value.isdigit() or int(value) < 1:
            raise ValueError(f"{name}: got {value!r}, must be a positive integer")
        return int(value)
    return None
