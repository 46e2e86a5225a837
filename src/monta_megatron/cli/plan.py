"""`monta plan`: which chain, in how many chunks, and why; or which layout."""

import argparse
from collections.abc import Iterable
from typing import Any

from monta_megatron.cli import planning
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import name_of, whole
from monta_megatron.common.tables import print_report

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
    parser.add_argument(
        "--chain",
        metavar="NAME",
        type=name_of(_chains),
        help="say where this chain stands, and why it was not chosen",
    )
    parser.add_argument("--num-chunks", metavar="N", type=whole(1), help="of --chain")
    add_json(parser)
    parser.set_defaults(run=run)


def _chains() -> Iterable[str]:
    from monta_megatron.chains import CHAINS

    return CHAINS


def run(parsed: argparse.Namespace) -> int:
    """Print the plan, or the ranking."""
    from monta_megatron.tools.plan.answer import answer

    if parsed.chain is not None and not planning.has_layout(parsed):
        raise ValueError(
            f"--chain: got {parsed.chain}, must be with a layout (--ep N): it stands in a plan"
        )
    if parsed.chain is None and parsed.num_chunks is not None:
        raise ValueError(f"--num-chunks: got {parsed.num_chunks}, must be with --chain")
    request, inputs = planning.read(parsed)
    print_report(answer(request, inputs, parsed.chain, parsed.num_chunks), parsed.json)
    return 0
