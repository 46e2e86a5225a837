"""`monta simulate`: the cost model over values of one factor, on clusters nobody needs to have."""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.cli import planning
from monta_megatron.flags import positive, whole
from monta_megatron.names import one_of

if TYPE_CHECKING:
    from monta_megatron.planner.plan import Plan

EXAMPLE = """\
examples:
  monta simulate --model configs/models/qwen3_235b_a22b.yaml \\
      --cluster configs/clusters/h100_8x_ndr.yaml --ep 16 \\
      --sweep tokens=512,1024,2048,4096
  monta simulate --model configs/models/deepseek_v3.yaml \\
      --cluster configs/clusters/h100_8x_ndr.yaml --ep 8 \\
      --sweep ranks=8,16,32,64,128 --plot plots
"""

# What may be swept: how to read its values, and its description.
FACTORS: dict[str, tuple[Callable[[str], float], str]] = {
    "tokens": (whole(1), "tokens of a rank"),
    "ranks": (whole(1), "ranks of an exchange (EP x ETP, at the ETP given)"),
    "top-k": (whole(1), "experts of a token"),
    "chunks": (whole(1), "chunks of every pipelined chain"),
    "inter-rate-ratio": (positive, "rate of the network over the cluster's"),
}
WIDTH, CHAIN_WIDTH, VALUE_WIDTH, VALUES_PER_BLOCK = 80, 23, 14, 4


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
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Plan at every value."""
    from monta_megatron.pictures import check_can_plot

    asked, sweep = planning.read(parsed), parsed.sweep
    check_can_plot(parsed.plot)
    plans = [_plan(parsed, asked, sweep.factor, value) for value in sweep.values]
    title = _title(parsed, asked, sweep.factor)
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
                }
                for value, plan in zip(sweep.values, plans, strict=True)
            ],
        }
        print(json.dumps(document, indent=2))
    else:
        print("\n".join([*textwrap.wrap(title, WIDTH), "", *_table(sweep, plans)]))
    if parsed.plot is not None:
        from monta_megatron.planner.plots import plot_plans

        path = Path(parsed.plot) / f"simulate_{sweep.factor}.png"
        plot_plans(sweep.values, plans, FACTORS[sweep.factor][1], title, path)
        print(f"monta simulate: drew {path}", file=sys.stderr)
    return 0


def _title(parsed: argparse.Namespace, asked: planning.Asked, factor: str) -> str:
    """What stays the same at all values."""
    layout = asked.layout
    tokens = layout.tokens_per_rank(asked.model) if parsed.tokens is None else parsed.tokens
    parts = [
        f"{asked.model.name} on {asked.cluster.name}: TP {layout.tp}",
        *([] if factor == "ranks" else [f"EP {layout.ep}"]),
        f"ETP {layout.etp}",
        *([] if factor == "tokens" else [f"{tokens:,} tokens per rank"]),
    ]
    return ", ".join(parts)


def _plan(parsed: argparse.Namespace, asked: planning.Asked, factor: str, value: float) -> "Plan":
    """The plan with this value of the factor, everything else as asked."""
    from monta_megatron.planner.search import slowest_plan

    model, cluster, layout = asked.model, asked.cluster, asked.layout
    settings: dict[str, Any] = {"phase": parsed.phase}
    if factor == "tokens":
        parsed = argparse.Namespace(**{**vars(parsed), "tokens": value})
    elif factor == "inter-rate-ratio":
        cluster = cluster.with_inter_rate(value)
    elif factor == "chunks":
        settings["num_chunks"] = (value,)
    elif factor == "top-k":
        if parsed.routing not in planning.ROUTINGS:
            raise ValueError(
                f"--sweep: got top-k, must be another factor beside the trace {parsed.routing}, "
                "whose top-k is what it is"
            )
        if value > model.num_experts:
            raise ValueError(
                f"--sweep: top-k: got {value}, must be at most the {model.num_experts} experts of "
                f"{model.name}"
            )
        model = replace(model, moe_router_topk=int(value))
    else:
        layout = _layout_of(asked, int(value))
        num_nodes = math.ceil(layout.world_size / cluster.ranks_per_node)
        cluster = replace(cluster, num_nodes=max(num_nodes, cluster.num_nodes))
    workloads = planning.workloads(parsed, model, cluster, layout)
    plan, _ = slowest_plan(workloads, cluster, **settings)
    return plan


def _layout_of(asked: planning.Asked, num_ranks: int) -> Any:
    """The layout with exchanges of `num_ranks` ranks, and the smallest world that allows them."""
    layout = asked.layout
    ep, rest = divmod(num_ranks, layout.etp)
    if rest or asked.model.num_experts % max(ep, 1):
        raise ValueError(
            f"--sweep: ranks: got {num_ranks}, must be ETP ({layout.etp}) times a divisor of the "
            f"{asked.model.num_experts} experts of {asked.model.name}"
        )
    world_size = math.lcm(layout.tp * layout.cp * layout.pp, layout.etp * ep * layout.pp)
    return replace(layout, ep=ep, world_size=world_size)


def _table(sweep: _Sweep, plans: Sequence["Plan"]) -> list[str]:
    """Chains down, values across, in blocks of 80 columns."""
    from monta_megatron.chains import CHAINS

    lines = []
    for first in range(0, len(plans), VALUES_PER_BLOCK):
        block = slice(first, first + VALUES_PER_BLOCK)
        values = "".join(f"{_shown(value):>{VALUE_WIDTH}}" for value in sweep.values[block])
        lines.append(f"{sweep.factor:<{CHAIN_WIDTH}}{values}")
        for chain in CHAINS:
            cells = ""
            for plan in plans[block]:
                best_us = plan.best_us()[chain]
                mark = "*" if plan.chain == chain else " "
                cells += f"{'-' if best_us is None else f'{best_us:,.0f}'}{mark}".rjust(VALUE_WIDTH)
            lines.append(f"{chain:<{CHAIN_WIDTH}}{cells}".rstrip())
        chunks = "".join(f"{plan.num_chunks:>{VALUE_WIDTH - 1}} " for plan in plans[block])
        lines += [f"{'chunks of the choice':<{CHAIN_WIDTH}}{chunks}".rstrip(), ""]
    lines.append("us, each chain in its best number of chunks; * the choice; - cannot run")
    notes = dict.fromkeys(note for plan in plans for note in plan.notes)
    return [*lines, *(line for note in notes for line in textwrap.wrap(f"note: {note}", WIDTH))]


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
