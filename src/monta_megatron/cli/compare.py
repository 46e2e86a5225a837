"""Train with monta, alltoall and flex, and compare.

Train some iterations of a run file with monta and with Megatron's alltoall (and with flex where a
backend of it is installed), in turn, from the same seed and without checkpoints, under torchrun, or
srun on several nodes; one table: time of an iteration, ratio with its interval over the pairs,
losses, memory. Arguments after -- go to Megatron in all trainings, as for monta launch;
--moe-monta-... to monta alone.

examples:
  monta compare run.yaml
  monta compare gpt_oss_120b --iterations 30 --pairs 5 -- --moe-router-force-load-balancing
"""

import argparse
from functools import partial
from typing import Any

from monta_megatron.cli.launch import add_run_arguments
from monta_megatron.common.flags import whole
from monta_megatron.common.tables import print_report, tell


def add_arguments(parser: Any) -> None:
    """Add all flags."""
    parser.add_argument(
        "--iterations", type=whole(3), default=10, help="of each training; the first 2 warm up (10)"
    )
    parser.add_argument(
        "--pairs", type=whole(1), default=3, help="trainings of each dispatcher; one: no interval"
    )
    add_run_arguments(parser, "runs/NAME-compare")


def run(parsed: argparse.Namespace) -> int:
    """Run all trainings and print the table; returns the exit status."""
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
