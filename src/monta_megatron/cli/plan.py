"""`monta plan`: which chain, in how many chunks, and why; or which layout."""

import argparse
from collections.abc import Iterable
from typing import Any

from monta_megatron.cli import planning
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import fraction, name_of, not_negative, positive, whole
from monta_megatron.common.tables import print_report, tell

EXAMPLE = """\
examples:
  monta plan --model configs/models/deepseek_v3.yaml \\
      --cluster configs/clusters/h100_8x_ndr.yaml --world-size 1024 \\
      --ep 64 --pp 16
  monta plan --model configs/models/mixtral_8x7b.yaml \\
      --cluster configs/clusters/a800_2x8_ib200.yaml --json
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
    planning.add_arguments(parser)
    planning.add_overlap_experts(parser)
    parser.add_argument(
        "--memory-limit-gb", metavar="X", type=positive, help="what the exchange may hold"
    )
    parser.add_argument(
        "--margin",
        metavar="X",
        type=fraction,
        help="by how much a plainer chain may be slower (default: 0.03)",
    )
    parser.add_argument(
        "--overlapped-compute-us",
        metavar="X",
        type=not_negative,
        default=0.0,
        help="computation (experts, shared experts, another micro-batch) that overlaps the "
        "exchange of a layer and micro-batch, in us: the exposed part is minimized",
    )
    parser.add_argument(
        "--chain",
        metavar="NAME",
        type=name_of(_chains),
        help="say where this chain stands, and why it was not chosen",
    )
    parser.add_argument("--num-chunks", metavar="N", type=whole(1), help="of --chain")
    parser.add_argument("--out", metavar="FILE", help="write the plan, for --moe-monta-plan")
    parser.add_argument("--force", action="store_true", help="overwrite the file of --out")
    parser.add_argument(
        "--program", action="store_true", help="show every operation of the chosen chain's passes"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def _chains() -> Iterable[str]:
    from monta_megatron.chains import CHAINS

    return CHAINS


def run(parsed: argparse.Namespace) -> int:
    """Print the plan, or the ranking."""
    from monta_megatron.tools.plan.answer import Questions, answer

    questions = Questions(
        memory_limit_gb=parsed.memory_limit_gb,
        margin=parsed.margin,
        overlapped_compute_us=parsed.overlapped_compute_us,
        chain=parsed.chain,
        num_chunks=parsed.num_chunks,
        program=parsed.program,
        out=parsed.out,
        force=parsed.force,
    )
    questions.check(has_layout=planning.has_layout(parsed), overlap_experts=parsed.overlap_experts)
    report = answer(*planning.read(parsed, **questions.limits), questions)
    if parsed.out is not None:
        tell("plan", f"wrote {parsed.out}")
    print_report(report, parsed.json)
    return 0
