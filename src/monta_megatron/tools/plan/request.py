"""What the planner gets: a model on a cluster, in one layout or in the best of all that fit."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from monta_megatron.chains import CHAINS
from monta_megatron.chains.layout import Ctas, Layout
from monta_megatron.chains.wire_format import quantized_passes
from monta_megatron.common import strict_yaml
from monta_megatron.common.tables import Progress
from monta_megatron.common.units import counted
from monta_megatron.planner.cluster import Cluster, KernelChoice
from monta_megatron.planner.cluster_file import load_cluster, with_inter_rate
from monta_megatron.planner.layout import (
    ParallelLayout,
    uniform_routing,
    with_experts,
    workloads_of,
)
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import Model, with_batch
from monta_megatron.planner.models.training_memory import (
    TrainingMemory,
    plan_within_memory,
    training_memory,
)
from monta_megatron.planner.plan import Candidate, Plan
from monta_megatron.planner.ranges import with_ranges
from monta_megatron.planner.routing.drawn import expected_routing, imbalance_routing, skewed_routing
from monta_megatron.planner.routing.expected import Routing
from monta_megatron.planner.routing.names import IMBALANCE_WORKLOADS
from monta_megatron.planner.routing.recorded import traced_routing
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.plan.layout_ranking import RankedLayout, rank_layouts
from monta_megatron.tools.plan.plan_request import PlanRequest

SIZES = tuple(entry.name for entry in fields(ParallelLayout))


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
    model = request.model if isinstance(request.model, Model) else load_model(request.model)
    model = with_batch(model, request.seq_length, request.micro_batch_size)
    cluster = priced_cluster(
        request.cluster,
        request.inter_rate_ratio,
        request.kernels,
        request.rail_ctas,
        request.node_ctas,
    )
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
        raise ValueError(f"{_place_of(request)}: {incompatibility}")
    return PlanInputs(model=model, cluster=cluster, layout=layout, ranking=ranking)


def priced_cluster(
    given: str | Path | Cluster,
    rate_ratio: float | None,
    kernels: KernelChoice = "auto",
    rail_ctas: int | None = None,
    node_ctas: int | None = None,
) -> Cluster:
    """A cluster, that of a file or a preset, its network `rate_ratio` times as fast.

    Args:
        given: see `PlanRequest`.
        rate_ratio: None for its own rate.
        kernels: what runs on it.
        rail_ctas, node_ctas: budgets of these communicators; None for its own.

    Raises:
        ValueError: the file is wrong, or the kernels cannot run there.
    """
    cluster = given if isinstance(given, Cluster) else load_cluster(given)
    cluster = cluster.with_kernel_choice(kernels)
    ctas = cluster.ctas
    cluster = cluster.with_ctas(
        Ctas(rail=rail_ctas or ctas.rail, node=node_ctas or ctas.node),
    )
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
        where=where or _place_of(request),
        phase=request.phase,
        **settings,
    )
    plan = with_ranges(plan, workload, cluster)
    notes = (*plan.notes, *cluster.notes_on(layout.world_size), *model.notes)
    return replace(plan, notes=notes), workload, memory


def candidate_of(
    request: PlanRequest,
    inputs: PlanInputs,
    plan: Plan,
    chain: str,
    num_chunks: int | None,
    **settings: Any,
) -> Candidate:
    """A candidate of a plan, in so many chunks or in the number that is best for the chain.

    A number of chunks that the planner did not consider is priced beside the plan, which stays.

    Args:
        request, inputs: what was planned.
        plan: what came of it.
        chain: key of `chains.CHAINS`.
        num_chunks: None for the best.
        settings: arguments of `planner.selection.select`, without limits.

    Raises:
        ValueError: the chain does not run in so many chunks.
    """
    of_chain = [entry for entry in plan.candidates if entry.chain == chain]
    runs = of_chain[0].predicted_us is not None
    if runs and num_chunks is not None:
        if CHAINS[chain].serial and num_chunks != 1:
            raise ValueError(
                f"--num-chunks: got {num_chunks}, must be 1 for the serial chain {chain}"
            )
        of_chain = [entry for entry in of_chain if entry.num_chunks == num_chunks]
    if not of_chain:
        considered = {entry.num_chunks for entry in plan.candidates if entry.num_chunks}
        anyway = replace(request, ignore_memory=True)
        settings |= {"chains": (chain,), "num_chunks": (num_chunks,)}
        alone = plan_request(anyway, inputs, **settings)[0]
        reason = f"the planner considers {', '.join(map(str, sorted(considered)))} chunks"
        of_chain = [replace(alone.candidates[0], rejected=reason)]
    # The choice, else the fastest of those that are not the same as another chain.
    return min(of_chain, key=lambda entry: (entry.rejected is not None, entry.same_as is not None))


def _workloads(
    request: PlanRequest, model: Model, cluster: Cluster, layout: ParallelLayout
) -> list[Workload]:
    tokens = layout.tokens_per_rank(model) if request.tokens is None else request.tokens
    workloads = workloads_of(
        model,
        layout,
        cluster.ranks_per_node,
        tokens,
        lambda place: _routing(request.routing, model, place, tokens),
    )
    if request.wire_dtype is not None:
        passes = quantized_passes(True)
        workloads = [replace(workload, quantized_passes=passes) for workload in workloads]
    if request.overlap_experts:
        return [with_experts(workload, model, cluster) for workload in workloads]
    return workloads


def _layout(request: PlanRequest, cluster: Cluster, sizes: dict[str, int]) -> ParallelLayout:
    """The layout from defaults, then the file, then the request."""
    where = _place_of(request)
    data: Any = {"world_size": cluster.num_ranks, **sizes}
    if request.layout is not None:
        in_file = strict_yaml.read(request.layout)
        data = {**data, **in_file} if isinstance(in_file, dict) else in_file
    if isinstance(data, dict):
        given = {name: getattr(request, name) for name in SIZES}
        data |= {name: size for name, size in given.items() if size is not None}
    layout = strict_yaml.build(ParallelLayout, data, where)
    _check_world(f"{where}: world_size", layout.world_size, cluster, request)
    return layout


def _place_of(request: PlanRequest) -> str:
    """What gave the layout, for messages."""
    return "layout" if request.layout is None else str(request.layout)


def _check_world(where: str, world_size: int, cluster: Cluster, request: PlanRequest) -> None:
    if world_size > cluster.num_ranks:
        name = cluster.name if isinstance(request.cluster, Cluster) else request.cluster
        raise ValueError(
            f"{where}: got {world_size}, must be at most the {cluster.num_ranks} ranks of "
            f"{name}; its num_nodes is that of the cluster"
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
