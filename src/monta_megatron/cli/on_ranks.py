"""Commands on the ranks of a launch: `calibrate`, `bench`, and `emulate`, which starts ranks."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from monta_megatron.cli.parser import Parser, only_the_report
from monta_megatron.common.errors import UserError
from monta_megatron.common.ranks import is_first_rank, linger
from monta_megatron.common.rules import positive, require, whole
from monta_megatron.common.text import Progress, print_report, tell
from monta_megatron.tools.bench.report import MismatchError
from monta_megatron.tools.bench.settings import FLAGS, parse_settings

if TYPE_CHECKING:
    import torch

# Addresses are 10.77.NODE.1; each rank takes two of the 1,024 files that a process may open.
MAX_NODES, MAX_RANKS = 250, 400


def world_size_of_launch(command: str) -> int:
    """Number of ranks, from the variables that a launcher sets.

    Args:
        command: sub-command of `monta` and its required flags, for the message.

    Raises:
        UserError: no launcher has set them.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise UserError(
            "RANK, WORLD_SIZE: not set, must be; start one process per rank: torchrun "
            f"--nproc-per-node N -m monta_megatron {command} ..., or monta emulate"
        )
    return int(os.environ["WORLD_SIZE"])


@contextmanager
def joined_launch(command: str) -> "Iterator[tuple[torch.device, Progress]]":
    """Join the launch on this rank; yields its device and its progress line.

    Args:
        command: sub-command of `monta`, which the progress line of the first rank names.

    Raises:
        SystemExit: with status 1, where results differ from stock's; the first rank prints them.
    """
    from monta_megatron.exchange.collectives import join_launch

    try:
        with only_the_report():
            device = join_launch(int(os.environ.get("LOCAL_RANK", "0")))
            yield device, Progress(command if is_first_rank() else None)
    except MismatchError as error:
        if is_first_rank():
            print(f"monta {command}: results differ, nothing was timed\n{error}", file=sys.stderr)
        else:
            linger()
        sys.exit(1)


def add_calibrate_arguments(parser: Parser) -> None:
    """Add all flags."""
    parser.add_argument(
        "--out", metavar="FILE", type=Path, required=True, help="Cluster file to write."
    )
    parser.add_argument(
        "--budget-seconds",
        metavar="SECONDS",
        type=positive,
        default=60.0,
        help="Time budget; the smallest sizes are measured even beyond it (default: 60).",
    )
    parser.add_argument(
        "--ranks-per-node",
        metavar="N",
        type=whole(1),
        help="Ranks per node, all joined by the node link (default: from the launcher).",
    )
    parser.add_argument(
        "--nics-per-node",
        metavar="N",
        type=whole(1),
        help="Network interfaces per node; required with several nodes.",
    )


def run_calibrate(parsed: argparse.Namespace) -> int:
    """Measure a cluster file for plan and bench.

    Time collectives, copies, and pairs of them that run at once, and write the cluster file that
    the planner reads. Start one process per rank with torchrun, srun or monta emulate.

    examples:
      torchrun --nnodes 2 --nproc-per-node 8 ... \\
          -m monta_megatron calibrate --nics-per-node 8 --out cluster.yaml
      monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \\
          monta calibrate --out cluster.yaml
    """
    begin_s = time.perf_counter()
    from monta_megatron.common.files import check_can_be_written, write_whole
    from monta_megatron.emulation.cluster import EmulatedCluster
    from monta_megatron.planner.cluster_file import dump_cluster
    from monta_megatron.planner.curves import Rate

    # Step 1: the flags.
    world_size_of_launch("calibrate --out FILE")
    # Only the first rank writes; others may not see that folder.
    if is_first_rank():
        check_can_be_written(parsed.out, "--out")
    emulated = EmulatedCluster.from_environment()
    nics_per_node, hardware, nic_rate = parsed.nics_per_node, None, None
    if emulated is not None:
        nics_per_node = nics_per_node or 1
        hardware = f"emulated at {emulated.inter_mbit:g} Mbit/s"
        nic_rate = Rate(emulated.inter_mbit / 8e3 / nics_per_node)

    # Step 2: measure.
    with joined_launch("calibrate") as (device, progress):
        from monta_megatron.calibration.command import calibrate

        report = calibrate(
            device,
            budget_s=parsed.budget_seconds,
            ranks_per_node=parsed.ranks_per_node,
            nics_per_node=nics_per_node,
            hardware=hardware,
            nic_rate=nic_rate,
            progress=progress,
            begin_s=begin_s,
        )
    if not is_first_rank():
        return 0

    # Step 3: write and report.
    write_whole(parsed.out, dump_cluster(report.cluster))
    if parsed.json:
        print(report.text(), file=sys.stderr)
    print_report(report, parsed.json)
    tell("calibrate", f"wrote {parsed.out}")
    return 0


