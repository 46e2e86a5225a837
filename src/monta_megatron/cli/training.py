"""Commands around a training, which take Megatron's arguments: `launch`, `compare`, `doctor`."""

import argparse
import sys
from functools import partial
from pathlib import Path

from monta_megatron.cli.parser import Parser
from monta_megatron.common.rules import whole
from monta_megatron.common.text import print_report, tell

STARTS = {
    "torchrun": "run here, on one node (default for one node; inside a Slurm job, through srun)",
    "srun": "run here, inside a Slurm job that has the nodes (salloc)",
    "sbatch": "submit a Slurm job (default for several nodes)",
    "none": "only write the run directory",
}


def add_launch_arguments(parser: Parser) -> None:
    """Add all flags."""
    parser.add_argument(
        "--dry-run", action="store_true", help="Print the script; write and start nothing."
    )
    ways = "; ".join(f"{name}: {text}" for name, text in STARTS.items())
    parser.add_argument("--start", choices=STARTS, help=f"How to start. {ways}.")
    _add_run_arguments(parser, "runs/NAME")


def run_launch(parsed: argparse.Namespace) -> int:
    """Start a Megatron training from one YAML file.

    Check the run file and its Megatron arguments with Megatron's own parser, validation and
    TransformerConfig, plan the exchange, write a run directory (configuration, plan, versions,
    script, logs) and start the training. The exit status is the training's. Arguments after -- go
    to Megatron and override the file's: `--NAME false` removes an argument, and a parallel size
    changes the layout. To start the same run again, from its last checkpoint if it saves any, run
    run.sh in the run directory.

    examples:
      monta launch configs/runs/quickstart.yaml
      monta launch configs/runs/mixtral_8x7b.yaml --dry-run -- --lr 1e-4
      monta launch configs/runs/mixtral_8x7b.yaml --start sbatch -- \\
          --moe-token-dispatcher-type alltoall
    """
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


def add_compare_arguments(parser: Parser) -> None:
    """Add all flags."""
    parser.add_argument(
        "--iterations",
        metavar="N",
        type=whole(3),
        default=10,
        help="Iterations per training, the first 2 of them warm-up (default: 10).",
    )
    parser.add_argument(
        "--pairs",
        metavar="N",
        type=whole(1),
        default=3,
        help="Trainings per dispatcher; a single one gives no interval (default: 3).",
    )
    _add_run_arguments(parser, "runs/NAME-compare")


def run_compare(parsed: argparse.Namespace) -> int:
    """Compare trainings with monta, alltoall and flex.

    Train a few iterations of a run file with monta and with Megatron's alltoall in turn, and with
    flex if one of its backends is installed. All trainings use the same seed and no checkpoints;
    torchrun starts them, or srun on several nodes. The table shows iteration time, speedup over
    alltoall with its 95% interval, losses and memory. Arguments after -- go to Megatron in every
    training, as for monta launch; --moe-monta-... arguments apply only with monta.

    examples:
      monta compare run.yaml
      monta compare gpt_oss_120b --iterations 30 --pairs 5 -- --moe-router-force-load-balancing
    """
    from monta_megatron.tools.compare import run_trainings

    report = run_trainings(
        parsed.run_file,
        parsed.megatron,
        iterations=parsed.iterations,
        pairs=parsed.pairs,
        directory=parsed.run_directory,
        force=parsed.force,
        tell=partial(tell, "compare"),
    )
    print_report(report, parsed.json)
    return 0


def add_doctor_arguments(parser: Parser) -> None:
    """Add no flags: `doctor` takes none."""


def run_doctor(parsed: argparse.Namespace) -> int:
    """Check the installation.

    Show what is installed, how monta hooks into Megatron, and what is missing. The exit status is 1
    if something is missing.

    example: monta doctor
    """
    from monta_megatron.tools.doctor import examine

    report = examine()
    print_report(report, parsed.json)
    return int(report.lacks_something)


def _add_run_arguments(parser: Parser, directory: str) -> None:
    """Add the run file, the run directory, --force and Megatron's arguments.

    Args:
        parser: parser of the sub-command.
        directory: default run directory; numbered where it exists already.
    """
    parser.add_argument(
        "run_file", metavar="FILE", help="Run file, or the name of a preset in configs/runs."
    )
    default = f"Run directory, new or empty (default: {directory}, then {directory}-2 and so on)."
    parser.add_argument("--run-directory", metavar="DIR", type=Path, help=default)
    parser.add_argument(
        "--force",
        action="store_true",
        help="Continue even if Megatron's own validation refuses the arguments.",
    )
    parser.keep_after_dashes("megatron")
