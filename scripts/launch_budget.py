#!/usr/bin/env python
"""Count what a rank's host issues for the exchange of a MoE layer, forward and backward.

    python scripts/launch_budget.py --ep 16 --chain hierarchical_alltoall --num-chunks 4 --json
    python scripts/launch_budget.py --chain alltoall_dedup --num-chunks 4 --fused

No GPU is needed, and no pytest, but Megatron-Core.
"""

import argparse
import json
import logging
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from unittest import SkipTest

from monta_megatron.chains import CHAINS
from monta_megatron.cli.parser import Parser

REPOSITORY = Path(__file__).parents[1]
SIZES = (16, 64)
KERNELS = ("torch", "fused")
REPEATS = 30
FIGURES = (
    "tensor_operations",
    "kernel_launches",
    "collectives",
    "stream_switches",
    "waits",
    "host_us",
)


def read_arguments() -> argparse.Namespace:
    """The command line, checked; a mistake ends the program with status 2."""
    parser = Parser(description=f"{__doc__}\ndocs/measuring.md says what each figure counts.")
    parser.add_argument("--ep", type=int, choices=SIZES, default=16, help="expert parallel ranks")
    parser.add_argument("--chain", choices=CHAINS, default="hierarchical_alltoall")
    parser.add_argument("--num-chunks", type=int, default=1, help="chunks of each pass")
    parser.add_argument("--fused", action="store_true", help="with Triton kernels; needs Triton")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    if arguments.fused and find_spec("triton") is None:
        parser.error("--fused: got true, must come with Triton, which is not installed")
    most = 1 if CHAINS[arguments.chain].serial else 8
    if not 1 <= arguments.num_chunks <= most:
        parser.error(
            f"--num-chunks: got {arguments.num_chunks}, must be 1 to {most} for {arguments.chain}"
        )
    return arguments


def budget(chain_name: str, ep: int, num_chunks: int, kernels: str) -> dict[str, object]:
    """The document of `--json`: `passes`, and `total` with the same fields."""
    from launch_counts import count_launches
    from launch_times import host_us

    counts = count_launches(chain_name, ep, num_chunks, kernels)
    us = host_us(chain_name, ep, num_chunks, REPEATS, kernels)
    passes = [
        {"name": name, **row._asdict(), "host_us": round(us[name], 1)}
        for name, row in counts.items()
    ]
    total = {name: round(sum(each[name] for each in passes), 1) for name in FIGURES}
    return {"passes": passes, "total": total}


def main() -> int:
    """Count, and print."""
    arguments = read_arguments()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.path.insert(0, str(REPOSITORY / "tests" / "support"))
    try:
        import fake_device  # noqa: F401
    except SkipTest as error:
        print(f"monta: error: {error}", file=sys.stderr)
        return 2
    from fake_world import fake_world

    with fake_world():
        kernels = KERNELS[arguments.fused]
        result = budget(arguments.chain, arguments.ep, arguments.num_chunks, kernels)
    print(json.dumps(result, indent=2) if arguments.json else "\n".join(_text(result)))
    return 0


def _text(result: dict[str, object]) -> list[str]:
    rows = [*result["passes"], {"name": "total", **result["total"]}]  # type: ignore[misc, dict-item]
    head = ["", *(name.replace("_", " ") for name in FIGURES)]
    return [_line(head), _line(["---"] * len(head)), *(_line(list(row.values())) for row in rows)]


def _line(cells: list[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
