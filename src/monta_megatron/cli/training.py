"""Commands around a training, which take Megatron's arguments: `launch`, `compare`, `doctor`."""

import argparse
import sys
from functools import partial
from pathlib import Path

from monta_megatron.cli.parser import Parser
from monta_megatron.common.rules import whole
from monta_megatron.common.text import print_report, tell

STARTS = {
    "torchrun": "here, on one node (then the default; in a job of Slurm by srun)",
    "srun": "here, in a job of Slurm that has the nodes (salloc)",
    "sbatch": "a job of Slurm (the default for several nodes)",
    "none": "write the run directory only",
}


def add_launch_arguments(parser: Parser) -> None:
    """Add all flags."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script; write and start nothing"
    )
    ways = "; ".join(f"{name}: {text}" for name, text in STARTS.items())
    parser.add_argument("--start", choices=STARTS, help=ways)
    _add_run_arguments(parser, "runs/NAME")


def run_launch(parsed: argparse.Namespace) -> int:
    """Start a Megatron training from one YAML.

    Check a run file and its Megatron arguments against Megatron's own parser, validation and
    TransformerConfig, plan its exchange, write a run directory (configuration, plan, versions,
    script, logs) and start it. The exit status is the run's. Arguments after -- are those of
    Megatron; they override those of the file. `--NAME false` takes one of the file back, a parallel
    size changes the layout. The run directory's run.sh starts the same run again, from its last
    checkpoint if it saves any.

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
        "--iterations", type=whole(3), default=10, help="of each training; the first 2 warm up (10)"
    )
    parser.add_argument(
        "--pairs", type=whole(1), default=3, help="trainings of each dispatcher; one: no interval"
    )
    _add_run_arguments(parser, "runs/NAME-compare")


def run_compare(parsed: argparse.Namespace) -> int:
    """Train with monta, alltoall and flex, and compare.

    Train some iterations of a run file with monta and with Megatron's alltoall (and with flex where
    a backend of it is installed), in turn, from the same seed and without checkpoints, under
    torchrun, or srun on several nodes; one table: time of an iteration, ratio with its interval
    over the pairs, losses, memory. Arguments after -- go to Megatron in all trainings, as for monta
    launch; --moe-monta-... to monta alone.

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
    """Add none."""


def run_doctor(parsed: argparse.Namespace) -> int:
    """Check the installation.

    Check what is installed, which way into Megatron is active, and what is missing. The exit status
    is 1 if something is.

    example: monta doctor
    """
    from monta_megatron.tools.doctor import examine

    report = examine()
    print_report(report, parsed.json)
    return int(report.lacks_something)


def _add_run_arguments(parser: Parser, directory: str) -> None:
    """Add the run file, the folder of the run, --force and Megatron's arguments.

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
