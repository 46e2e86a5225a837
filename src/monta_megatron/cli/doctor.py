"""`monta doctor`: installation and machine; or the causes that hold a run back."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.cli.parser import add_json
from monta_megatron.common.tables import print_report

if TYPE_CHECKING:
    from monta_megatron.tools.run_doctor.iteration import IterationReport
    from monta_megatron.tools.run_doctor.report import RunReport

EXAMPLE = """\
--run reads what there is in DIR and in DIR/logs: exchange_rank_*.jsonl, of
--moe-monta-watch-steps N (`monta launch` names the folder, elsewhere
--moe-monta-watch-out does); plan*.yaml; *.log. In a run folder of `monta
launch` it also prices other choices, by the model and the cluster there.

--log reads what the loop of Megatron-LM, Megatron Bridge or NeMo printed, with
any dispatcher: the iteration by part, predicted beside measured, the likely
causes, and the changes that would save most.

examples:
  monta doctor --json
  monta doctor --log train.log --cluster h100_8x_ndr
  monta doctor --run runs/mixtral_8x7b
"""


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "doctor",
        help="check the installation, or a run",
        description="Check what is installed, which way into Megatron is active, what is missing; "
        "the exit status is 1 if something is. With --run or --log: what holds a training back and "
        "what to try, what it may hold most of first.",
        epilog=EXAMPLE,
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--run",
        dest="folder",
        metavar="DIR",
        type=Path,
        help="of `monta launch`, or with what was watched",
    )
    what.add_argument("--log", metavar="FILE", type=Path, help="output of a training")
    parser.add_argument(
        "--cluster",
        metavar="FILE",
        help="for --log: a file, or a preset by its name in configs/clusters (default: guessed "
        "from the GPU and the ranks that the log names)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print the report; exit status 1 if something is missing."""
    if parsed.cluster is not None and parsed.log is None:
        raise ValueError("--cluster: given, must come with --log")
    if parsed.log is not None or parsed.folder is not None:
        print_report(_report(parsed), parsed.json)
        return 0
    from monta_megatron.tools.doctor import examine

    report = examine()
    print_report(report, parsed.json)
    return int(report.lacks_something)


def _report(parsed: argparse.Namespace) -> "IterationReport | RunReport":
    if parsed.folder is not None:
        from monta_megatron.tools.run_doctor.report import examine_run

        return examine_run(parsed.folder)
    from monta_megatron.tools.run_doctor.iteration import explain
    from monta_megatron.tools.run_doctor.training_log import read_training_log

    return explain(read_training_log(parsed.log), parsed.cluster)
