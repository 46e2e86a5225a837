"""Which ranks share a node: the set of ranks joined by the fast tier."""

import os
from collections.abc import Mapping


def ranks_per_node_from_launcher(environ: Mapping[str, str] = os.environ) -> int | None:
    """Ranks on each node as the launcher tells it, or None where it does not.

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


def node_of_rank(rank: int, ranks_per_node: int) -> int:
    """Node of a global rank, where the ranks of a node follow each other."""
    return rank // ranks_per_node
