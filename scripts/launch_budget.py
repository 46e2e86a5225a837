#!/usr/bin/env python
"""Count what a rank's host issues for the exchange of a MoE layer, forward and backward.

    python scripts/launch_budget.py --ep 16 --chain hierarchical_alltoall --num-chunks 4 --json
    python scripts/launch_budget.py --chain alltoall_dedup --num-chunks 4 --fused
    python scripts/launch_budget.py --host     # what this processor takes, for the presets

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

REPOSITORY = Path(__file__).parents[1]
SIZES = (16, 64)
KERNELS = ("torch", "fused")
REPEATS = 30

DEFINITIONS = {
    "tensor_operations": "operations of ATen that reach PyTorch's dispatcher, without views; "
    "an allocation is one, and a launch of a Triton kernel",
    "kernel_launches": "kernels of these, an estimate: none for an allocation, 5 for a sort, 4 for "
    "a top-k, 2 for a scan, else 1; those of collectives are not among them",
    "collectives": "calls of a process group, the exchange of counts among them",
    "stream_switches": "calls of `torch.cuda.set_stream`; a context `torch.cuda.stream` is two",
    "waits": "of a stream for an event or a collective, which do not hold up the host; what a "
    "process group itself issues is not counted",
    "host_us": "host time with collectives and streams that do nothing, on tiny CPU tensors, and "
    "Triton's launch with a launcher that does nothing: a figure of one machine, for ratios of "
    "interleaved runs only",
}
EXPOSED_US = """\
`counts_to_first_collective_us` is the host time from when the counts are on the host to when it
starts the first collective of dispatch: part of counts, enter and dispatch that no GPU hides.
"""


def parser() -> argparse.ArgumentParser:
    """The flags; what the figures mean stands below them."""
    made = argparse.ArgumentParser(
        description="Count what a rank's host issues for the exchange of a MoE layer.",
        epilog="\n".join(f"{name}: {text}" for name, text in DEFINITIONS.items())
        + f"\n{EXPOSED_US}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--ep", type=int, choices=SIZES, default=16, help="expert parallel ranks")
    made.add_argument("--chain", default="hierarchical_alltoall", help="name of a chain")
    made.add_argument("--num-chunks", type=int, default=1, help="chunks of each pass")
    made.add_argument("--fused", action="store_true", help="with Triton kernels; needs Triton")
    what = made.add_mutually_exclusive_group()
    what.add_argument("--json", action="store_true", help="print one JSON document")
    what.add_argument("--host", action="store_true", help="time the parts on this processor")
    return made


def budget(chain_name: str, ep: int, num_chunks: int, kernels: str) -> dict[str, object]:
    """What `--json` prints: `passes`, `total` with the same fields, and what nothing hides."""
    from launch_counts import count_launches
    from launch_times import EXPOSED, host_us

    counts = count_launches(chain_name, ep, num_chunks, kernels)
    us = host_us(chain_name, ep, num_chunks, REPEATS, kernels)
    passes = [
        {"name": name, **vars(row), "host_us": round(us[name], 1)} for name, row in counts.items()
    ]
    total = {name: round(sum(each[name] for each in passes), 1) for name in DEFINITIONS}
    exposed = {"counts_to_first_collective_us": round(us[EXPOSED], 1)}
    return {"passes": passes, "total": total, **exposed}


def checked(arguments: argparse.Namespace) -> None:
    """Raise ValueError for what cannot be counted."""
    from monta_megatron.chains import CHAINS

    chain = CHAINS.get(arguments.chain)
    if arguments.host and find_spec("triton") is None:
        raise ValueError("--host, got true, must come with Triton, which is not installed")
    if arguments.fused and find_spec("triton") is None:
        raise ValueError("--fused, got true, must come with Triton, which is not installed")
    if chain is None:
        raise ValueError(f"--chain, got {arguments.chain}, must be one of {', '.join(CHAINS)}")
    most = 1 if chain.serial else 8
    if not 1 <= arguments.num_chunks <= most:
        raise ValueError(
            f"--num-chunks, got {arguments.num_chunks}, must be 1 to {most} for {chain.name}"
        )


def main() -> int:
    """Count, and print."""
    arguments = parser().parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.path.insert(0, str(REPOSITORY / "tests" / "support"))
    try:
        checked(arguments)
        import fake_device  # noqa: F401
    except (ValueError, SkipTest) as error:
        print(f"monta: error: {error}", file=sys.stderr)
        return 2
    from fake_world import fake_world

    with fake_world():
        if arguments.host:
            print("".join(_host_lines()), end="")
        else:
            kernels = KERNELS[arguments.fused]
            result = budget(arguments.chain, arguments.ep, arguments.num_chunks, kernels)
            if arguments.json:
                print(json.dumps(result, indent=2))
            else:
                print("".join(_text(result)), end="")
    return 0


def _host_lines() -> list[str]:
    """What `--host` prints: microseconds by the names of a cluster file, as a table."""
    from host_figures import host_figures

    rows = host_figures().items()
    cells = [[name, us if isinstance(us, str) else f"{us:.1f}"] for name, us in rows]
    return [_line(["figure", "us"]), _line(["---", "---"]), *map(_line, cells)]


def _text(result: dict[str, object]) -> list[str]:
    rows = [*result["passes"], {"name": "total", **result["total"]}]  # type: ignore[misc, dict-item]
    head = ["", *map(_words, DEFINITIONS)]
    table = [_line(head), _line(["---"] * len(head)), *(_line(list(row.values())) for row in rows)]
    us = result["counts_to_first_collective_us"]
    return [*table, f"\nhost us from the counts to the first collective: {us}\n"]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _line(cells: list[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    sys.exit(main())
