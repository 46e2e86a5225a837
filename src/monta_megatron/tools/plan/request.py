"""Plan requests: a model on a cluster, in one layout or the best of all that fit; their gain."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from monta_megatron.chains import CHAINS
from monta_megatron.chains.program import Phase
from monta_megatron.common import strict_yaml
from monta_megatron.common.rules import NonNegativeInt, PositiveFloat, PositiveInt
from monta_megatron.common.tables import Progress
from monta_megatron.common.text import check_printable, shown
from monta_megatron.common.units import counted
from monta_megatron.core import Layout, Routing, Shape
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.cluster import Cluster, KernelChoice
from monta_megatron.planner.cluster_file import load_cluster, with_inter_rate
from monta_megatron.planner.layout import (
    ParallelLayout,
    exchanges,
    iteration_of,
    shapes_of,
    uniform_routing,
)
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import Model, with_batch
from monta_megatron.planner.models.training_memory import TrainingMemory, training_memory
from monta_megatron.planner.plan import Candidate, Plan, slowest_plan, with_ranges
from monta_megatron.planner.routing.drawn import expected_routing, skewed_routing
from monta_megatron.tools.plan.layout_ranking import RankedLayout, rank_layouts

# A layout in place of its file, where Python calls.
LAYOUTS = ParallelLayout | Mapping | None


@dataclass(frozen=True, kw_only=True)
class LayoutSizes:
    """Sizes of a `ParallelLayout` that are given.

    Attributes:
        world_size: ranks of the training; None for those of the cluster.
        tp: tensor parallel size; where it, `ep`, `etp` and a layout's file are None, all layouts
            are ranked.
        ep: expert parallel size.
        etp: expert tensor parallel size.
        cp: context parallel size.
        pp: pipeline parallel size.
    """

    world_size: PositiveInt | None = None
    tp: PositiveInt | None = None
    ep: PositiveInt | None = None
    etp: PositiveInt | None = None
    cp: PositiveInt | None = None
    pp: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Exchange to plan, and the costs to price it by.

    Attributes:
        tokens: of a rank; None for the model's batch.
        seq_length: tokens of a sequence; None for the model file's.
        micro_batch_size: sequences of a micro-batch; likewise.
        routing: of the tokens, see `planner.routing.drawn`.
        phase: what has to be fast.
        inter_rate_ratio: rate of the network over the cluster file's; None for 1.
        ranks_per_node: that a job uses of each node, or host; None for the cluster's.
        kernels: what copies and sums rows; "auto" is "fused" where the ranks are GPUs.
    """

    tokens: NonNegativeInt | None = None
    seq_length: PositiveInt | None = None
    micro_batch_size: PositiveInt | None = None
    routing: Literal["uniform", "skewed", "node-limited"] = "uniform"
    phase: Phase = "forward_backward"
    inter_rate_ratio: PositiveFloat | None = None
    ranks_per_node: PositiveInt | None = None
    kernels: KernelChoice = "auto"


@dataclass(frozen=True, kw_only=True)
class PlanRequest(LayoutSizes, PlanSettings):
    """A request, as the command line and the Python API make it.

    Attributes:
        model: a model, its file, or the name of a preset; see `model.load_model`.
        cluster: likewise.
        layout: file of a `ParallelLayout`, whose sizes those here override; None for none.
        global_batch_size: sequences of an iteration; None where they are not known.
    """

    model: str | Path | Model
    cluster: str | Path | Cluster
    layout: str | Path | None = None
    global_batch_size: int | None = None


def request_of(model: Any, cluster: Any, layout: Any, settings: Mapping[str, Any]) -> PlanRequest:
    """The request of a call from Python, checked as the command line checks its flags.

    Args:
        model, cluster: see `PlanRequest`.
        layout: a `ParallelLayout`, its sizes by name, or its file; None to rank all.
        settings: fields of `PlanSettings`.

    Raises:
        ValueError: one of them is of another type, or breaks its rule.
    """
    for name, given, kinds, rule in (
        ("model", model, Model, "a Model, a file, or a preset by its name"),
        ("cluster", cluster, Cluster, "a Cluster, a file, or a preset by its name"),
        ("layout", layout, LAYOUTS, "a ParallelLayout, a file, or its sizes by name"),
    ):
        if isinstance(given, str | Path):
            check_printable(str(given), name)
        elif not isinstance(given, kinds):
            raise ValueError(f"{name}: got {shown(repr(given))}, must be {rule}")
    sizes = LayoutSizes()
    if isinstance(layout, ParallelLayout | Mapping):
        given = layout if isinstance(layout, Mapping) else vars(layout)
        sizes, layout = strict_yaml.build(LayoutSizes, given, "layout"), None
    checked = strict_yaml.build(PlanSettings, settings, "")
    return PlanRequest(model=model, cluster=cluster, layout=layout, **vars(sizes), **vars(checked))


