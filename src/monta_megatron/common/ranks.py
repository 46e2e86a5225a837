"""Lines that the ranks of a launch print for users, and which rank prints them."""

import os
import sys
import time
from collections.abc import Mapping

from monta_megatron.common.text import shown

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
