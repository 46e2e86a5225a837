"""What the planner gets: a model on a cluster, in one layout or in the best of all that fit."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from monta_megatron.chains.layout import Layout
from monta_megatron.chains.program import Phase
from monta_megatron.common import strict_yaml
from monta_megatron.common.progress import Progress
from monta_megatron.common.quantities import counted
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.imbalance_routing import imbalance_routing
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.model import Model, load_model, with_batch
from monta_megatron.planner.model_workload import iteration_of, uniform_routing, workloads_of
from monta_megatron.planner.named_routing import expected_routing, skewed_routing
from monta_megatron.planner.network_rate import with_inter_rate
from monta_megatron.planner.plan import Plan
from monta_megatron.planner.router_trace import traced_routing
from monta_megatron.planner.routing import Routing
from monta_megatron.planner.routing_names import IMBALANCE_WORKLOADS
from monta_megatron.planner.training_memory import (
    TrainingMemory,
    plan_within_memory,
    training_memory,
)
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.plan.layout_ranking import RankedLayout, rank_layouts

SIZES = tuple(entry.name for entry in fields(ParallelLayout))


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request, as the command line makes it.

    Attributes:
        model: model file, or the name of a preset; see `model.load_model`.
        cluster: cluster file, or the name of a preset.
        layout: file of a `ParallelLayout`, whose sizes those here override; None for none.
        world_size: ranks of the training; None for those of the cluster.
        tp: tensor parallel size; where it, `ep`, `etp` and `layout` are None, all are ranked.
        ep: expert parallel size.
        etp: expert tensor parallel size.
        cp: context parallel size.
        pp: pipeline parallel size.
        tokens: of a rank; None for the model's batch.
        seq_length: tokens of a sequence; None for the model file's.
        micro_batch_size: sequences of a micro-batch; likewise.
        routing: one of `routing_names.ROUTINGS`, or a folder of Megatron's router traces.
        phase: what has to be fast.
        inter_rate_ratio: rate of the network over the cluster file's; None for 1.
        ignore_memory: plan what does not fit into the memory of a rank, too.
        global_batch_size: sequences of an iteration; None where they are not known.
    """

    model: str
    cluster: str
    layout: str | None = None
    world_size: int | None = None
    tp: int | None = None
    ep: int | None = None
    etp: int | None = None
    cp: int | None = None
    pp: int | None = None
    tokens: int | None = None
    seq_length: int | None = None
    micro_batch_size: int | None = None
    routing: str = "uniform"
    phase: Phase = "forward_backward"
    inter_rate_ratio: float | None = None
    ignore_memory: bool = False
    global_batch_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The files and sizes of a request, read.

    Attributes:
        model: what is trained.
        cluster: what it is trained on.
        layout: the one given, or the best of `ranking`.
        ranking: every layout that fits, where none was given.
    """

    model: Model
    cluster: Cluster
    layout: ParallelLayout
    ranking: list[RankedLayout] | None


def read_inputs(
    request: PlanRequest,
    progress: Callable[[], AbstractContextManager[Progress]] = lambda: nullcontext(Progress()),
    **settings: Any,
) -> PlanInputs:
    """Read what a request names, and rank the layouts where it names none.

    Args:
        request: what to plan.
        progress: opened around the ranking, which takes seconds.
        settings: arguments of `planner.selection.select`, for the ranking.

    Raises:
        ValueError: a file or a size is wrong, or the layout does not fit.
    """
    model = with_batch(load_model(request.model), request.seq_length, request.micro_batch_size)
    cluster = cluster_with_rate(request.cluster, request.inter_rate_ratio)
    ranking, sizes = None, {}
    if (request.layout, request.tp, request.ep, request.etp) == (None, None, None, None):
        world_size = cluster.num_ranks if request.world_size is None else request.world_size
        _check_world("--world-size", world_size, cluster, request)
        if request.routing == "node-limited":
            raise ValueError(
                "--routing: got node-limited, must be beside a layout (--ep N): it depends on the "
                "nodes of an exchange"
            )
        with progress() as shown:
            ranking = rank_layouts(
                model,
                cluster,
                world_size=world_size,
                cp=request.cp or 1,
                pp=request.pp or 1,
                phase=request.phase,
                workloads=lambda layout: _workloads(request, model, cluster, layout),
                ignore_memory=request.ignore_memory,
                progress=shown,
                **settings,
            )
        sizes = {name: getattr(ranking[0], name) for name in ("tp", "ep", "etp")}
    layout = _layout(request, cluster, sizes)
    incompatibility = layout.incompatibility(model)
    if incompatibility is not None:
        raise ValueError(f"{request.layout or 'layout'}: {incompatibility}")
    return PlanInputs(model=model, cluster=cluster, layout=layout, ranking=ranking)


def cluster_with_rate(file: str, rate_ratio: float | None) -> Cluster:
    """The cluster of a file or preset, its network `rate_ratio` times as fast.

    Raises:
        ValueError: the file is wrong.
    """
    cluster = load_cluster(file)
    return cluster if rate_ratio is None else with_inter_rate(cluster, rate_ratio)


def plan_request(
    request: PlanRequest, inputs: PlanInputs, where: str | None = None, **settings: Any
) -> tuple[Plan, Workload, TrainingMemory]:
    """The plan of a layout, its workload, and what training with it holds on a rank.

    Args:
        request: tokens, routing, phase and memory.
        inputs: model, cluster and layout.
        where: what gave the layout, for messages; None for the request or its file.
        settings: arguments of `planner.selection.select`.

    Raises:
        ValueError: no chain can run, or the training does not fit into the memory of a rank.
    """
    model, cluster, layout = inputs.model, inputs.cluster, inputs.layout
    workloads = _workloads(request, model, cluster, layout)
    memory = training_memory(model, cluster, layout, workloads, ignore_memory=request.ignore_memory)
    plan, workload, memory = plan_within_memory(
        workloads,
        cluster,
        memory,
        where=where or request.layout or "layout",
        phase=request.phase,
        **settings,
    )
    return replace(plan, notes=(*plan.notes, *model.notes)), workload, memory


def benefit_of_plan(request: PlanRequest, inputs: PlanInputs, plan: Plan) -> Benefit | None:
    """What a plan gains over stock in an iteration; None where `alltoall` was not priced.

    Raises:
        ValueError: the batch is no whole number of micro-batches.
    """
    iteration = iteration_of(
        inputs.model.num_moe_layers, inputs.layout.pp, _num_micro_batches(request, inputs)
    )
    return None if plan.benefit is None else replace(plan.benefit, iteration=iteration)


def _num_micro_batches(request: PlanRequest, inputs: PlanInputs) -> int | None:
    model, layout = inputs.model, inputs.layout
    if request.global_batch_size is None or request.tokens == 0:
        return None
    if request.tokens is not None:
        # As many as it takes, if a micro-batch has so many tokens.
        tokens = request.global_batch_size * model.seq_length // (layout.dp * layout.tp * layout.cp)
        return math.ceil(tokens / request.tokens)
    num_micro_batches, rest = divmod(request.global_batch_size, model.micro_batch_size * layout.dp)
    if rest:
        raise ValueError(
            f"--global-batch-size: got {request.global_batch_size}, must be a multiple of "
            f"{model.micro_batch_size * layout.dp}, which is micro_batch_size of {model.name} "
            f"({model.micro_batch_size}) times data parallel size ({layout.dp})"
        )
    return num_micro_batches


def _workloads(
    request: PlanRequest, model: Model, cluster: Cluster, layout: ParallelLayout
) -> list[Workload]:
    tokens = layout.tokens_per_rank(model) if request.tokens is None else request.tokens
    return workloads_of(
        model,
        layout,
        cluster.ranks_per_node,
        tokens,
        lambda place: _routing(request.routing, model, place, tokens),
    )


def _layout(request: PlanRequest, cluster: Cluster, sizes: dict[str, int]) -> ParallelLayout:
    """The layout from defaults, then the file, then the request."""
    where, data = request.layout or "layout", {"world_size": cluster.num_ranks, **sizes}
    if request.layout is not None:
        in_file = strict_yaml.read(request.layout)
        data = {**data, **in_file} if isinstance(in_file, dict) else in_file
    if isinstance(data, dict):
        given = {name: getattr(request, name) for name in SIZES}
        data |= {name: size for name, size in given.items() if size is not None}
    layout = strict_yaml.build(ParallelLayout, data, where)
    _check_world(f"{where}: world_size", layout.world_size, cluster, request)
    return layout


def _check_world(where: str, world_size: int, cluster: Cluster, request: PlanRequest) -> None:
    if world_size > cluster.num_ranks:
        raise ValueError(
            f"{where}: got {world_size}, must be at most the {cluster.num_ranks} ranks of "
            f"{request.cluster}; its num_nodes is that of the cluster"
        )


def _routing(name: str, model: Model, exchange: Layout, tokens: int) -> Routing:
    """The routing of a name or folder, in one exchange with so many tokens of a rank."""
    if name == "uniform":
        return uniform_routing(model)
    if name == "skewed":
        return _skewed(model.num_experts, model.moe_router_topk)
    if name == "node-limited":
        num_nodes = exchange.num_nodes
        if model.num_experts % num_nodes:
            raise ValueError(
                f"--routing: got {name}, must not be where an exchange lies on "
                f"{counted(num_nodes, 'node')}, which cannot share {model.num_experts} experts "
                "evenly"
            )
        return expected_routing(name, model.num_experts, model.moe_router_topk, num_nodes)
    num_ranks, ep = len(exchange.nodes), exchange.ep
    if name in IMBALANCE_WORKLOADS:
        topk = model.moe_router_topk
        return imbalance_routing(name, tokens, model.num_experts, topk, num_ranks, ep)
    return traced_routing(name, model, tokens, num_ranks, ep)


# Cached, because a ranking asks for every layout.
_skewed = cache(skewed_routing)
