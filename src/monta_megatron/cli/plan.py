"""Choose a chain, or rank the layouts.

Choose the chain and the number of chunks for a layout, from the costs of the cluster. Without --tp,
--ep and --etp: every layout that fits, ranked.

examples:
  monta plan --model configs/models/deepseek_v3.yaml \\
      --cluster configs/clusters/h100_8x_ndr.yaml --world-size 1024 --ep 64 --pp 16
  monta plan --log train.log --cluster h100_8x_ndr
  monta plan --model qwen3_30b_a3b --cluster a100_hdr --world-size 32 --ep 16 \\
      --sweep tokens=512,1k,2k,4k,8k
"""

import argparse
from pathlib import Path
from typing import Any

from monta_megatron.cli import planning
from monta_megatron.common.flags import positive
from monta_megatron.common.tables import print_report, tell
from monta_megatron.common.text import one_of

SWEPT = ("tokens", "world-size", "ep")
# Flags that do not go with another.
APART = {
    "log": ("model", "iteration-ms", "sweep", "out"),
    "sweep": ("chain", "iteration-ms", "out", "stages"),
    "out": ("tokens",),
}


def add_arguments(parser: Any) -> None:
    """Add all flags."""
    planning.add_arguments(parser, planning.FLAGS, "say where this chain stands")
    parser.add_argument("--stages", action="store_true", help="add the table by stage")
    parser.add_argument(
        "--iteration-ms", type=positive, help="measured with alltoall: add the exchange's share"
    )
    parser.add_argument(
        "--log", type=Path, help="of Megatron-LM or Bridge, in place of a model and a layout"
    )
    rows = f"a row for each value of {', '.join(SWEPT)}"
    parser.add_argument("--sweep", metavar="KEY=A,B,C", type=_sweep, help=rows)
    parser.add_argument("--out", type=Path, help="write a run file, for monta launch")


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
    needed = ("cluster",) if parsed.log is not None else planning.FILES
    planning.check_given(parsed, needed, (), "a file or a preset")
    for flag, others in APART.items():
        if getattr(parsed, flag) is not None:
            planning.check_given(parsed, (), others, f"with --{flag}")
    if parsed.out is not None and parsed.out.exists():
        raise ValueError(f"--out: got {parsed.out}, must not exist")
    from monta_megatron.planner.plan import share_of
    from monta_megatron.tools.plan.report import PlanReport, sweep, write_run
    from monta_megatron.tools.plan.request import plan_request

    request, iteration_ms, ran = planning.request_of(parsed), parsed.iteration_ms, "alltoall"
    if parsed.sweep is not None:
        if parsed.sweep[0] != "ep":
            planning.check_given(parsed, ("ep",), (), "with --sweep")
        print_report(sweep(request, *parsed.sweep), parsed.json)
        return 0
    if parsed.log is not None:
        from monta_megatron.tools.training_log import read_training_log

        log = read_training_log(parsed.log)
        request, iteration_ms, ran = log.request(request), log.iteration_ms, log.dispatcher
    planned = plan_request(request)
    if parsed.out is not None:
        write_run(parsed.out, request, planned)
        tell("plan", f"wrote {parsed.out}")
    share = None
    if iteration_ms is not None and planned.benefit is not None:
        share = share_of(iteration_ms, ran, planned.plan.time_us(ran), planned.benefit)
    report = PlanReport(planned=planned, share=share, chain=parsed.chain, with_stages=parsed.stages)
    print_report(report, parsed.json)
    return 0
