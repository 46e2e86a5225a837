"""`monta simulate`: the cost model over values of one factor, on clusters nobody needs to have."""

import argparse
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monta_megatron.cli import planning
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import num_tokens, positive, whole
from monta_megatron.common.tables import print_json
from monta_megatron.common.text import one_of, same_name
from monta_megatron.common.units import bytes_of_gb

EXAMPLE = """\
examples:
  monta simulate --model configs/models/qwen3_235b_a22b.yaml \\
      --cluster configs/clusters/h100_8x_ndr.yaml --world-size 128 \\
      --tp 2 --ep 16 --pp 4 --sweep tokens=512,1024,2048,4096
  monta simulate --model configs/models/deepseek_v3.yaml \\
      --cluster configs/clusters/h100_8x_ndr.yaml --world-size 2048 \\
      --ep 8 --pp 16 --sweep ranks=8,16,32,64,128 --plot plots
"""

# What may be swept: how to read its values, and its description.
FACTORS: dict[str, tuple[Callable[[str], float], str]] = {
    "tokens": (num_tokens(1), "tokens of a rank"),
    "ranks": (whole(1), "ranks of an exchange (EP x ETP, at the ETP given)"),
    "top-k": (whole(1), "experts of a token"),
    "chunks": (whole(1), "chunks of every pipelined chain"),
    "inter-rate-ratio": (positive, "rate of the network over the cluster's"),
}
WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class _Sweep:
    """One factor, and the values that it takes."""

    factor: str
    values: tuple[float, ...]


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "simulate",
        help="predict times over values of one factor",
        description="Predict the time of every chain, and the planner's choice, while one factor "
        "changes. With ranks the cluster has as many nodes as that takes.",
        epilog=EXAMPLE,
    )
    planning.add_arguments(parser)
    parser.add_argument(
        "--sweep",
        metavar="FACTOR=V,V,...",
        type=_sweep,
        required=True,
        help="; ".join(f"{name}: {text}" for name, (_, text) in FACTORS.items()),
    )
    parser.add_argument(
        "--memory-limit-gb", metavar="X", type=positive, help="what the exchange may hold"
    )
    parser.add_argument("--plot", metavar="DIR", help="draw it there; needs matplotlib")
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Plan at every value."""
    from monta_megatron.chains import CHAINS
    from monta_megatron.planner.select import MARGIN
    from monta_megatron.tools.pictures import check_can_plot
    from monta_megatron.tools.plan.simulation import (
        benefit_line,
        best_within,
        plan_at,
        simulation_tables,
        simulation_title,
    )

    request, inputs = planning.read(parsed)
    sweep: _Sweep = parsed.sweep
    check_can_plot(parsed.plot)
    limit_bytes = bytes_of_gb(parsed.memory_limit_gb)
    planned = [plan_at(request, inputs, sweep.factor, value, limit_bytes) for value in sweep.values]
    plans = [plan for plan, _, _ in planned]
    title = simulation_title(request, inputs, sweep.factor)
    if parsed.json:
        document = {
            "title": title,
            "factor": sweep.factor,
            "points": [
                {
                    "value": value,
                    "chain": plan.chain,
                    "num_chunks": plan.num_chunks,
                    "predicted_us": plan.predicted_us,
                    "range_us": plan.range_us,
                    "reason": plan.reason,
                    "best_us": plan.best_us(),
                    "least_bytes": {chain: best_within(plan, chain)[1] for chain in CHAINS},
                    "notes": list(plan.notes),
                    "memory": memory.document(),
                    "benefit": None if benefit is None else benefit.document(),
                }
                for value, (plan, memory, benefit) in zip(sweep.values, planned, strict=True)
            ],
        }
        print_json(document)
    else:
        most = max((memory for _, memory, _ in planned), key=lambda memory: memory.needed_bytes)
        about = [*textwrap.wrap(title, WIDTH), *textwrap.wrap(f"needs {most.describe()}", WIDTH)]
        notes = dict.fromkeys(note for plan in plans for note in plan.notes)
        with_memory = [(plan, memory) for plan, memory, _ in planned]
        tables = simulation_tables(sweep.factor, sweep.values, with_memory, limit_bytes)
        gain = benefit_line(sweep.factor, sweep.values, [benefit for _, _, benefit in planned])
        after = [
            "us, each chain in its best number of chunks; * the choice, in its own: the",
            f"fastest, or a plainer one within {MARGIN:.0%} of it; - cannot run; over: holds more",
            "than it may in any number of chunks",
            *([] if gain is None else textwrap.wrap(gain, WIDTH)),
            *(line for note in notes for line in textwrap.wrap(f"note: {note}", WIDTH)),
        ]
        print("\n\n".join(["\n".join(about), *tables, "\n".join(after)]))
    if parsed.plot is not None:
        from monta_megatron.tools.plan.report import plot_plans

        path = Path(parsed.plot) / f"simulate_{sweep.factor}.png"
        plot_plans(sweep.values, plans, FACTORS[sweep.factor][1], title, path)
        print(f"monta simulate: drew {path}", file=sys.stderr)
    return 0


def _sweep(text: str) -> _Sweep:
    """An argparse type: "tokens=512,1024"."""
    factor, _, values = text.partition("=")
    factor = same_name(factor, FACTORS) or factor
    if factor not in FACTORS or not values:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, must be FACTOR=V,V,... with {one_of(factor, FACTORS)}"
        )
    convert = FACTORS[factor][0]
    return _Sweep(factor=factor, values=tuple(map(convert, values.split(","))))
