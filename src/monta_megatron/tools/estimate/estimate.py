"""A run's iteration with stock's exchange, with the planner's, and with other choices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from monta_megatron.chains import CHAINS
from monta_megatron.common import presets, strict_yaml
from monta_megatron.planner.assumptions import Assumptions, assumptions_of, gpu_of
from monta_megatron.planner.chain_price import ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster, KernelChoice
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.flex import BACKENDS
from monta_megatron.planner.layout import ParallelLayout, workloads_of
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import Model, with_batch
from monta_megatron.planner.models.training_memory import (
    TrainingMemory,
    plan_within_memory,
    training_memory,
)
from monta_megatron.planner.plan import Plan
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.estimate.exchange import chosen_time, exchange_time
from monta_megatron.tools.estimate.iteration import Iteration, estimate_iteration
from monta_megatron.tools.estimate.layers import TrainingSettings, architecture_of, settings_of
from monta_megatron.tools.launch.arguments import SIZE, Arguments, Merged
from monta_megatron.tools.launch.exchanges import ctas_of_run, kernels_of_run
from monta_megatron.tools.launch.planning import held_state
from monta_megatron.tools.launch.prepare import read_run, resolve_run
from monta_megatron.tools.launch.run_config import RunConfig, RunLayout
from monta_megatron.tools.new.run import run_template
from monta_megatron.tools.plan.request import PlanRequest

STOCK, CHOSEN = "alltoall", "monta"
PIPELINED = "monta, experts in the pipeline"
OVERLAPPED = ", 1F1B overlap"
# A 1F1B overlap in a pipeline needs virtual stages.
LEAST_VIRTUAL_STAGES = 2
# Assumptions that --mfu replaces.
MFU_SETS = ("gemm_efficiency", "attention_efficiency")
# Fields of `TrainingSettings` that flags may change.
SIZES = ("world_size", "tp", "ep", "etp", "cp", "pp")
BATCH = ("seq_length", "micro_batch_size", "global_batch_size")
# Those of them that a run of `monta new run` is made from.
NEW_RUN_SIZES = ("tp", "ep", "etp", "cp", "pp", "seq_length", "micro_batch_size")


@dataclass(frozen=True, kw_only=True)
class EstimateRequest:
    """Request of an estimate.

    Attributes:
        config: a run file, or a preset of configs/runs; None for the run that `monta new run`
            writes for `model`.
        model: a model file or preset, with `cluster` in place of a run file.
        words: arguments of Megatron that go before those of the file.
        cluster: a file or preset in place of the run's.
        gpu: None for the one that the cluster's name holds.
        sizes: fields of `TrainingSettings` in place of the run's.
        mfu: share of the peak that all products reach; None for the assumed efficiencies.
        changes: name -> value of assumptions.
        ignore_memory: estimate a run that does not fit, too.
        kernels: that copy and sum rows; None for what the run says.
    """

    config: str | None = None
    model: str | None = None
    words: Sequence[str] = ()
    cluster: str | None = None
    gpu: str | None = None
    sizes: Mapping[str, int]
    mfu: float | None = None
    changes: Mapping[str, float]
    ignore_memory: bool = False
    kernels: KernelChoice | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted iteration.

    Attributes:
        name: of the run.
        cluster: where it runs.
        gpu: of the cluster.
        settings: how it is trained.
        assumed: the constants.
        plan: the planner's choice.
        memory: of a rank.
        iterations: dispatcher -> its iteration; `STOCK` is the first.
        ends: the same by the optimistic and by the conservative end of what the cluster states;
            none where its times were measured.
        num_iterations: of the whole training; None where the file does not say.
        notes: for the user.
    """

    name: str
    cluster: Cluster
    gpu: str
    settings: TrainingSettings
    assumed: Assumptions
    plan: Plan
    memory: TrainingMemory
    iterations: Mapping[str, Iteration]
    ends: tuple[Mapping[str, Iteration], ...]
    num_iterations: int | None
    notes: tuple[str, ...]

    def saving_pct(self, dispatcher: str) -> float:
        """Saved share of stock's iteration."""
        return _saving_pct(self.iterations, dispatcher)

    def saving_range_pct(self, dispatcher: str) -> list[float] | None:
        """The least and the most that it may save; None where times were measured."""
        # Stock may gain more from an end than this does.
        all_of = [self.iterations, *self.ends] if self.ends else []
        return sorted(_saving_pct(iterations, dispatcher) for iterations in all_of) or None

    def iteration_range_ms(self, dispatcher: str) -> list[float] | None:
        """Likewise, its iteration."""
        return sorted(end[dispatcher].total_ms for end in self.ends) or None

    def saved_gpu_hours(self, dispatcher: str, num_iterations: int) -> float:
        """Saved GPU-hours in so many iterations on all GPUs."""
        stock, other = (self.iterations[name].total_ms for name in (STOCK, dispatcher))
        return (stock - other) / 1e3 * num_iterations * self.settings.world_size / 3600


