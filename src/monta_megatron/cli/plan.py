"""`monta plan`: which chain, in how many chunks, and why; or which layout."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.cli import planning
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import name_of, positive, whole
from monta_megatron.common.tables import print_report, tell

if TYPE_CHECKING:
    from monta_megatron.tools.plan.answer import Questions
    from monta_megatron.tools.plan.request import PlanRequest

EXAMPLE = """\
examples:
  monta plan --model configs/models/deepseek_v3.yaml \\
      --cluster configs/clusters/h100_8x_ndr.yaml --world-size 1024 \\
      --ep 64 --pp 16
  monta plan --log train.log --cluster h100_8x_ndr
  monta plan --model qwen3_30b_a3b --cluster a100_hdr --world-size 32 --ep 16 \\
      --sweep tokens=512,1k,2k,4k,8k
"""


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "plan",
        help="choose a chain, or rank the layouts",
        description="Choose the chain and the number of chunks for a layout, from the costs of the "
        "cluster. Without --layout, --tp, --ep and --etp: every layout that fits, ranked.",
        epilog=EXAMPLE,
    )
    planning.add_arguments(parser, needs_model=False)
    parser.add_argument(
        "--chain",
        metavar="NAME",
        type=name_of(_chains),
        help="say where this chain stands, and why it was not chosen",
    )
    parser.add_argument("--num-chunks", metavar="N", type=whole(1), help="of --chain")
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
        help="a row for each value of tokens, world-size, inter-rate-ratio or ep",
    )
    parser.add_argument("--out", metavar="FILE", help="write a run file, for monta launch")
    parser.add_argument("--force", action="store_true", help="overwrite the file of --out")
    add_json(parser)
    parser.set_defaults(run=run)


# Flags that do not go with another.
APART = {
    "log": ("model", "layout", "iteration_ms", "out"),
    "sweep": ("chain", "iteration_ms", "out"),
    "out": ("inter_rate_ratio",),
}


def _chains() -> Iterable[str]:
    from monta_megatron.chains import CHAINS

    return CHAINS


def _sweep(text: str) -> Any:
    from monta_megatron.tools.plan.sweep import parse_sweep

    return parse_sweep(text)


def run(parsed: argparse.Namespace) -> int:
    """Print the plan, the ranking, or the sweep."""
    _check(parsed)
    request, questions = _request(parsed)
    if parsed.sweep is not None:
        from monta_megatron.tools.plan.sweep import sweep

        print_report(sweep(request, *parsed.sweep), parsed.json)
        return 0
    from monta_megatron.tools.plan.answer import answer

    inputs = planning.inputs_of(parsed, request)
    report = answer(request, inputs, questions)
    if parsed.out is not None:
        from monta_megatron.tools.plan.run_file import write_run

        write_run(Path(parsed.out), request, inputs, report.plan)
        tell("plan", f"wrote {parsed.out}")
    print_report(report, parsed.json)
    return 0


def _check(parsed: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    needed = ("--cluster",) if parsed.log is not None else ("--model", "--cluster")
    missing = [flag for flag in needed if getattr(parsed, flag.removeprefix("--")) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)}: not given, must be a file or a preset")
    has_layout = planning.has_layout(parsed) or parsed.log is not None
    for name, given in (
        ("chain", parsed.chain),
        ("sweep", parsed.sweep and parsed.sweep[0] != "ep" and parsed.sweep[0]),
        ("iteration-ms", parsed.iteration_ms),
    ):
        if given and not has_layout:
            raise ValueError(f"--{name}: got {given}, must be with a layout (--ep N)")
    if parsed.chain is None and parsed.num_chunks is not None:
        raise ValueError(f"--num-chunks: got {parsed.num_chunks}, must be with --chain")
    for other, names in APART.items():
        for name in names:
            value = getattr(parsed, name)
            if value not in (None, 1.0) and getattr(parsed, other) is not None:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag}: got {value}, must be left out with --{other}")
    if parsed.out is not None and not parsed.force and Path(parsed.out).is_file():
        raise ValueError(f"--out: got {parsed.out}, must not exist; --force overwrites it")


def _request(parsed: argparse.Namespace) -> "tuple[PlanRequest, Questions]":
    from dataclasses import replace

    from monta_megatron.tools.plan.answer import Questions

    questions = Questions(
        chain=parsed.chain, num_chunks=parsed.num_chunks, iteration_ms=parsed.iteration_ms
    )
    request = planning.request_of(parsed)
    if parsed.log is None:
        return request, questions
    from monta_megatron.tools.plan.from_log import questions_of, request_of
    from monta_megatron.tools.plan.training_log import read_training_log

    log = read_training_log(parsed.log)
    return request_of(log, request), replace(questions, **questions_of(log))
