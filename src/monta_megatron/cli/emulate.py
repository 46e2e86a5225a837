"""`monta emulate`: run a command on every rank of nodes that are network namespaces."""

import argparse
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Addresses are 10.77.NODE.1; each rank takes two of the 1,024 files that a process may open.
_MAX_NODES, _MAX_RANKS = 250, 400
_MAX_INTER_MBIT = 100_000

EXAMPLE = """\
example:
  monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \\
      monta bench --experts 64 --top-k 8 --hidden 1024 --tokens 512
"""


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "emulate",
        usage="monta emulate [-h] (--nodes N | --world-size N) --ranks-per-node M\n"
        "                     --inter-mbit R [--json] -- CMD...",
        help="run a command on an emulated cluster",
        description="Run CMD, as torchrun does, on every rank of a cluster that is emulated here: "
        "network namespaces are the nodes, their NICs are limited to a rate, CPU ranks talk over "
        "Gloo between nodes and through memory inside, and reach nothing else. Rank 0's standard "
        "output passes through untouched, everything else goes to standard error; the exit status "
        "is that of the first rank to fail.",
        epilog=EXAMPLE,
    )
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--nodes", type=int, metavar="N", help="nodes")
    size.add_argument("--world-size", type=int, metavar="N", help="ranks of all nodes")
    parser.add_argument(
        "--ranks-per-node", type=int, required=True, metavar="M", help="CPU ranks of each node"
    )
    parser.add_argument(
        "--inter-mbit",
        type=float,
        required=True,
        metavar="R",
        help="limit of every node's NIC in each direction, in 1e6 bits per second",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the cluster, its measured rates and the exit status as one JSON document; "
        "rank 0's output then goes to standard error too",
    )
    parser.add_argument(
        "cmd",
        nargs=argparse.REMAINDER,
        metavar="-- CMD",
        help="a Python script, -m MODULE or monta COMMAND, with its arguments",
    )
    # A command whose `--` was forgotten.
    parser.add_argument(
        "-m", dest="without_dashes", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    from monta_megatron.emulation.cluster import EmulatedCluster
    from monta_megatron.emulation.emulator import run as run_in_sandbox

    _check_range("--ranks-per-node", parsed.ranks_per_node, 1, _MAX_RANKS // 2)
    if parsed.nodes is None:
        parsed.nodes, rest = divmod(parsed.world_size, parsed.ranks_per_node)
        if rest:
            raise ValueError(
                f"--world-size: got {parsed.world_size}, must be a multiple of --ranks-per-node "
                f"({parsed.ranks_per_node})"
            )
    _check_range("--nodes", parsed.nodes, 2, min(_MAX_NODES, _MAX_RANKS // parsed.ranks_per_node))
    _check_range("--inter-mbit", parsed.inter_mbit, 1, _MAX_INTER_MBIT)
    if parsed.without_dashes is not None:
        raise ValueError(
            "CMD: `--` is missing, must be before it: monta emulate ... -- -m "
            + " ".join(parsed.without_dashes[:2])
        )
    command = _checked_command(parsed.cmd, parsed.nodes * parsed.ranks_per_node, parsed.parser)
    cluster = EmulatedCluster(
        nodes=parsed.nodes,
        ranks_per_node=parsed.ranks_per_node,
        inter_mbit=parsed.inter_mbit,
    )
    emulator = [sys.executable, "-m", "monta_megatron.emulation.emulator"]
    as_json = ["--json"] if parsed.json else []
    return run_in_sandbox([*emulator, *as_json, cluster.to_json(), *command])


def _checked_command(
    words: list[str], num_ranks: int, parser: argparse.ArgumentParser
) -> list[str]:
    """Command that every rank starts, checked without importing it.

    Args:
        words: what follows the flags.
        num_ranks: how many ranks run it.
        parser: of `monta`.

    Raises:
        ValueError: it cannot start.
        SystemExit: it is a command of ours with a mistake, which has been reported.
    """
    command = words[1:] if words[:1] == ["--"] else words
    rule = "a Python script that exists, -m MODULE, or monta COMMAND"
    if not command:
        raise ValueError(f"CMD: missing, must be {rule}, after `--`")
    if command[0] == "monta":
        command = ["-m", "monta_megatron", *command[1:]]
    if command[0] != "-m":
        if not Path(command[0]).is_file():
            raise ValueError(f"CMD: got {command[0]!r}, must be {rule}")
        return command
    if len(command) == 1:
        raise ValueError("CMD: got '-m' alone, must be followed by a module's name")
    module, *arguments = command[1:]
    if module in ("monta_megatron", "monta_megatron.cli"):
        inner = parser.parse_args(arguments)
        if "check" in inner:
            inner.check(inner, num_ranks)
    elif not _is_module(module):
        raise ValueError(f"CMD: got '-m {module}', must be a module that {sys.executable} finds")
    return command


def _is_module(name: str) -> bool:
    """Whether `python -m NAME` finds something, in this folder first; nothing is imported."""
    first, *rest = name.split(".")
    if not all(part.isidentifier() for part in (first, *rest)):
        return False
    spec = PathFinder.find_spec(first, [str(Path.cwd())]) or find_spec(first)
    path = first
    while spec is not None and (rest or spec.submodule_search_locations is not None):
        # A package runs by its __main__.
        path = f"{path}.{rest.pop(0) if rest else '__main__'}"
        spec = PathFinder.find_spec(path, spec.submodule_search_locations or [])
    return spec is not None


def _check_range(name: str, value: float, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value:g}, must be from {low} to {high}")
