"""Commands that plan, without ranks: `plan`, `timeline` and `place`."""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from monta_megatron.cli.parser import Parser
from monta_megatron.common.errors import UserError
from monta_megatron.common.files import check_can_be_written
from monta_megatron.common.rules import name_of, num_tokens, positive, whole
from monta_megatron.common.text import Progress, counted, one_of, print_report, tell, told_if_slow

FILES = {
    "model": "model file (YAML), a Hugging Face config.json or its folder, or the name of a preset "
    "in configs/models",
    "cluster": "cluster file, or the name of a preset in configs/clusters",
}
# Flag -> the function that reads its value, and its help text.
FLAGS = {
    "world-size": (whole(1), "Number of ranks (default: all ranks of the cluster)."),
    "ranks-per-node": (
        whole(1),
        "Number of ranks that the job uses on each node or host (default: all).",
    ),
    "tp": (whole(1), "Tensor parallel size, with sequence parallelism."),
    "ep": (whole(1), "Expert parallel size."),
    "etp": (whole(1), "Expert tensor parallel size."),
    "cp": (whole(1), "Context parallel size."),
    "pp": (whole(1), "Pipeline parallel size."),
    "tokens": (num_tokens, "Tokens per rank (default: from the model's batch)."),
    "seq-length": (num_tokens, "Tokens per sequence (default: the model's)."),
    "micro-batch-size": (whole(1), "Sequences per micro-batch (default: the model's)."),
    "global-batch-size": (
        whole(1),
        "Sequences per iteration; adds the predicted gain per iteration.",
    ),
}
STILL_PLANNING = "still planning: thousands of ranks may take half a minute"
SWEPT = ("tokens", "world-size", "ep")
# Flag of `plan` -> flags that must be left out with it.
EXCLUDED_WITH = {
    "log": ("model", "iteration-ms", "sweep", "out"),
    "sweep": ("chain", "global-batch-size", "iteration-ms", "out", "stages"),
    "out": ("tokens",),
}


def add_plan_arguments(parser: Parser) -> None:
    """Add all flags."""
    for name, text in FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"{text[0].upper()}{text[1:]}.")
    for name, (read, text) in FLAGS.items():
        parser.add_argument(f"--{name}", metavar="N", type=read, help=text)
    _add_chain(parser, "Show how this chain compares with the recommendation.")
    parser.add_argument("--stages", action="store_true", help="Add a table of the stages.")
    parser.add_argument(
        "--iteration-ms",
        metavar="MS",
        type=positive,
        help="Measured iteration time with alltoall; adds the share that the exchange takes.",
    )
    parser.add_argument(
        "--log",
        metavar="FILE",
        type=Path,
        help="Training log of Megatron-LM or Megatron Bridge, in place of a model and a layout.",
    )
    rows = f"Print one row per value of KEY (one of {', '.join(SWEPT)})."
    parser.add_argument("--sweep", metavar="KEY=A,B,C", type=_sweep, help=rows)
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="Write a run file for monta launch."
    )


