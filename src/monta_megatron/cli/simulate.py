"""`monta simulate`: the cost model over values of one factor, on clusters nobody needs to have."""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.cli import planning
from monta_megatron.cli.output import add_json
from monta_megatron.common.flags import positive, whole
from monta_megatron.common.names import one_of
from monta_megatron.common.quantities import counted
from monta_megatron.common.tables import table
from monta_megatron.planner import ROUTINGS

if TYPE_CHECKING:
    from monta_megatron.planner.layout import ParallelLayout
    from monta_megatron.planner.plan import Plan
    from monta_megatron.planner.training_memory import TrainingMemory
    from monta_megatron.tools.plan.request import PlanInputs, PlanRequest

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
    "tokens": (whole(1), "tokens of a rank"),
    "ranks": (whole(1), "ranks of an exchange (EP x ETP, at the ETP given)"),
    "top-k": (whole(1), "experts of a token"),
    "chunks": (whole(1), "chunks of every pipelined chain"),
    "inter-rate-ratio": (positive, "rate of the network over the cluster's"),
}
WIDTH, VALUES_PER_TABLE = 80, 4


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
    parser.add_argument("--plot", metavar="DIR", help="draw it there; needs matplotlib")
    add_json(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Plan at every value."""
    from monta_megatron.tools.pictures import check_can_plot

    request, inputs = planning.read(parsed)
    sweep: _Sweep = parsed.sweep
    check_can_plot(parsed.plot)
    planned = [_plan(request, inputs, sweep.factor, value) for value in sweep.values]
    plans = [plan for plan, _ in planned]
    title = _title(request, inputs, sweep.factor)
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
                    "reason": plan.reason,
                    "best_us": plan.best_us(),
                    "notes": list(plan.notes),
                    "memory": memory.document(),
                }
                for value, (plan, memory) in zip(sweep.values, planned, strict=True)
            ],
        }
        print(json.dumps(document, indent=2))
    else:
        most = max((memory for _, memory in planned), key=lambda memory: memory.needed_bytes)
        about = [*textwrap.wrap(title, WIDTH), *textwrap.wrap(f"needs {most.describe()}", WIDTH)]
        notes = dict.fromkeys(note for plan in plans for note in plan.notes)
        after = [
            "us, each chain in its best number of chunks; * the choice; - cannot run",
            *(line for note in notes for line in textwrap.wrap(f"note: {note}", WIDTH)),
        ]
        print("\n\n".join(["\n".join(about), *_tables(sweep, plans), "\n".join(after)]))
    if parsed.plot is not None:
        from monta_megatron.tools.plan.plots import plot_plans

        path = Path(parsed.plot) / f"simulate_{sweep.factor}.png"
        plot_plans(sweep.values, plans, FACTORS[sweep.factor][1], title, path)
        print(f"monta simulate: drew {path}", file=sys.stderr)
    return 0


def _title(request: "PlanRequest", inputs: "PlanInputs", factor: str) -> str:
    """What stays the same at all values."""
    model, layout = inputs.model, inputs.layout
    tokens = layout.tokens_per_rank(model) if request.tokens is None else request.tokens
    parts = [
        f"{model.name} on {inputs.cluster.name}: TP {layout.tp}",
        *([] if factor == "ranks" else [f"EP {layout.ep}"]),
        f"ETP {layout.etp}",
        *([] if factor == "tokens" else [f"{counted(tokens, 'token')} per rank"]),
    ]
    return ", ".join(parts)


def _plan(
    request: "PlanRequest", inputs: "PlanInputs", factor: str, value: float
) -> "tuple[Plan, TrainingMemory]":
    """The plan with this value of the factor, everything else as requested, and its memory."""
    from monta_megatron.planner.network_rate import with_inter_rate
    from monta_megatron.tools.plan.request import plan_request

    model, cluster = inputs.model, inputs.cluster
    settings: dict[str, Any] = {}
    if factor == "tokens":
        request = replace(request, tokens=int(value))
    elif factor == "inter-rate-ratio":
        inputs = replace(inputs, cluster=with_inter_rate(cluster, value))
    elif factor == "chunks":
        settings["num_chunks"] = (value,)
    elif factor == "top-k":
        if request.routing not in ROUTINGS:
            raise ValueError(
                f"--sweep: got top-k, must be another factor beside the trace {request.routing}, "
                "whose top-k is what it is"
            )
        if value > model.num_experts:
            raise ValueError(
                f"--sweep: top-k: got {value}, must be at most the {model.num_experts} experts of "
                f"{model.name}"
            )
        inputs = replace(inputs, model=replace(model, moe_router_topk=int(value)))
    else:
        layout = _layout_of(inputs, int(value))
        num_nodes = max(math.ceil(layout.world_size / cluster.ranks_per_node), cluster.num_nodes)
        inputs = replace(inputs, layout=layout, cluster=replace(cluster, num_nodes=num_nodes))
    where = f"--sweep: {factor} {_shown(value)}"
    plan, _, memory = plan_request(request, inputs, where, **settings)
    return plan, memory


def _layout_of(inputs: "PlanInputs", num_ranks: int) -> "ParallelLayout":
    """The layout with exchanges of `num_ranks` ranks, on as many more ranks as these take."""
    layout = inputs.layout
    ep, rest = divmod(num_ranks, layout.etp)
    if rest or inputs.model.num_experts % max(ep, 1):
        raise ValueError(
            f"--sweep: ranks: got {num_ranks}, must be ETP ({layout.etp}) times a divisor of the "
            f"{inputs.model.num_experts} experts of {inputs.model.name}"
        )
    world_size = math.lcm(layout.world_size, num_ranks * layout.pp)
    return replace(layout, ep=ep, world_size=world_size)


def _tables(sweep: _Sweep, plans: "list[Plan]") -> list[str]:
    """Chains down, values across, a few in each table so that 80 columns hold it."""
    from monta_megatron.chains import CHAINS

    def cell(plan: "Plan", chain: str) -> str:
        best_us = plan.best_us()[chain]
        mark = "*" if plan.chain == chain else " "
        return f"{'-' if best_us is None else f'{best_us:,.0f}'}{mark}"

    tables = []
    for first in range(0, len(plans), VALUES_PER_TABLE):
        part = slice(first, first + VALUES_PER_TABLE)
        chunks = ["chunks of the choice", *(f"{plan.num_chunks} " for plan in plans[part])]
        rows = [[chain, *(cell(plan, chain) for plan in plans[part])] for chain in CHAINS]
        values = (f">{_shown(value)} " for value in sweep.values[part])
        tables.append(table([sweep.factor, *values], [*rows, chunks]))
    return tables


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _sweep(text: str) -> _Sweep:
    """An argparse type: "tokens=512,1024"."""
    factor, _, values = text.partition("=")
    if factor not in FACTORS or not values:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, must be FACTOR=V,V,... with {one_of(factor, FACTORS)}"
        )
    convert = FACTORS[factor][0]
    return _Sweep(factor=factor, values=tuple(map(convert, values.split(","))))