def add_bench_arguments(parser: Parser) -> None:
    """Add all flags of a benchmark; values of `FLAGS` stay texts."""
    for name, flag in FLAGS.items():
        default = "" if flag.default is None else f" (default: {flag.default})"
        parser.add_argument(f"--{name}", metavar=flag.metavar, help=f"{flag.help}{default}.")
    parser.add_argument(
        "--layer", action="store_true", help="Also time the whole layer with its experts."
    )


def check_bench(parsed: argparse.Namespace, world_size: int) -> None:
    """Refuse bad flags before any rank starts.

    Raises:
        UserError: a flag, or a file that it names, is wrong.
    """
    from monta_megatron.planner.cluster_file import load_cluster

    parse_settings(vars(parsed), world_size)
    if parsed.cluster is not None:
        load_cluster(parsed.cluster)


def run_bench(parsed: argparse.Namespace) -> int:
    """Time Megatron's dispatchers and monta's chains side by side.

    Check the results of monta's chains against Megatron's dispatchers, then time all of them in one
    run. Start one process per rank with torchrun, srun or monta emulate. The exit status is 1 if
    results differ.

    examples, on 4 CPU ranks that stand for 2 nodes:
      MONTA_CPU_RANKS=1 torchrun --nproc-per-node 4 -m monta_megatron bench \\
          --experts 16 --top-k 4 --hidden 256 --tokens 512 --ranks-per-node 2
      monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \\
          monta bench --experts 64 --top-k 8 --hidden 1024 --tokens 512 --json
    To sweep many settings, see benchmarks/sweep.py in the repository.
    """
    from monta_megatron.common.files import check_can_be_written
    from monta_megatron.planner.cluster_file import load_cluster

    settings = parse_settings(vars(parsed), world_size_of_launch("bench"))
    if settings.trace is not None and is_first_rank():
        check_can_be_written(Path(settings.trace), "--trace")
    cluster = None if settings.cluster is None else load_cluster(settings.cluster)
    with joined_launch("bench") as (_, progress):
        from monta_megatron.tools.bench.measure import measure_point

        report = measure_point(settings, cluster, progress)
    if is_first_rank():
        print_report(report, parsed.json)
    return 0


def add_emulate_arguments(parser: Parser) -> None:
    """Add all flags."""
    parser.add_argument(
        "--nodes", metavar="N", type=whole(2), required=True, help="Number of nodes."
    )
    parser.add_argument(
        "--ranks-per-node", metavar="N", type=whole(1), required=True, help="CPU ranks per node."
    )
    parser.add_argument(
        "--inter-mbit",
        metavar="MBIT",
        type=positive,
        required=True,
        help="Rate limit of each node's NIC, per direction, in Mbit/s.",
    )
    parser.keep_after_dashes("cmd")


def run_emulate(parsed: argparse.Namespace) -> int:
    """Run a command on an emulated cluster.

    Run CMD (a Python script, -m MODULE, or monta COMMAND) once per rank, as torchrun does, on a
    cluster emulated on this machine. Each node is a network namespace whose NIC is limited to the
    given rate. CPU ranks communicate over Gloo between nodes and through shared memory within a
    node, and cannot reach any other network. Rank 0's standard output passes through unchanged; all
    other output goes to standard error, as does rank 0's with --json. The exit status is that of
    the first rank to fail.

    example:
      monta emulate --nodes 2 --ranks-per-node 4 --inter-mbit 500 -- \\
          monta bench --experts 64 --top-k 8 --hidden 1024 --tokens 512
    """
    from monta_megatron.emulation.cluster import EmulatedCluster
    from monta_megatron.emulation.emulator import run as run_in_sandbox

    nodes, ranks_per_node, inter_mbit = parsed.nodes, parsed.ranks_per_node, parsed.inter_mbit
    num_ranks = nodes * ranks_per_node
    rule = f"be at most {MAX_NODES} nodes and {MAX_RANKS} ranks"
    fits = nodes <= MAX_NODES and num_ranks <= MAX_RANKS
    require(fits, "--nodes", f"{nodes} of {ranks_per_node}", rule)
    command = _rank_command(parsed.cmd, num_ranks)
    cluster = EmulatedCluster(nodes=nodes, ranks_per_node=ranks_per_node, inter_mbit=inter_mbit)
    emulator = [sys.executable, "-m", "monta_megatron.emulation.emulator"]
    as_json = ["--json"] if parsed.json else []
    return run_in_sandbox([*emulator, *as_json, cluster.to_json(), *command])


def _rank_command(words: Sequence[str], num_ranks: int) -> list[str]:
    """Python's arguments on every rank; mistakes in them are found before any rank starts.

    Raises:
        UserError: the command cannot start.
        SystemExit: the command is monta's and has a mistake, which has been reported.
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