def estimate(request: EstimateRequest) -> Estimate:
    """Predict the iteration of a run.

    Raises:
        ValueError: one line that names the file or flag, the value and the rule.
    """
    return estimate_run(read_estimated_run(request), request)


@dataclass(frozen=True, kw_only=True)
class EstimatedRun:
    """A run that is to be estimated, as it was read.

    Attributes:
        file: its origin, for messages.
        config: its configuration.
        arguments: Megatron's arguments.
        cluster: where it runs.
        cluster_file: origin of the cluster, for messages.
    """

    file: str
    config: RunConfig
    arguments: Arguments
    cluster: Cluster
    cluster_file: str


def read_estimated_run(request: EstimateRequest) -> EstimatedRun:
    """Read a run file, or make the run of a model.

    Raises:
        ValueError: a file or a size is wrong.
    """
    if request.config is None:
        file, merged = _run_of_model(request)
    else:
        file = str(presets.find("runs", request.config))
        merged = read_run(file, request.words)[1]
    cluster_file = request.cluster or merged.config.cluster
    if cluster_file is None:
        raise ValueError(f"--cluster: not given, must be where {file} names none")
    cluster = load_cluster(cluster_file)
    cluster = cluster.with_kernel_choice(request.kernels or kernels_of_run(merged.arguments))
    cluster = cluster.with_ctas(ctas_of_run(merged.arguments))
    return EstimatedRun(
        file=file,
        config=merged.config,
        arguments=merged.arguments,
        cluster=cluster,
        cluster_file=cluster_file,
    )


def _run_of_model(request: EstimateRequest) -> tuple[str, Merged]:
    """The run that `monta new run` writes for a model on a cluster."""
    assert request.model is not None and request.cluster is not None, "the command checks it"
    cluster = load_cluster(request.cluster)
    sizes: dict[str, Any] = {
        name: size for name, size in request.sizes.items() if name in NEW_RUN_SIZES
    }
    template = run_template(
        PlanRequest(
            model=request.model,
            cluster=request.cluster,
            ignore_memory=request.ignore_memory,
            **sizes,
        ),
        nodes=request.sizes.get("world_size", cluster.num_ranks),
        ranks_per_node=1,
        name=None,
        # Relative paths start at the model's file.
        folder=Path(request.model).parent,
    )
    config = strict_yaml.build(RunConfig, yaml.safe_load(template.text), request.model)
    return request.model, resolve_run(config, request.model, request.words)[1]


def estimate_run(
    run: EstimatedRun,
    request: EstimateRequest,
    *,
    price: Callable[..., ChainPrice] = price_chain,
    with_ends: bool = True,
) -> Estimate:
    """Predict the iteration of a run that was read; flags override it.

    Args:
        run: what was read for the request.
        request: the request.
        price: as in `planner.select.select_chain`.
        with_ends: also predict by both ends of what the cluster states.

    Raises:
        ValueError: one line that names the file or flag, the value and the rule.
    """
    # Step 1: model, sizes and constants.
    file, arguments, config, cluster = run.file, run.arguments, run.config, run.cluster
    model = architecture_of(arguments, file)
    settings = _settings(arguments, config, request.sizes, file)
    if settings.world_size > cluster.num_ranks:
        raise ValueError(
            f"--world-size: got {settings.world_size}, must be at most the {cluster.num_ranks} "
            f"ranks of {run.cluster_file}; its num_nodes is that of the cluster"
        )
    gpu = gpu_of(cluster.name, request.gpu)
    changes = dict.fromkeys(MFU_SETS, request.mfu) if request.mfu is not None else {}
    assumed = assumptions_of(gpu, cluster.name, {**changes, **request.changes})

    # Step 2: the planner's choice in the memory that is left.
    planned = _planner_model(config, settings, file)
    plan, workload, memory = _plan(
        planned, settings, cluster, arguments, config, file, request.ignore_memory, price
    )

    # Step 3: an iteration with each.
    plain = replace(settings, overlap=False, dispatcher="alltoall")
    overlapped, notes = with_1f1b_overlap(plain)
    notes += [*planned.notes, *cluster.notes_on(settings.world_size)]

    def iterations_on(cluster: Cluster) -> dict[str, Iteration]:
        """With each dispatcher, by the costs of the cluster or of one of its ends."""
        stock = exchange_time(model, plain, cluster, assumed)
        chain, num_chunks = CHAINS[plan.chain], plan.num_chunks
        chosen = chosen_time(model, plain, workload, cluster, assumed, chain, num_chunks)
        iterations = {
            STOCK: estimate_iteration(model, plain, cluster, assumed, stock),
            CHOSEN: estimate_iteration(model, plain, cluster, assumed, chosen),
            PIPELINED: estimate_iteration(
                model, plain, cluster, assumed, chosen, experts_pipelined=True
            ),
            STOCK + OVERLAPPED: estimate_iteration(model, overlapped, cluster, assumed, stock),
            CHOSEN + OVERLAPPED: estimate_iteration(model, overlapped, cluster, assumed, chosen),
        }
        for backend in BACKENDS:
            with_backend = replace(plain, dispatcher=backend)
            iterations[f"flex, {backend}"] = estimate_iteration(
                model, with_backend, cluster, assumed
            )
        return iterations

    iters = arguments.get("train-iters")
    return Estimate(
        name=config.name,
        cluster=cluster,
        gpu=gpu,
        settings=settings,
        assumed=assumed,
        plan=plan,
        memory=memory,
        iterations=iterations_on(cluster),
        ends=tuple(map(iterations_on, (with_ends and cluster.ends) or ())),
        num_iterations=None if iters is None else iters.read(SIZE),
        notes=tuple(notes),
    )


