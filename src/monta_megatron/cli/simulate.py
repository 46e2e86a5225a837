"""`monta simulate`: the cost model over values of one factor, on clusters nobody needs to have."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monta_megatron.cli import planning
from monta_megatron.cli.parser import add_json
from monta_megatron.common.flags import num_tokens, positive, whole
from monta_megatron.common.tables import print_report, tell
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

# Factor of a sweep -> how to read its values, and its description.
FACTORS: dict[str, tuple[Callable[[str], float], str]] = {
    "tokens": (num_tokens(1), "tokens of a rank"),
    "ranks": (whole(1), "ranks of an exchange (EP x ETP, at the ETP given)"),
    "top-k": (whole(1), "experts of a token"),
    "chunks": (whole(1), "chunks of every pipelined chain"),
    "inter-rate-ratio": (positive, "rate of the network over the cluster's"),
}


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
    from monta_megatron.tools.pictures import check_can_plot
    from monta_megatron.tools.plan.simulation import simulate

    request, inputs = planning.read(parsed)
    check_can_plot(parsed.plot)
    limit_bytes = bytes_of_gb(parsed.memory_limit_gb)
    simulation = simulate(request, inputs, parsed.sweep.factor, parsed.sweep.values, limit_bytes)
    print_report(simulation, parsed.json)
    if parsed.plot is not None:
        from monta_megatron.tools.plan.report import plot_plans

        path = Path(parsed.plot) / f"simulate_{simulation.factor}.png"
        label = FACTORS[simulation.factor][1]
        plot_plans(simulation.values, simulation.plans, label, simulation.title, path)
        tell("simulate", f"drew {path}")
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
