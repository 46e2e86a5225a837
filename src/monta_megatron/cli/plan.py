"""`monta plan`: which chain, in how many chunks, and why; or which layout."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from monta_megatron.cli import planning
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import name_of, positive
from monta_megatron.common.tables import print_report, tell
from monta_megatron.common.text import one_of

EXAMPLE = """\
examples:
  monta plan --model configs/models/deepseek_v3.yaml \\
      --cluster configs/clusters/h100_8x_ndr.yaml --world-size 1024 \\
      --ep 64 --pp 16
  monta plan --log train.log --cluster h100_8x_ndr
  monta plan --model qwen3_30b_a3b --cluster a100_hdr --world-size 32 --ep 16 \\
      --sweep tokens=512,1k,2k,4k,8k
"""
SWEPT = ("tokens", "world-size", "ep")
# Flags that do not go with another.
APART = {
    "log": ("model", "iteration_ms", "sweep", "out"),
    "sweep": ("chain", "iteration_ms", "out", "stages"),
    "out": ("tokens",),
}


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "plan",
        help="choose a chain, or rank the layouts",
        description="Choose the chain and the number of chunks for a layout, from the costs of the "
        "cluster. Without --tp, --ep and --etp: every layout that fits, ranked.",
        epilog=EXAMPLE,
    )
    planning.add_arguments(parser)
    parser.add_argument(
        "--chain", metavar="NAME", type=name_of(_chains), help="say where this chain stands"
    )
    parser.add_argument("--stages", action="store_true", help="add the table by stage")
    parser.add_argument(
        "--iteration-ms",
        metavar="X",
        type=positive,
        help="a measured iteration with alltoall: say what share of it the exchange takes",
    )
    parser.add_argument(
        "--log",
        metavar="FILE",
        type=Path,
        help="in place of --model and a layout: what a training by Megatron-LM or Megatron Bridge "
        "printed, with its iterations",
    )
    parser.add_argument(
        "--sweep",
        metavar="KEY=A,B,C",
        type=_sweep,
        help=f"a row for each value of {', '.join(SWEPT)}",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="write a run file, for monta launch"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _chains() -> Iterable[str]:
    from monta_megatron.chains import CHAINS

    return CHAINS


def _sweep(text: str) -> tuple[str, list[Any]]:
    """The key and the values of KEY=a,b,c."""
    key, _, values = text.partition("=")
    if key not in SWEPT or not values:
        rule = f"KEY=a,b,c with KEY {one_of(key, SWEPT)}"
        raise argparse.ArgumentTypeError(f"got {text!r}, must be {rule}")
    read, _ = planning.FLAGS[key]
    return key, [read(value.strip()) for value in values.split(",")]


def run(parsed: argparse.Namespace) -> int:
    """Print the plan, the ranking, or the sweep."""
    _check(parsed)
    from monta_megatron.planner.benefit import share_of
    from monta_megatron.tools.plan.report import PlanReport
    from monta_megatron.tools.plan.request import plan_request

    request, iteration_ms, ran = planning.request_of(parsed), parsed.iteration_ms, "alltoall"
    if parsed.sweep is not None:
        from monta_megatron.tools.plan.sweep import sweep

        print_report(sweep(request, *parsed.sweep), parsed.json)
        return 0
    if parsed.log is not None:
        from monta_megatron.tools.plan.training_log import read_training_log

        log = read_training_log(parsed.log)
        request, iteration_ms, ran = log.request(request), log.iteration_ms, log.dispatcher
    planned = plan_request(request)
    share = None
    if iteration_ms is not None and planned.benefit is not None:
        priced = planned.plan.best.get(ran)
        ran_us = None if priced is None else priced.predicted_us
        share = share_of(iteration_ms, ran, ran_us, planned.benefit)
    if parsed.out is not None:
        from monta_megatron.tools.plan.run_file import write_run

        write_run(parsed.out, planned)
        tell("plan", f"wrote {parsed.out}")
    report = PlanReport(planned=planned, share=share, chain=parsed.chain, with_stages=parsed.stages)
    print_report(report, parsed.json)
    return 0


def _check(parsed: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    needed = ("cluster",) if parsed.log is not None else planning.FILES
    missing = [f"--{name}" for name in needed if getattr(parsed, name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)}: not given, must be a file or a preset")
    for other, names in APART.items():
        for name in names:
            value = getattr(parsed, name)
            if value not in (None, False) and getattr(parsed, other) is not None:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag}: got {value}, must be left out with --{other}")
    key = None if parsed.sweep is None else parsed.sweep[0]
    if key not in (None, "ep") and not any((parsed.tp, parsed.ep, parsed.etp)):
        raise ValueError(f"--sweep: got {key}, must be with a layout (--ep N)")
    if parsed.out is not None and parsed.out.exists():
        raise ValueError(f"--out: got {parsed.out}, must not exist")
