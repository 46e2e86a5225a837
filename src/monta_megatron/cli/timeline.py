"""Draw what overlaps with what, recorded or predicted.

Draw when every stage and chunk ran, by resource, below stock alltoall, and print how much of each
resource was hidden by others: from a trace of monta bench --trace, or from the cost model (--model
and --cluster).

examples:
  monta timeline --model qwen3_235b_a22b --cluster h100_8x_ndr \\
      --world-size 128 --tp 2 --ep 16 --pp 4
  monta emulate --nodes 2 --ranks-per-node 2 --inter-mbit 500 -- \\
      monta bench --experts 16 --top-k 4 --hidden 1024 --tokens 512 --trace trace.json
  monta timeline trace.json
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from monta_megatron.cli import planning
from monta_megatron.common.tables import print_report, tell

# Of a layout, which a trace has.
PLANNED = ("world-size", "ranks-per-node", "tp", "ep", "etp", "cp", "pp", "tokens")


def add_arguments(parser: Any) -> None:
    """Add all flags."""
    parser.add_argument("trace", nargs="?", type=Path, help="file of bench --trace")
    chain_help = "default: the fastest of the trace, or the planner's choice"
    planning.add_arguments(parser, PLANNED, chain_help)
    parser.add_argument("--out", type=Path, help="the picture (default: TRACE.png, timeline.png)")


def run(parsed: argparse.Namespace) -> int:
    """Draw the picture, then print how much overlapped."""
    from monta_megatron.tools import pictures
    from monta_megatron.tools.timeline import of_prediction, of_trace

    if parsed.trace is None:
        planning.check_given(parsed, planning.FILES, (), "without TRACE")
        report = of_prediction(planning.request_of(parsed), parsed.chain)
    else:
        planning.check_given(parsed, (), (*planning.FILES, *PLANNED), "with TRACE")
        report = of_trace(parsed.trace, parsed.chain)
    path = parsed.out or (parsed.trace or Path("timeline")).with_suffix(".png")
    if pictures.can_draw():
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures.draw_timeline(report, path)
        report = replace(report, picture=path)
    else:
        tell("timeline", f"no picture without matplotlib: {pictures.INSTALL}")
    print_report(report, parsed.json)
    return 0
