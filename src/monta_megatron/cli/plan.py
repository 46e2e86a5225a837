"""`monta plan`: which chain, in how many chunks, and why; or which layout."""

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monta_megatron.planner.cluster import Cluster
    from monta_megatron.planner.layout import ParallelLayout
    from monta_megatron.planner.model import Model
    from monta_megatron.planner.plan import Plan
    from monta_megatron.planner.routing import Routing

EXAMPLE = """\
examples:
  monta plan --model configs/models/deepseek_v3.yaml \\
      --cluster configs/clusters/h100_8x_ndr.yaml --ep 64
  monta plan --model configs/models/mixtral_8x7b.yaml \\
      --cluster configs/clusters/a800_2x8_ib200.yaml --json
"""

SIZES = {
    "world-size": "all ranks (default: those of the cluster)",
    "tp": "tensor parallel size, with sequence parallelism",
    "ep": "expert parallel size",
    "etp": "expert tensor parallel size",
    "cp": "context parallel size",
    "pp": "pipeline parallel size",
}
ROUTINGS = ("uniform", "skewed", "node-limited")


def add_parser(commands: Any) -> None:
    """Add the sub-command to `monta`."""
    parser = commands.add_parser(
        "plan",
        help="choose a chain, or rank the layouts",
        description="Choose the chain and the number of chunks for a layout, from the costs of the "
        "cluster. Without --layout, --tp, --ep and --etp: every layout that fits, ranked.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", metavar="FILE", required=True, help="configs/models/*.yaml")
    parser.add_argument("--cluster", metavar="FILE", required=True, help="configs/clusters/*.yaml")
    parser.add_argument("--layout", metavar="FILE", help="YAML with the sizes below")
    for name, text in SIZES.items():
        parser.add_argument(f"--{name}", metavar="N", type=_whole(1), help=text)
    parser.add_argument(
        "--tokens", metavar="N", type=_whole(0), help="of a rank (default: the model's batch)"
    )
    parser.add_argument(
        "--routing",
        metavar="NAME|FOLDER",
        default="uniform",
        help=f"{', '.join(ROUTINGS)}, or a folder of Megatron's --moe-routing-trace-path "
        "(default: uniform, by the model's router)",
    )
    parser.add_argument(
        "--phase",
        choices=("forward", "forward_backward"),
        default="forward_backward",
        help="what has to be fast (default: forward_backward)",
    )
    parser.add_argument(
        "--inter-rate-ratio",
        metavar="X",
        type=_positive,
        help="price a network with X times the cluster's rate",
    )
    parser.add_argument(
        "--memory-limit-gb", metavar="X", type=_positive, help="what the exchange may hold"
    )
    parser.add_argument(
        "--margin",
        metavar="X",
        type=_fraction,
        help="by how much a plainer chain may be slower (default: 0.03)",
    )
    parser.add_argument("--out", metavar="FILE", help="write the plan, for --moe-monta-plan")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Print the decision, or the ranking."""
    from monta_megatron import strict_yaml
    from monta_megatron.planner.cluster import Cluster
    from monta_megatron.planner.layouts import rank_layouts
    from monta_megatron.planner.model import Model
    from monta_megatron.planner.report import layout_lines, plan_lines

    model = strict_yaml.load(Model, parsed.model)
    cluster = strict_yaml.load(Cluster, parsed.cluster)
    if parsed.inter_rate_ratio is not None:
        cluster = cluster.with_inter_rate(parsed.inter_rate_ratio)

    ranking = None
    if parsed.layout is None and (parsed.tp, parsed.ep, parsed.etp) == (None, None, None):
        world_size = cluster.num_ranks if parsed.world_size is None else parsed.world_size
        _check_world("--world-size", world_size, cluster, parsed)
        ranking = rank_layouts(
            model,
            cluster,
            world_size=world_size,
            cp=parsed.cp or 1,
            pp=parsed.pp or 1,
            phase=parsed.phase,
        )
        best = ranking[0]
        layout = _layout(parsed, cluster, {"tp": best.tp, "ep": best.ep, "etp": best.etp})
    else:
        layout = _layout(parsed, cluster, {})
    plan = _plan(parsed, model, cluster, layout)
    if parsed.out is not None:
        plan.save(parsed.out)
    if parsed.json:
        document = strict_yaml.plain(plan)
        document["layouts"] = None if ranking is None else strict_yaml.plain(ranking)
        print(json.dumps(document, indent=2))
    elif ranking is not None:
        print("\n".join([f"{model.name} on {cluster.name}", "", *layout_lines(ranking)]))
    else:
        print("\n".join([f"{model.name} on {cluster.name}", "", *plan_lines(plan)]))
    return 0


def _layout(
    parsed: argparse.Namespace, cluster: "Cluster", sizes: dict[str, int]
) -> "ParallelLayout":
    """Defaults, then the file, then the flags."""
    from monta_megatron import strict_yaml
    from monta_megatron.planner.layout import ParallelLayout

    where = "layout"
    data: Any = {"world_size": cluster.num_ranks, **sizes}
    if parsed.layout is not None:
        where = parsed.layout
        found = strict_yaml.read(parsed.layout)
        data = {**data, **found} if isinstance(found, dict) else found
    flags = {
        name: value
        for name in ("world_size", "tp", "ep", "etp", "cp", "pp")
        if (value := getattr(parsed, name)) is not None
    }
    if isinstance(data, dict):
        data = {**data, **flags}
    layout = strict_yaml.build(ParallelLayout, data, where)
    _check_world(f"{where}: world_size", layout.world_size, cluster, parsed)
    return layout


def _check_world(
    where: str, world_size: int, cluster: "Cluster", parsed: argparse.Namespace
) -> None:
    if world_size > cluster.num_ranks:
        raise ValueError(
            f"{where}: got {world_size}, must be at most the {cluster.num_ranks} ranks of "
            f"{parsed.cluster}"
        )


def _plan(
    parsed: argparse.Namespace, model: "Model", cluster: "Cluster", layout: "ParallelLayout"
) -> "Plan":
    from dataclasses import replace

    from monta_megatron.planner.layout import exchanges
    from monta_megatron.planner.search import MARGIN, plan
    from monta_megatron.planner.workload import Workload

    misfit = layout.misfit(model)
    if misfit is not None:
        raise ValueError(f"{parsed.layout or 'layout'}: {misfit}")
    places = exchanges(layout, model.num_experts, cluster.ranks_per_node)
    tokens = layout.tokens_per_rank(model) if parsed.tokens is None else parsed.tokens
    limit = parsed.memory_limit_gb
    plans = [
        plan(
            Workload.of(model, place, tokens, _routing(parsed.routing, model, place.num_nodes)),
            cluster,
            phase=parsed.phase,
            memory_limit_bytes=None if limit is None else limit * 1e9,
            margin=MARGIN if parsed.margin is None else parsed.margin,
        )
        for place in places
    ]
    slowest = max(plans, key=lambda each: each.predicted_us or 0.0)
    if len(plans) > 1:
        note = f"exchanges lie on the nodes in {len(plans)} ways; this is the slowest of them"
        return replace(slowest, notes=(*slowest.notes, note))
    return slowest


def _routing(name: str, model: "Model", num_nodes: int) -> "Routing":
    from monta_megatron.planner.router_trace import traced_routing
    from monta_megatron.planner.routing import UniformRouting
    from monta_megatron.planner.sampled_routing import skewed_routing
    from monta_megatron.planner.workload import uniform_routing

    if name == "uniform":
        return uniform_routing(model)
    if name == "skewed":
        return skewed_routing(model.num_experts, model.moe_router_topk)
    if name != "node-limited":
        return traced_routing(name, model.num_experts)
    limit = num_nodes // 2
    if limit == 0 or model.num_experts % num_nodes:
        raise ValueError(
            f"--routing: got {name}, must not be where an exchange lies on {num_nodes} node(s); it "
            "means half of them"
        )
    if limit * (model.num_experts // num_nodes) < model.moe_router_topk:
        raise ValueError(
            f"--routing: got {name}, must leave {model.moe_router_topk} experts to choose from; "
            f"half of {num_nodes} nodes hold fewer"
        )
    return UniformRouting(
        num_experts=model.num_experts,
        topk=model.moe_router_topk,
        num_groups=num_nodes,
        group_topk=limit,
    )


def _whole(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"got {text!r}, must be an integer >= {least}")
        return int(text)

    return convert


def _positive(text: str) -> float:
    return _number(text, "a number > 0", lambda value: 0 < value < float("inf"))


def _fraction(text: str) -> float:
    return _number(text, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def _number(text: str, rule: str, holds: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not holds(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be {rule}")
    return value
