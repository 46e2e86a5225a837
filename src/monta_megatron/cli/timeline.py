"""`monta timeline`: what overlaps with what, in a trace or as predicted."""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.cli import planning
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import name_of, whole
from monta_megatron.common.tables import print_report, tell

if TYPE_CHECKING:
    from monta_megatron.tools.timeline.report import TimelineReport

EXAMPLE = """\
examples:
  monta timeline --model qwen3_235b_a22b --cluster h100_8x_ndr \\
      --world-size 128 --tp 2 --ep 16 --pp 4
  monta emulate --nodes 2 --ranks-per-node 2 --inter-mbit 500 -- \\
      -m monta_megatron.cli bench --experts 16 --top-k 4 --hidden 1024 \\
      --tokens 512 --trace trace.json
  monta timeline trace.json
"""
# Of a layout, which a trace has.
PLANNED = ("world-size", "nodes", "ranks-per-node", "tp", "ep", "etp", "cp", "pp", "tokens")


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "timeline",
        help="draw what overlaps with what, recorded or predicted",
        description="Draw when every stage and chunk ran, by resource, below stock alltoall, and "
        "print how much of each resource was hidden by others: from a trace of monta bench "
        "--trace, or from the cost model (--model and --cluster).",
        epilog=EXAMPLE,
    )
    parser.add_argument(
        "trace", metavar="TRACE", nargs="?", type=Path, help="file of bench --trace"
    )
    planning.add_arguments(parser, PLANNED)
    parser.add_argument(
        "--chain",
        metavar="NAME",
        type=name_of(_chains),
        help="default: the fastest of the trace, or the planner's choice",
    )
    parser.add_argument("--num-chunks", metavar="N", type=whole(1), help="of --chain (default: 4)")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the picture (default: TRACE.png, timeline.png)"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _chains() -> Iterable[str]:
    from monta_megatron.chains import CHAINS

    return CHAINS


def run(parsed: argparse.Namespace) -> int:
    """Draw the picture, then print how much overlapped."""
    from monta_megatron.tools import pictures

    report, path = _report(parsed), parsed.out
    if path is None:
        path = Path("timeline.png") if parsed.trace is None else parsed.trace.with_suffix(".png")
    if pictures.can_draw():
        from monta_megatron.tools.timeline.picture import draw

        path.parent.mkdir(parents=True, exist_ok=True)
        draw(report, path)
        report = replace(report, picture=path)
    else:
        tell("timeline", f"no picture without matplotlib: {pictures.INSTALL}")
    print_report(report, parsed.json)
    return 0


def _report(parsed: argparse.Namespace) -> "TimelineReport":
    from monta_megatron.tools.timeline.report import named_chain, of_prediction, of_trace

    given = named_chain(parsed.chain, parsed.num_chunks)
    if parsed.trace is None:
        for name in ("model", "cluster"):
            if getattr(parsed, name) is None:
                raise ValueError(f"--{name}: not given, must be a file or a preset without TRACE")
        return of_prediction(planning.request_of(parsed), given)
    for name in ("model", "cluster", *PLANNED):
        value = getattr(parsed, name.replace("-", "_"))
        if value is not None:
            raise ValueError(f"--{name}: got {value}, must be left out with TRACE")
    return of_trace(parsed.trace, given)
