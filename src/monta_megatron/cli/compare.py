"""`monta compare`: the training of a run file with each dispatcher, side by side."""

import argparse
from functools import partial
from typing import Any

from monta_megatron.cli.launch import add_run_file, add_start, run_file
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import whole
from monta_megatron.common.tables import print_json, print_report, tell

EXAMPLE = """\
Arguments after -- go to Megatron in all trainings, as for `monta launch`;
--moe-monta-... to monta alone.

examples:
  monta compare --config configs/runs/quickstart.yaml
  monta compare --config run.yaml --iterations 30 --pairs 3 -- --num-layers 4
"""

STARTS = {"torchrun": "here, on one node", "srun": "steps of Slurm"}


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "compare",
        usage="monta compare [-h] [--config] FILE [--iterations N] [--pairs N]\n"
        "                     [--start HOW] [--run-directory DIR] [--force]\n"
        "                     [--json] [-- MEGATRON ARGUMENTS]",
        help="train with monta, alltoall and flex, and compare",
        description="Train some iterations of a run file with monta and with Megatron's alltoall "
        "(and with flex where what its backend needs is installed), from the same seed and without "
        "checkpoints; one table: time of an iteration, ratio, losses, memory. The exit status is "
        "that of the first training to fail.",
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
        default=1,
        help="trainings of each dispatcher, in turn (default: %(default)s)",
    )
    add_start(parser, STARTS, several_nodes="srun", directory="runs/NAME-compare")
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Prepare and run all trainings, print the table; returns the exit status."""
    from monta_megatron.common.ranks import why_ended
    from monta_megatron.tools.compare.comparison import (
        ComparisonReport,
        TrainingFailed,
        prepare_trainings,
        train_all,
    )

    say = partial(tell, "compare")
    trainings = prepare_trainings(
        run_file(parsed),
        parsed.megatron,
        iterations=parsed.iterations,
        pairs=parsed.pairs,
        start=parsed.start,
        directory=parsed.run_directory,
        force=parsed.force,
    )
    for name, reason in trainings.left_out.items():
        say(f"{name} is left out: {reason}")
    total = len(trainings.in_order)
    say(f"{total} trainings of {parsed.iterations} iterations; logs in {trainings.directory}")
    logs = []
    try:
        for training, log in train_all(trainings):
            logs.append((training, log))
            say(f"{len(logs)} of {total}: {training.dispatcher} has ended")
    except TrainingFailed as failed:
        training, status = failed.training, failed.status
        why = why_ended(status, training.log)
        say(f"the run with {training.dispatcher} failed, {why}; log: {training.log}")
        if parsed.json:
            failed_run = {"failed": training.dispatcher, "why": why, "log": str(training.log)}
            print_json({**failed_run, "exit_status": status})
        return status
    report = ComparisonReport(trainings=trainings, iterations=parsed.iterations, logs=logs)
    report.save()
    print_report(report, parsed.json)
    return 0
