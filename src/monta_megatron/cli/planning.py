"""The inputs of `plan`, `timeline` and `simulate`: model, cluster, layout, tokens, routing."""

import argparse
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monta_megatron.flags import positive, whole
from monta_megatron.names import one_of
from monta_megatron.planner import ROUTINGS
from monta_megatron.quantities import counted

if TYPE_CHECKING:
    from monta_megatron.planner.cluster import Cluster
    from monta_megatron.planner.layout import ParallelLayout
    from monta_megatron.planner.layout_ranking import RankedLayout
    from monta_megatron.planner.model import Model
    from monta_megatron.planner.plan import Plan
    from monta_megatron.planner.routing import Routing
    from monta_megatron.planner.training_memory import TrainingMemory
    from monta_megatron.planner.workload import Workload

SIZES = {
    "world-size": "all ranks (default: those of the cluster)",
    "tp": "tensor parallel size, with sequence parallelism",
    "ep": "expert parallel size",
    "etp": "expert tensor parallel size",
    "cp": "context parallel size",
    "pp": "pipeline parallel size",
}
IGNORE_MEMORY = "go on where a rank's memory is too small for the training"


def add_arguments(parser: Any, needs_model: bool = True) -> None:
    """Add the flags that say what is exchanged, and on which cluster."""
    for name in ("model", "cluster"):
        parser.add_argument(
            f"--{name}",
            metavar="FILE",
            required=needs_model,
            help=f"a file, or a preset by its name in configs/{name}s",
        )
    parser.add_argument("--layout", metavar="FILE", help="YAML with the sizes below")
    for name, text in SIZES.items():
        parser.add_argument(f"--{name}", metavar="N", type=whole(1), help=text)
    parser.add_argument(
        "--tokens", metavar="N", type=whole(0), help="of a rank (default: the model's batch)"
    )
    parser.add_argument(
        "--routing",
        metavar="NAME|FOLDER",
        default="uniform",
        help=f"{', '.join(ROUTINGS)}, or a folder of Megatron's --moe-routing-trace-path "
        "(default: %(default)s, by the model's router)",
    )
    parser.add_argument(
        "--phase",
        choices=("forward", "forward_backward"),
        default="forward_backward",
        help="what has to be fast (default: %(default)s)",
    )
    parser.add_argument(
        "--inter-rate-ratio",
        metavar="X",
        type=positive,
        help="price a network with X times the cluster's rate",
    )
    parser.add_argument("--ignore-memory", action="store_true", help=IGNORE_MEMORY)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The files and flags, read.

    Attributes:
        model: what is trained.
        cluster: what it is trained on.
        layout: the one given, or the best of `ranking`.
        ranking: every layout that fits, where none was given.
    """

    model: "Model"
    cluster: "Cluster"
    layout: "ParallelLayout"
    ranking: "list[RankedLayout] | None"


def read(parsed: argparse.Namespace, **settings: Any) -> Asked:
    """Model, cluster and layout of the command line.

    Args:
        parsed: the command line.
        settings: arguments of `planner.search.plan`, for the ranking.

    Raises:
        ValueError: a file or flag is wrong, or the layout does not fit.
    """
    from monta_megatron.planner.layout_ranking import rank_layouts
    from monta_megatron.planner.model import load_model
    from monta_megatron.progress import show_progress

    model, cluster = load_model(parsed.model), read_cluster(parsed)
    ranking, sizes = None, {}
    if parsed.layout is None and (parsed.tp, parsed.ep, parsed.etp) == (None, None, None):
        world_size = cluster.num_ranks if parsed.world_size is None else parsed.world_size
        _check_world("--world-size", world_size, cluster, parsed)
        if parsed.routing == "node-limited":
            raise ValueError(
                "--routing: got node-limited, must be beside a layout (--ep N): it depends on the "
                "nodes of an exchange"
            )
        # It takes seconds: a terminal shows progress, a log does not need it.
        with show_progress(parsed.command, sys.stderr.isatty()) as progress:
            ranking = rank_layouts(
                model,
                cluster,
                world_size=world_size,
                cp=parsed.cp or 1,
                pp=parsed.pp or 1,
                phase=parsed.phase,
                workloads=lambda layout: workloads(parsed, model, cluster, layout),
                ignore_memory=parsed.ignore_memory,
                progress=progress,
                **settings,
            )
        best = ranking[0]
        sizes = {"tp": best.tp, "ep": best.ep, "etp": best.etp}
    layout = _layout(parsed, cluster, sizes)
    misfit = layout.misfit(model)
    if misfit is not None:
        raise ValueError(f"{parsed.layout or 'layout'}: {misfit}")
    return Asked(model=model, cluster=cluster, layout=layout, ranking=ranking)


def read_cluster(parsed: argparse.Namespace) -> "Cluster":
    """The cluster of --cluster, its network's rate scaled by --inter-rate-ratio.

    Raises:
        ValueError: the file is wrong.
    """
    from monta_megatron.planner.cluster_file import load_cluster

    cluster = load_cluster(parsed.cluster)
    ratio = parsed.inter_rate_ratio
    return cluster if ratio is None else cluster.with_inter_rate(ratio)


def workloads(
    parsed: argparse.Namespace, model: "Model", cluster: "Cluster", layout: "ParallelLayout"
) -> "list[Workload]":
    """The layout's exchanges, with the tokens and the routing of the command line."""
    from monta_megatron.planner.workload import workloads_of

    return workloads_of(
        model,
        layout,
        cluster.ranks_per_node,
        parsed.tokens,
        lambda place: _routing(parsed.routing, model, place.num_nodes),
    )