def run_plan(parsed: argparse.Namespace) -> int:
    """Choose a chain, or rank the layouts.

    Predict the time of every chain on the cluster, and recommend a chain and its number of chunks
    for the given layout. Without --tp, --ep and --etp, rank every layout that fits in memory.

    examples:
      monta plan --model configs/models/deepseek_v3.yaml \\
          --cluster configs/clusters/h100_8x_ndr.yaml --world-size 1024 --ep 64 --pp 16
      monta plan --log train.log --cluster h100_8x_ndr
      monta plan --model qwen3_30b_a3b --cluster a100_hdr --world-size 32 --ep 16 \\
          --sweep tokens=512,1k,2k,4k,8k
    """
    _check_plan(parsed)
    from monta_megatron.planner.benefit import share_of
    from monta_megatron.tools.plan.report import PlanReport
    from monta_megatron.tools.plan.request import PlanRequest, plan_request

    names = (name.replace("-", "_") for name in (*FILES, *FLAGS))
    request = PlanRequest(**{name: getattr(parsed, name) for name in names})
    if parsed.sweep is not None:
        from monta_megatron.tools.plan.report import sweep

        with told_if_slow("plan", STILL_PLANNING):
            swept = sweep(request, *parsed.sweep)
        print_report(swept, parsed.json)
        return 0
    iteration_ms, ran = parsed.iteration_ms, "alltoall"
    if parsed.log is not None:
        from monta_megatron.tools.training_log import read_log

        log = read_log(parsed.log)
        request = log.request(request, str(parsed.log))
        iteration_ms, ran = log.iteration_ms(), log.dispatcher
    with told_if_slow("plan", STILL_PLANNING):
        planned = plan_request(request)
    if parsed.out is not None:
        from monta_megatron.tools.plan.report import write_run

        write_run(parsed.out, request, planned)
        tell("plan", f"wrote {parsed.out}")
    share = None
    if iteration_ms is not None:
        share = share_of(iteration_ms, ran, planned, planned.benefit)
    report = PlanReport(planned=planned, share=share, chain=parsed.chain, with_stages=parsed.stages)
    print_report(report, parsed.json)
    return 0


def _check_plan(parsed: argparse.Namespace) -> None:
    """Check flags of `plan` that depend on each other.

    Raises:
        UserError: one is missing, or must be left out.
    """
    _require_flags(parsed, FILES if parsed.log is None else ("cluster",), "a file or a preset")
    for flag, others in EXCLUDED_WITH.items():
        if getattr(parsed, flag) is not None:
            _exclude_flags(parsed, others, f"with --{flag}")
    if parsed.sweep is not None:
        _exclude_flags(parsed, parsed.sweep[:1], "with --sweep")
        _require_flags(parsed, {"ep"} - {parsed.sweep[0]}, "with --sweep")
    if parsed.out is not None and parsed.out.exists():
        raise UserError(f"--out: got {parsed.out}, must not exist")
    if parsed.out is not None:
        check_can_be_written(parsed.out, "--out")


def add_timeline_arguments(parser: Parser) -> None:
    """Add all flags."""
    parser.add_argument("trace", type=Path, help="Trace file that monta bench --trace wrote.")
    _add_chain(parser, "Chain to draw (default: the fastest of the trace).")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="PNG to write (default: TRACE with suffix .png)."
    )


def run_timeline(parsed: argparse.Namespace) -> int:
    """Draw which operations overlapped, from a trace of monta bench --trace.

    Draw a timeline of every stage and chunk by resource, below that of stock alltoall. Print how
    long each resource was busy, and how much of that time other resources hid.

    example:
      monta emulate --nodes 2 --ranks-per-node 2 --inter-mbit 500 -- \\
          monta bench --experts 16 --top-k 4 --hidden 1024 --tokens 512 --trace trace.json
      monta timeline trace.json
    """
    from monta_megatron.tools import pictures
    from monta_megatron.tools.timeline import load_timeline

    report = load_timeline(parsed.trace, parsed.chain)
    path = parsed.out or parsed.trace.with_suffix(".png")
    if pictures.can_draw():
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures.draw_timeline(report, path)
        report = replace(report, picture=path)
    else:
        tell("timeline", f"no picture without matplotlib: {pictures.INSTALL}")
    print_report(report, parsed.json)
    return 0


def add_place_arguments(parser: Parser) -> None:
    """Add all flags."""
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument(
        "--trace",
        metavar="DIR",
        type=Path,
        help="Router trace: the folder that Megatron wrote with --moe-routing-trace-path.",
    )
    way.add_argument(
        "--apply",
        metavar="DIR",
        type=Path,
        help="Checkpoint to reorder: a torch_dist folder, as for Megatron's --load.",
    )
    for name, text in FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"With --trace: {text}.")
    sizes = {
        "ep": "With --trace: expert parallel size of the exchange to place for.",
        "etp": "With --trace: expert tensor parallel size (default: 1).",
        "pp": "With --trace: pipeline parallel size of the traced training (default: 1).",
    }
    for name, text in sizes.items():
        parser.add_argument(f"--{name}", metavar="N", type=whole(1), help=text)
    parser.add_argument(
        "--placement",
        metavar="FILE",
        type=Path,
        help="With --apply: placement file that --trace ... --out wrote.",
    )
    parser.add_argument(
        "--undo", action="store_true", help="With --apply: restore the original order of experts."
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        type=Path,
        help="With --trace: placement file to write. With --apply: folder of the new checkpoint.",
    )