SIZES = tuple(entry.name for entry in fields(ParallelLayout))


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The files and sizes of a request, read.

    Attributes:
        model: the trained model.
        cluster: what it is trained on.
        layout: the one given, or the best of `ranking`.
        ranking: every layout that fits, where none was given.
    """

    model: Model
    cluster: Cluster
    layout: ParallelLayout
    ranking: list[RankedLayout] | None


def read_inputs(request: PlanRequest, progress: Progress | None = None) -> PlanInputs:
    """Read the inputs of a request, and rank the layouts where it names none.

    Args:
        request: to plan.
        progress: of the ranking, which takes seconds; None where it is not shown.

    Raises:
        ValueError: a file or a size is wrong, or the layout does not fit.
    """
    model = request.model if isinstance(request.model, Model) else load_model(request.model)
    model = with_batch(model, request.seq_length, request.micro_batch_size)
    cluster = priced_cluster(request.cluster, request.inter_rate_ratio, request.kernels)
    cluster = cluster.of_job(request.ranks_per_node)
    ranking, sizes = None, {}
    if (request.layout, request.tp, request.ep, request.etp) == (None, None, None, None):
        world_size = cluster.num_ranks if request.world_size is None else request.world_size
        _check_world("--world-size", world_size, cluster, request)
        if request.routing == "node-limited":
            raise ValueError(
                "--routing: got node-limited, must be beside a layout (--ep N): it depends on the "
                "nodes of an exchange"
            )
        ranking = rank_layouts(
            model,
            cluster,
            world_size=world_size,
            cp=request.cp or 1,
            pp=request.pp or 1,
            phase=request.phase,
            shapes=lambda layout: _shapes(request, model, cluster, layout),
            progress=progress or Progress(),
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
) -> Cluster:
    """A cluster, that of a file or a preset, its network `rate_ratio` times as fast.

    Args:
        given: see `PlanRequest`.
        rate_ratio: None for its own rate.
        kernels: that run on it.

    Raises:
        ValueError: the file is wrong, or the kernels cannot run there.
    """
    cluster = given if isinstance(given, Cluster) else load_cluster(given)
    cluster = cluster.with_kernel_choice(kernels)
    return cluster if rate_ratio is None else with_inter_rate(cluster, rate_ratio)


def plan_request(
    request: PlanRequest, inputs: PlanInputs, **settings: Any
) -> tuple[Plan, Shape, TrainingMemory]:
    """The plan of a layout, its shape, and a training's memory on a rank.

    Args:
        request: tokens, routing and phase.
        inputs: model, cluster and layout.
        settings: arguments of `planner.select.select_chain`.

    Raises:
        ValueError: no chain can run.
    """
    model, cluster, layout = inputs.model, inputs.cluster, inputs.layout
    shapes = _shapes(request, model, cluster, layout)
    plan, shape = slowest_plan(shapes, cluster, phase=request.phase, **settings)
    exchange_bytes = plan.chosen.peak_bytes or 0.0
    memory = training_memory(model, cluster, layout, shape.tokens_per_rank, exchange_bytes)
    plan = with_ranges(plan, shape, cluster)
    notes = (*plan.notes, *cluster.notes_on(layout.world_size), *model.notes)
    return replace(plan, notes=notes), shape, memory


def candidate_of(
    request: PlanRequest,
    inputs: PlanInputs,
    plan: Plan,
    chain: str,
    num_chunks: int | None,
) -> Candidate:
    """A candidate of a plan, in so many chunks or in the number that is best for the chain.

    A number of chunks that the planner did not consider is priced beside the plan, which stays.

    Args:
        request, inputs: of the plan.
        plan: what came of it.
        chain: key of `chains.CHAINS`.
        num_chunks: None for the best.

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
        alone = plan_request(request, inputs, chains=(chain,), num_chunks=(num_chunks,))[0]
        reason = f"the planner considers {', '.join(map(str, sorted(considered)))} chunks"
        of_chain = [replace(alone.candidates[0], rejected=reason)]
    # The choice, else the fastest.
    return min(of_chain, key=lambda entry: entry.rejected is not None)


def _shapes(
    request: PlanRequest, model: Model, cluster: Cluster, layout: ParallelLayout
) -> list[Shape]:
    tokens = layout.tokens_per_rank(model) if request.tokens is None else request.tokens
    places = exchanges(layout, model.num_experts, cluster.ranks_per_node)
    routings = [_routing(request.routing, model, place) for place in places]
    return shapes_of(model, layout, cluster.ranks_per_node, tokens, routings)


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
    """Origin of the layout, for messages."""
    return "layout" if request.layout is None else str(request.layout)


def _check_world(where: str, world_size: int, cluster: Cluster, request: PlanRequest) -> None:
    if world_size > cluster.num_ranks:
        name = cluster.name if isinstance(request.cluster, Cluster) else request.cluster
        raise ValueError(
            f"{where}: got {world_size}, must be at most the {cluster.num_ranks} ranks of "
            f"{name}; its num_nodes is that of the cluster"
        )


def _routing(name: str, model: Model, exchange: Layout) -> Routing:
    """The routing of a name in one exchange."""
    if name == "uniform":
        return uniform_routing(model)
    if name == "skewed":
        return _skewed(model.num_experts, model.moe_router_topk)
    num_nodes = exchange.num_nodes
    if model.num_experts % num_nodes:
        raise ValueError(
            f"--routing: got {name}, must not be where an exchange lies on "
            f"{counted(num_nodes, 'node')}, which cannot share {model.num_experts} experts evenly"
        )
    return expected_routing(name, model.num_experts, model.moe_router_topk, num_nodes)


# Cached, because a ranking asks for every layout.
_skewed = cache(skewed_routing)


def benefit_of_plan(request: PlanRequest, inputs: PlanInputs, plan: Plan) -> Benefit | None:
    """Benefit of a plan in an iteration; None where stock's exchange was not priced.

    Raises:
        ValueError: the batch is no whole number of micro-batches.
    """
    num_micro_batches = _num_micro_batches(request, inputs)
    iteration = iteration_of(inputs.model, inputs.layout.pp, num_micro_batches)
    if plan.benefit is None:
        return None
    return replace(plan.benefit, iteration=iteration)


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
