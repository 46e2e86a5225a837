"""Place experts that tokens choose together.

From a router trace of Megatron: copies of a token that are sent, and an order of the experts in
which they are fewer, judged on tokens that it was not made from. With --apply: a checkpoint in that
order. Nothing is left to do at run time.

examples:
  monta place --trace trace --model olmoe_1b_7b --cluster cluster.yaml \\
      --ep 8 --out placement.json
  monta place --apply checkpoints --placement placement.json --out placed
  monta place --apply placed --placement placement.json --undo --out undone
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from monta_megatron.cli.planning import FILES, check_given
from monta_megatron.common.flags import whole
from monta_megatron.common.tables import Progress, print_json, print_report, tell


def add_arguments(parser: Any) -> None:
    """Add all flags."""
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--trace", type=Path, help="folder of Megatron's --moe-routing-trace-path")
    way.add_argument("--apply", type=Path, help="torch_dist checkpoint, as Megatron's --load")
    for name, text in FILES.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"with --trace: {text}")
    parser.add_argument("--ep", type=whole(1), help="EP ranks (default: the cluster's)")
    parser.add_argument("--etp", type=whole(1), help="expert tensor parallel size")
    parser.add_argument("--pp", type=whole(1), help="pipeline stages of the traced run")
    parser.add_argument("--placement", type=Path, help="with --apply: file that --out wrote")
    parser.add_argument("--undo", action="store_true", help="with --apply: put the experts back")
    parser.add_argument("--out", type=Path, help="file of the placement, or the new checkpoint")


def run(parsed: argparse.Namespace) -> int:
    """Place, or apply a placement."""
    if parsed.trace is None:
        return _apply(parsed)
    check_given(parsed, FILES, ("placement", "undo"), "with --trace")
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
    return 0


def _apply(parsed: argparse.Namespace) -> int:
    check_given(parsed, ("placement", "out"), (*FILES, "ep", "etp", "pp"), "with --apply")
    from monta_megatron.tools.placed_checkpoint import apply_placement, read_placement

    placement = read_placement(parsed.placement, undo=parsed.undo)
    written = apply_placement(parsed.apply, placement, parsed.out)
    tell("place", f"wrote {written}: the experts of {len(placement)} layers")
    if parsed.json:
        print_json({"written": str(written), "layers": sorted(placement)})
    return 0
