"""Run a command on an emulated cluster.

Run CMD, a Python script, -m MODULE or monta COMMAND, as torchrun does, on every rank of a cluster
that is emulated here: network namespaces are the nodes, their NICs are limited to a rate, CPU ranks
talk over Gloo between nodes and through memory inside, and reach nothing else. Rank 0's standard
output passes through untouched, everything else goes to standard error, with --json rank 0's too;
the exit status is that of the first rank to fail.

example:
  monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \\
      monta bench --experts 64 --top-k 8 --hidden 1024 --tokens 512
"""

import argparse
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from monta_megatron.common.rules import positive, require, whole

# Addresses are 10.77.NODE.1; each rank takes two of the 1,024 files that a process may open.
MOST_NODES, MOST_RANKS = 250, 400


def add_arguments(parser: Any) -> None:
    """Add all flags."""
    parser.add_argument("--nodes", type=whole(2), required=True, help="number of nodes")
    parser.add_argument("--ranks-per-node", type=whole(1), required=True, help="CPU ranks of each")
    rate = "limit of every node's NIC in each direction, in 1e6 bits per second"
    parser.add_argument("--inter-mbit", type=positive, required=True, help=rate)
    parser.keep_after_dashes("cmd")


def run(parsed: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    from monta_megatron.emulation.cluster import EmulatedCluster
    from monta_megatron.emulation.emulator import run as run_in_sandbox

    nodes, ranks_per_node, inter_mbit = parsed.nodes, parsed.ranks_per_node, parsed.inter_mbit
    num_ranks = nodes * ranks_per_node
    rule = f"be at most {MOST_NODES}, of {MOST_RANKS} ranks"
    fits = nodes <= MOST_NODES and num_ranks <= MOST_RANKS
    require(fits, "--nodes", f"{nodes} of {ranks_per_node}", rule)
    command = _checked(parsed.cmd, num_ranks)
    cluster = EmulatedCluster(nodes=nodes, ranks_per_node=ranks_per_node, inter_mbit=inter_mbit)
    emulator = [sys.executable, "-m", "monta_megatron.emulation.emulator"]
    as_json = ["--json"] if parsed.json else []
    return run_in_sandbox([*emulator, *as_json, cluster.to_json(), *command])


def _checked(words: Sequence[str], num_ranks: int) -> list[str]:
    """The command that every rank starts, with a mistake found before that where it is cheap.

    Raises:
        ValueError: it cannot start.
        SystemExit: it is a command of ours with a mistake, which has been reported.
    """
    command = ["-m", "monta_megatron", *words[1:]] if words[:1] == ["monta"] else list(words)
    shown = " ".join(command[:2])
    if command[:1] != ["-m"]:
        rule = "be a Python script that exists, -m MODULE, or monta COMMAND, after --"
        require(bool(command) and Path(command[0]).is_file(), "CMD", repr(shown), rule)
    elif shown == "-m monta_megatron":
        from monta_megatron.cli import build_parser

        inner = build_parser().parse_args(command[2:])
        if inner.check is not None:
            inner.check(inner, num_ranks)
    else:
        # As `python -m` does, in this folder first; a part of a package would import the whole.
        first = shown.removeprefix("-m").strip().partition(".")[0]
        is_found = first and (PathFinder.find_spec(first, [str(Path.cwd())]) or find_spec(first))
        require(bool(is_found), "CMD", repr(shown), f"be a module that {sys.executable} finds")
    return command
