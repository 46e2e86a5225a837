"""`monta compare`: the training of a run file with each dispatcher, side by side."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from monta_megatron.cli.launch import add_run_file, run_file
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import whole
from monta_megatron.common.tables import print_report, tell

EXAMPLE = """\
Arguments after -- go to Megatron in all trainings, as for `monta launch`;
--moe-monta-... to monta alone.

examples:
  monta compare --config run.yaml
  monta compare --config qwen3_30b_a3b --iterations 30 --pairs 5 -- --num-layers 4
"""


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "compare",
        usage="monta compare [-h] [--config] FILE [--iterations N] [--pairs N]\n"
        "                     [--run-directory DIR] [--force] [--json]\n"
        "                     [-- MEGATRON ARGUMENTS]",
        help="train with monta, alltoall and flex, and compare",
        description="Train some iterations of a run file with monta and with Megatron's alltoall "
        "(and with flex where a backend of it is installed), in turn, from the same seed and "
        "without checkpoints, under torchrun, or srun on several nodes; one table: time of an "
        "iteration, ratio with its interval over the pairs, losses, memory.",
        epilog=EXAMPLE,
    )
    add_run_file(parser)
    parser.add_argument(
        "--iterations",
        metavar="N",
        type=whole(3),
        default=10,
        help="of each training; the first 2 warm up (default: %(default)s)",
    )
    parser.add_argument(
        "--pairs",
        metavar="N",
        type=whole(1),
        default=3,
        help="trainings of each dispatcher; a single one has no interval (default: %(default)s)",
    )
    parser.add_argument(
        "--run-directory",
        metavar="DIR",
        type=Path,
        help="new or empty (default: runs/NAME-compare, or runs/NAME-compare-2 and so on)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Run all trainings and print the table; returns the exit status."""
    from monta_megatron.tools.compare import run_trainings

    report = run_trainings(
        run_file(parsed),
        parsed.megatron,
        iterations=parsed.iterations,
        pairs=parsed.pairs,
        directory=parsed.run_directory,
        force=parsed.force,
        tell=partial(tell, "compare"),
    )
    print_report(report, parsed.json)
    return 0