def run_place(parsed: argparse.Namespace) -> int:
    """Place experts so that fewer copies of tokens are sent.

    With --trace: read a router trace of Megatron, find an order of the experts in which tokens need
    fewer copies, and report the saving on held-out tokens. With --apply: write a checkpoint whose
    experts are in that order; the training then needs no further settings.

    examples:
      monta place --trace trace --model olmoe_1b_7b --cluster cluster.yaml \\
          --ep 8 --out placement.json
      monta place --apply checkpoints --placement placement.json --out placed
      monta place --apply placed --placement placement.json --undo --out undone
    """
    if parsed.trace is None:
        return _apply(parsed)
    _require_flags(parsed, (*FILES, "ep"), "with --trace")
    _exclude_flags(parsed, ("placement", "undo"), "with --trace")
    from monta_megatron.tools.place import place

    report = place(
        parsed.trace,
        parsed.model,
        parsed.cluster,
        ep=parsed.ep,
        etp=parsed.etp or 1,
        pp=parsed.pp or 1,
        out=parsed.out,
        progress=Progress("place" if sys.stderr.isatty() else None),
    )
    print_report(report, parsed.json)
    if parsed.out is not None:
        tell("place", f"{parsed.out} is not written" if report.refused else f"wrote {parsed.out}")
    return int(report.refused is not None)


def _apply(parsed: argparse.Namespace) -> int:
    _require_flags(parsed, ("placement", "out"), "with --apply")
    _exclude_flags(parsed, (*FILES, "ep", "etp", "pp"), "with --apply")
    from monta_megatron.tools.placed_checkpoint import apply_placement, read_placement

    placement = read_placement(parsed.placement, undo=parsed.undo)
    written = apply_placement(parsed.apply, placement, parsed.out)
    tell("place", f"wrote {written}: the experts of {counted(len(placement), 'layer')}")
    if parsed.json:
        print(json.dumps({"written": str(written), "layers": sorted(placement)}, indent=2))
    return 0


def _add_chain(parser: Parser, text: str) -> None:
    parser.add_argument("--chain", metavar="NAME", type=name_of(_chains), help=text)


def _chains() -> Iterable[str]:
    from monta_megatron.chains import CHAINS

    return CHAINS


def _sweep(text: str) -> tuple[str, list[Any]]:
    """The key and the values of KEY=a,b,c."""
    key, _, values = text.partition("=")
    if key not in SWEPT or not values:
        rule = f"KEY=a,b,c with KEY {one_of(key, SWEPT)}"
        raise argparse.ArgumentTypeError(f"got {text!r}, must be {rule}")
    read, _ = FLAGS[key]
    return key, [read(value.strip()) for value in values.split(",")]


def _require_flags(parsed: argparse.Namespace, names: Iterable[str], rule: str) -> None:
    """Refuse a missing flag; the rule is what the user reads after "must be"."""
    for name in names:
        if getattr(parsed, name.replace("-", "_")) is None:
            raise UserError(f"--{name}: not given, must be {rule}")


def _exclude_flags(parsed: argparse.Namespace, names: Iterable[str], way: str) -> None:
    """Refuse flags that have no meaning in a way to use a command, such as "with --log"."""
    for name in names:
        value = getattr(parsed, name.replace("-", "_"))
        if value not in (None, False):
            raise UserError(f"--{name}: got {value}, must be left out {way}")