def plan_asked(
    parsed: argparse.Namespace, asked: Asked, where: str | None = None, **settings: Any
) -> "tuple[Plan, Workload, TrainingMemory]":
    """The plan of a layout, its workload, and what training with it holds on a rank.

    Args:
        parsed: the command line.
        asked: its inputs.
        where: what gave the layout, for messages; None for the command line or its file.
        settings: arguments of `planner.search.plan`.

    Raises:
        ValueError: no chain can run, or the training does not fit into the memory of a rank.
    """
    from monta_megatron.planner.training_memory import plan_within_memory, training_memory

    of_layout = workloads(parsed, asked.model, asked.cluster, asked.layout)
    memory = training_memory(
        asked.model,
        asked.cluster,
        asked.layout,
        of_layout,
        ignore_memory=parsed.ignore_memory,
    )
    return plan_within_memory(
        of_layout,
        asked.cluster,
        memory,
        where=where or parsed.layout or "layout",
        phase=parsed.phase,
        **settings,
    )


def _layout(
    parsed: argparse.Namespace, cluster: "Cluster", sizes: dict[str, int]
) -> "ParallelLayout":
    """The layout from defaults, then the file, then the flags."""
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
            f"{parsed.cluster}; its num_nodes is that of the cluster"
        )


def _routing(name: str, model: "Model", num_nodes: int) -> "Routing":
    from monta_megatron.planner.named_routing import expected_routing
    from monta_megatron.planner.workload import uniform_routing

    if name == "uniform":
        return uniform_routing(model)
    if name != "node-limited":
        return _sampled(name, model)
    if model.num_experts % num_nodes:
        raise ValueError(
            f"--routing: got {name}, must not be where an exchange lies on "
            f"{counted(num_nodes, 'node')}, which cannot share {model.num_experts} experts evenly"
        )
    return expected_routing(name, model.num_experts, model.moe_router_topk, num_nodes)


# Cached, because a ranking asks for every layout.
@cache
def _sampled(name: str, model: "Model") -> "Routing":
    from monta_megatron.planner.named_routing import skewed_routing
    from monta_megatron.planner.router_trace import traced_routing

    if name == "skewed":
        return skewed_routing(model.num_experts, model.moe_router_topk)
    if not Path(name).is_dir():
        raise ValueError(
            f"--routing: got {name!r}, must be a folder of Megatron's --moe-routing-trace-path, or "
            f"{one_of(name, ROUTINGS)}"
        )
    return traced_routing(name, model)
