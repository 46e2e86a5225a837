"""`monta launch`: from one YAML to a running Megatron."""

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from monta_megatron.cli.parser import add_json
from monta_megatron.common.tables import print_report, tell

EXAMPLE = """\
Arguments after -- are those of Megatron; they override those of the
file. `--NAME false` takes one of the file back, a parallel size changes the
layout. The run directory's run.sh starts the same run again, from its last
checkpoint if it saves any.

examples:
  monta launch --config configs/runs/quickstart.yaml
  monta launch --config configs/runs/mixtral_8x7b.yaml --dry-run -- --lr 1e-4
  monta launch --config configs/runs/mixtral_8x7b.yaml --start sbatch -- \\
      --moe-token-dispatcher-type alltoall
"""

CONFIG = "a file, or a preset by its name in configs/runs"
STARTS = {
    "torchrun": "here, on one node",
    "srun": "steps of this shell's job of Slurm, or of one of salloc",
    "sbatch": "a job of Slurm",
    "none": "write the run directory only",
}


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "launch",
        usage="monta launch [-h] [--config] FILE [--dry-run] [--start HOW] [--json]\n"
        "                    [--run-directory DIR] [--force]\n"
        "                    [-- MEGATRON ARGUMENTS]",
        help="start a Megatron training from one YAML",
        description="Check a run file and its Megatron arguments against Megatron's own parser, "
        "validation and TransformerConfig, plan its exchange, write a run directory "
        "(configuration, plan, versions, script, logs) and start it. The exit status is the run's.",
        epilog=EXAMPLE,
    )
    add_run_file(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script; write and start nothing"
    )
    add_start(parser, STARTS, several_nodes="sbatch", directory="runs/NAME")
    add_json(parser)
    parser.set_defaults(run=run)


def add_run_file(parser: Any) -> None:
    """Add the run file, by its flag or without, Megatron's arguments after `--`, and --force."""
    parser.add_argument("--config", metavar="FILE", help=CONFIG)
    parser.add_argument("run_file", metavar="FILE", nargs="?", help="the same, without the flag")
    parser.after_dashes = "megatron"
    parser.add_argument(
        "--force", action="store_true", help="go on where Megatron's own validation refuses it"
    )


def run_file(parsed: argparse.Namespace) -> str:
    """The run file that is given, with --config or without.

    Raises:
        ValueError: none is, or two are.
    """
    given = [file for file in (parsed.config, parsed.run_file) if file is not None]
    if len(given) != 1:
        what = "not given" if not given else f"got {' and '.join(given)}"
        raise ValueError(f"--config: {what}, must be {CONFIG}")
    return str(given[0])


def add_start(
    parser: Any, starts: Mapping[str, str], *, several_nodes: str, directory: str
) -> None:
    """Add flags for the start of a run and its folder; the help has the defaults.

    Args:
        parser: of the sub-command.
        starts: name -> what it does.
        several_nodes: the one for more than one node.
        directory: the first that is tried.
    """
    parser.add_argument(
        "--start",
        choices=starts,
        metavar="HOW",
        help="; ".join(f"{name}: {text}" for name, text in starts.items())
        + f" (default: torchrun for one node, else {several_nodes})",
    )
    parser.add_argument(
        "--run-directory",
        metavar="DIR",
        type=Path,
        help=f"new or empty (default: {directory}, or {directory}-2 and so on)",
    )


def run(parsed: argparse.Namespace) -> int:
    """Prepare, write and start the run; returns its exit status."""
    from monta_megatron.tools.launch.start import launch

    report = launch(
        run_file(parsed),
        parsed.megatron,
        directory=parsed.run_directory,
        start=parsed.start,
        dry_run=parsed.dry_run,
        force=parsed.force,
        tell=partial(tell, "launch"),
        output=sys.stderr.buffer if parsed.json else sys.stdout.buffer,
    )
    if parsed.json or parsed.dry_run:
        print_report(report, parsed.json)
    return report.exit_status or 0