def _saving_pct(iterations: Mapping[str, Iteration], dispatcher: str) -> float:
    stock = iterations[STOCK].total_ms
    return 100 * (stock - iterations[dispatcher].total_ms) / stock


def _settings(
    arguments: Arguments, config: RunConfig, sizes: Mapping[str, int], file: str
) -> TrainingSettings:
    layout = strict_yaml.plain(config.layout.parallel)
    layout |= {name: size for name, size in sizes.items() if name in SIZES}
    try:
        parallel = ParallelLayout(**layout)
    except ValueError as error:
        raise ValueError(f"{file}: layout.{error}") from None
    batch = {name: size for name, size in sizes.items() if name in BATCH}
    try:
        settings = settings_of(arguments, parallel, batch)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    # The run's split of its layers is for its own number of stages.
    same_stages = parallel.pp == config.layout.pp
    return settings if same_stages else replace(settings, last_stage_layers=None)


def _planner_model(config: RunConfig, settings: TrainingSettings, file: str) -> Model:
    """The run's model, which has to be one that the layout can train."""
    if config.model is None:
        raise ValueError(f"{file}: model: missing, must be given for an estimate")
    model = with_batch(load_model(config.model), settings.seq_length, settings.micro_batch_size)
    incompatibility = settings.layout.incompatibility(model)
    if incompatibility is not None:
        raise ValueError(f"{file}: layout.{incompatibility}")
    return model


def _plan(
    model: Model,
    settings: TrainingSettings,
    cluster: Cluster,
    arguments: Arguments,
    config: RunConfig,
    file: str,
    ignore_memory: bool,
    price: Callable[..., ChainPrice],
) -> tuple[Plan, Workload, TrainingMemory]:
    layout = settings.layout
    workloads = workloads_of(model, layout, cluster.ranks_per_node)
    sizes = {name: getattr(layout, name) for name in SIZES if name != "world_size"}
    held_layout = RunLayout(nodes=settings.world_size, ranks_per_node=1, **sizes)
    memory = training_memory(
        model,
        cluster,
        layout,
        workloads,
        held=held_state(arguments, held_layout),
        ignore_memory=ignore_memory,
    )
    return plan_within_memory(
        workloads, cluster, memory, where=f"{file}: layout", or_least=True, price=price
    )


def with_1f1b_overlap(settings: TrainingSettings) -> tuple[TrainingSettings, list[str]]:
    """Settings with Megatron's 1F1B overlap, and notes on the changes made for it."""
    if settings.pp == 1 or settings.virtual_stages > 1:
        return replace(settings, overlap=True), []
    changed = replace(settings, overlap=True, virtual_stages=LEAST_VIRTUAL_STAGES)
    note = (
        f"1F1B overlap is predicted with {LEAST_VIRTUAL_STAGES} virtual stages, which Megatron "
        "demands for it in a pipeline; they shorten the bubble too"
    )
    return changed, [note]
