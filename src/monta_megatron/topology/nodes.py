"""Which ranks share a node: the set of ranks joined by the fast tier.

A rank is told by its launcher, or else by its host's name, on which node it runs; the ranks of an
exchange tell each other once. Where that is wrong, `--moe-monta-ranks-per-node` says it instead.
"""

import os
import socket
from collections.abc import Mapping, Sequence


def node_here(environ: Mapping[str, str] = os.environ) -> str:
    """A name that this rank shares with the ranks of its node alone.

    torchrun numbers its agents (GROUP_RANK), of which one runs on each node; srun numbers the
    nodes (SLURM_NODEID). Any other launcher leaves the host's name.
    """
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        if name in environ:
            return f"{name}={environ[name]}"
    return f"host {socket.gethostname()}"


def number_nodes(names: Sequence[str]) -> tuple[int, ...]:
    """The node of every rank, numbered in the order in which the ranks name them."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(name, len(numbers)) for name in names)


def ranks_per_node_from_launcher(environ: Mapping[str, str] = os.environ) -> int | None:
    """Ranks on this rank's node as the launcher tells it, or None where it does not.

    torchrun sets LOCAL_WORLD_SIZE; srun sets SLURM_NTASKS_PER_NODE where it was asked for.

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
