"""Start a Megatron training from one YAML.

Check a run file and its Megatron arguments against Megatron's own parser, validation and
TransformerConfig, plan its exchange, write a run directory (configuration, plan, versions, script,
logs) and start it. The exit status is the run's. Arguments after -- are those of Megatron; they
override those of the file. `--NAME false` takes one of the file back, a parallel size changes the
layout. The run directory's run.sh starts the same run again, from its last checkpoint if it saves
any.

examples:
  monta launch configs/runs/quickstart.yaml
  monta launch configs/runs/mixtral_8x7b.yaml --dry-run -- --lr 1e-4
  monta launch configs/runs/mixtral_8x7b.yaml --start sbatch -- \\
      --moe-token-dispatcher-type alltoall
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from monta_megatron.common.text import print_report, tell

STARTS = {
    "torchrun": "here, on one node (then the default)",
    "srun": "steps of this shell's job of Slurm, or of one of salloc",
    "sbatch": "a job of Slurm (the default for several nodes)",
    "none": "write the run directory only",
}


def add_arguments(parser: Any) -> None:
    """Add all flags."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script; write and start nothing"
    )
    ways = "; ".join(f"{name}: {text}" for name, text in STARTS.items())
    parser.add_argument("--start", choices=STARTS, help=ways)
    add_run_arguments(parser, "runs/NAME")


def add_run_arguments(parser: Any, directory: str) -> None:
    """Add the run file, the folder of the run, --force, --json and Megatron's arguments.

    Args:
        parser: of the sub-command.
        directory: the first folder that is tried.
    """
    parser.add_argument(
        "run_file", metavar="FILE", help="a file, or a preset by its name in configs/runs"
    )
    default = f"new or empty (default: {directory}, or {directory}-2 and so on)"
    parser.add_argument("--run-directory", type=Path, help=default)
    parser.add_argument(
        "--force", action="store_true", help="go on where Megatron's own validation refuses it"
    )
    parser.keep_after_dashes("megatron")


def run(parsed: argparse.Namespace) -> int:
    """Prepare, write and start the run; returns its exit status."""
    from monta_megatron.tools.launch.start import launch

    report = launch(
        parsed.run_file,
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
