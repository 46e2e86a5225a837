"""`monta place`: experts that tokens choose together, placed together."""

import argparse
import sys
from pathlib import Path
from typing import Any

from monta_megatron.cli.parser import add_json
from monta_megatron.cli.planning import FILES
from monta_megatron.common.flags import whole
from monta_megatron.common.tables import Progress, print_report, tell

EXAMPLE = """\
examples:
  monta place --trace trace --model olmoe_1b_7b --cluster cluster.yaml \\
      --ep 8 --out placement.json
  monta place --apply checkpoints --placement placement.json --out placed
  monta place --apply placed --placement placement.json --undo --out undone
"""


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "place",
        help="place experts that tokens choose together",
        description="From a router trace of Megatron: copies of a token that are sent, and an "
        "order of the experts in which they are fewer, judged on tokens that it was not made from. "
        "With --apply: a checkpoint in that order. Nothing is left to do at run time.",
        epilog=EXAMPLE,
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument(
        "--trace", metavar="DIR", type=Path, help="folder of Megatron's --moe-routing-trace-path"
    )
    way.add_argument(
        "--apply",
        metavar="DIR",
        type=Path,
        help="checkpoint in format torch_dist: value of --load, or an iteration's folder",
    )
    for name, text in FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"with --trace: {text}")
    size = whole(1)
    parser.add_argument("--ep", metavar="N", type=size, help="EP ranks (default: the cluster's)")
    parser.add_argument("--etp", metavar="N", type=size, help="expert tensor parallel size")
    parser.add_argument("--pp", metavar="N", type=size, help="pipeline stages of the traced run")
    parser.add_argument(
        "--placement", metavar="FILE", type=Path, help="with --apply: file that --out wrote"
    )
    parser.add_argument("--undo", action="store_true", help="with --apply: put the experts back")
    parser.add_argument(
        "--out", metavar="PATH", type=Path, help="file of the placement, or the new checkpoint"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Place, or apply a placement."""
    needed = ("model", "cluster") if parsed.trace else ("placement", "out")
    others = ("placement", "undo") if parsed.trace else ("model", "cluster", "ep", "etp", "pp")
    way = "trace" if parsed.trace else "apply"
    for name in needed:
        if getattr(parsed, name) is None:
            raise ValueError(f"--{name}: not given, must be with --{way}")
    for name in others:
        if getattr(parsed, name) not in (None, False):
            raise ValueError(f"--{name}: given, must be left out with --{way}")
    return _place(parsed) if parsed.trace else _apply(parsed)


def _place(parsed: argparse.Namespace) -> int:
    from monta_megatron.tools.place.report import place

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
    return 0


def _apply(parsed: argparse.Namespace) -> int:
    from monta_megatron.tools.place.checkpoint import apply_placement
    from monta_megatron.tools.place.placement import read_placement

    placement = read_placement(parsed.placement)
    placement = placement.inverse() if parsed.undo else placement
    print_report(apply_placement(parsed.apply, placement, parsed.out), parsed.json)
    return 0
