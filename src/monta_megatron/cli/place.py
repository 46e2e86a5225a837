"""`monta place`: which experts to put together, and a checkpoint in which they are."""

import argparse
import sys
from pathlib import Path
from typing import Any

from monta_megatron.cli.parser import add_json
from monta_megatron.cli.planning import FILES
from monta_megatron.common.flags import not_negative, positive, whole
from monta_megatron.common.tables import Progress, print_report, tell

EXAMPLE = """\
examples:
  monta place --trace trace --model olmoe_1b_7b --cluster cluster.yaml \\
      --ep 8 --out placement.json
  monta place --apply checkpoints --placement placement.json --out placed
  monta place --apply placed --placement placement.json --undo --out undone
"""
# Flags that each of the two ways needs, and those that it takes besides.
NEEDED = {"trace": ("model", "cluster"), "apply": ("placement",)}
OTHERS = {
    "trace": ("ep", "etp", "pp", "max_load", "min_gain", "plot", "force"),
    "apply": ("undo", "replace", "without_optimizer"),
}


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "place",
        help="place experts that tokens choose together",
        description="From a router trace of Megatron: how many copies of a token are sent, and an "
        "order of the experts in which they are fewer, judged on tokens that it was not made from. "
        "With --apply: a checkpoint in that order. Nothing is left to do at run time.",
        epilog=EXAMPLE,
    )
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--trace", metavar="DIR", help="folder of Megatron's --moe-routing-trace-path")
    way.add_argument(
        "--apply",
        metavar="DIR",
        help="checkpoint in format torch_dist: what --load takes, or one iteration's folder",
    )
    for name, text in FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"with --trace: {text}")
    parser.add_argument(
        "--ep", metavar="N", type=whole(1), help="EP ranks (default: all of the cluster)"
    )
    parser.add_argument("--etp", metavar="N", type=whole(1), help="expert tensor parallel size")
    parser.add_argument(
        "--pp", metavar="N", type=whole(1), help="pipeline stages of the traced training"
    )
    parser.add_argument(
        "--max-load",
        metavar="X",
        type=positive,
        help="token-expert pairs of the busiest rank over the mean, at most (default: 1.1)",
    )
    parser.add_argument(
        "--min-gain",
        metavar="PCT",
        type=not_negative,
        help="copies fewer than which nothing is written (default: 3)",
    )
    parser.add_argument("--plot", metavar="DIR", help="draw co-activation there; needs matplotlib")
    parser.add_argument("--placement", metavar="FILE", help="with --apply: what --out wrote")
    parser.add_argument("--undo", action="store_true", help="put the experts back")
    parser.add_argument(
        "--without-optimizer",
        action="store_true",
        help="leave out an optimizer's state that cannot be placed; train on with --no-load-optim",
    )
    parser.add_argument("--out", metavar="PATH", help="the placement's file; the new checkpoint")
    parser.add_argument(
        "--replace", action="store_true", help="replace the checkpoint, instead of --out"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the placement's file")
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Place, or apply a placement."""
    way = "trace" if parsed.trace is not None else "apply"
    other = "apply" if way == "trace" else "trace"
    for name in NEEDED[way]:
        if getattr(parsed, name) is None:
            raise ValueError(f"--{name}: not given, must be with --{way}")
    for name in (*NEEDED[other], *OTHERS[other]):
        if getattr(parsed, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')}: given, must come with --{other}")
    return _place(parsed) if way == "trace" else _apply(parsed)


def _place(parsed: argparse.Namespace) -> int:
    from monta_megatron.tools.place.report import PlaceRequest, place

    request = PlaceRequest(
        trace=parsed.trace,
        model=parsed.model,
        cluster=parsed.cluster,
        ep=parsed.ep,
        etp=parsed.etp or 1,
        pp=parsed.pp or 1,
        max_load=parsed.max_load,
        min_gain_pct=parsed.min_gain,
        plot=parsed.plot,
        out=None if parsed.out is None else Path(parsed.out),
        force=parsed.force,
    )
    report = place(request, Progress("place" if sys.stderr.isatty() else None))
    print_report(report, parsed.json)
    if request.out is not None:
        refused = report.refused
        said = (
            f"wrote {request.out}"
            if refused is None
            else f"{request.out} is not written: {refused}"
        )
        tell("place", said)
    return 0


def _apply(parsed: argparse.Namespace) -> int:
    if (parsed.out is None) != parsed.replace:
        raise ValueError("--out: must be given, or --replace, and not both")

    from monta_megatron.tools.place.checkpoint import apply_placement
    from monta_megatron.tools.place.placement import read_placement

    placement = read_placement(Path(parsed.placement))
    report = apply_placement(
        Path(parsed.apply),
        placement.inverse() if parsed.undo else placement,
        None if parsed.out is None else Path(parsed.out),
        parsed.without_optimizer,
    )
    print_report(report, parsed.json)
    return 0
