"""Exchanges of a run from Megatron's arguments: model, layout, MoE layers, micro-batches."""

import ast
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Any, cast, get_args

from monta_megatron.common.flags import whole
from monta_megatron.planner.benefit import Iteration
from monta_megatron.planner.cluster import Cluster, KernelChoice
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import ParallelLayout, iteration_of, workloads_of
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import Model, with_batch
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.launch.arguments import SIZE, Arguments
from monta_megatron.tools.launch.run_config import RunConfig

# No model has so many layers; a list of more would only take memory.
MOST_LAYERS = 10_000
FIRST_STAGE = "decoder-first-pipeline-num-layers"
LAST_STAGE = "decoder-last-pipeline-num-layers"
# Arguments that name the layers of each stage, in a language of their own.
WRITTEN_OUT = ("pipeline-model-parallel-layout", "hybrid-layer-pattern")


def num_micro_batches(arguments: Arguments, dp: int) -> int:
    """Micro-batches of a data parallel rank in an iteration, once the batch is ramped up.

    Args:
        arguments: Megatron's arguments.
        dp: data parallel size.
    """
    micro, batch = (arguments.get(name) for name in ("micro-batch-size", "global-batch-size"))
    samples = (1 if micro is None else micro.read(SIZE)) * dp
    return 1 if batch is None else math.ceil(batch.read(SIZE) / samples)


def iteration_of_run(model: Model, arguments: Arguments, layout: ParallelLayout) -> Iteration:
    """Exchanges that an iteration of a run waits for.

    Args:
        model: the trained model, as far as the arguments do not say it.
        arguments: Megatron's arguments.
        layout: how the ranks are grouped.
    """
    micro_batches = num_micro_batches(arguments, layout.dp)
    has_experts = moe_layers(arguments)
    if has_experts is None:
        return iteration_of(model, layout.pp, micro_batches)
    stages = stages_of_layers(arguments, len(has_experts), layout.pp)
    if stages is None:
        layers, is_lower_bound = math.ceil(sum(has_experts) / layout.pp), layout.pp > 1
    else:
        of_stages = Counter(compress(stages, has_experts))
        layers, is_lower_bound = max(of_stages.values(), default=0), False
    return Iteration(
        num_moe_layers=layers,
        is_lower_bound=is_lower_bound,
        num_stages=layout.pp,
        num_micro_batches=micro_batches,
    )


def moe_layers(arguments: Arguments) -> list[bool] | None:
    """Layers with experts: [number of layers], in the model's order.

    Args:
        arguments: Megatron's arguments.

    Returns:
        None where they name no number of layers or a pattern of no known form; Megatron's parser
        refuses a wrong one.
    """
    return _layers(arguments, "moe-layer-freq", lambda layer, every: layer % every == 0)


def _layers(
    arguments: Arguments, name: str, is_of_kind: Callable[[int, int], bool]
) -> list[bool] | None:
    if "num-layers" not in arguments:
        return None
    num_layers = arguments["num-layers"].read(SIZE)
    if num_layers > MOST_LAYERS:
        return None
    frequency = arguments.get(name)
    if frequency is None:
        return [True] * num_layers
    try:
        pattern = _value(ast.parse(str(frequency.value), mode="eval").body)
        if isinstance(pattern, int):
            return [is_of_kind(layer, pattern) for layer in range(num_layers)]
        return [entry == 1 for entry in pattern] if len(pattern) == num_layers else None
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError):
        return None


def stages_of_layers(arguments: Arguments, num_layers: int, pp: int) -> list[int] | None:
    """The pipeline stage of every layer, as Megatron splits them: [number of layers].

    A stage has a part in every virtual stage. The embedding and the loss may count as layers.

    Args:
        arguments: Megatron's arguments.
        num_layers: of the model.
        pp: pipeline parallel size.

    Returns:
        None where the stages are written out, or no such split is possible.
    """
    if pp == 1:
        return [0] * num_layers
    if not arguments.keys().isdisjoint(WRITTEN_OUT):
        return None

    # Step 1: layers of every stage.
    embedding = "account-for-embedding-in-pipeline-split" in arguments
    loss = "account-for-loss-in-pipeline-split" in arguments
    num_slots = num_layers + embedding + loss
    given = {
        stage: arguments[name].read(whole(0))
        for stage, name in ((0, FIRST_STAGE), (pp - 1, LAST_STAGE))
        if name in arguments
    }
    rest, num_even = num_slots - sum(given.values()), pp - len(given)
    sizes = [given.get(stage, rest // max(num_even, 1)) for stage in range(pp)]

    # Step 2: deal them out, virtual stage by virtual stage.
    num_virtual = 1
    if "num-virtual-stages-per-pipeline-rank" in arguments:
        num_virtual = arguments["num-virtual-stages-per-pipeline-rank"].read(SIZE)
    elif "num-layers-per-virtual-pipeline-stage" in arguments:
        num_virtual = sizes[0] // arguments["num-layers-per-virtual-pipeline-stage"].read(SIZE)
    if sum(sizes) != num_slots or min(sizes) < 0 or num_virtual == 0:
        return None
    if any(size % num_virtual for size in sizes):
        return None
    in_turn = [stage for stage, size in enumerate(sizes) for _ in range(size // num_virtual)]
    slots = in_turn * num_virtual
    return slots[embedding : num_slots - loss]


def _value(node: ast.expr) -> Any:
    """An expression of integers, lists, + and *, such as ([0]*3+[1]*58).

    Raises:
        ValueError: it holds anything else.
    """
    match node:
        case ast.Constant(value=int(number)) if number <= MOST_LAYERS:
            return number
        case ast.List(elts=entries):
            return [_value(entry) for entry in entries]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            factors = _value(left), _value(right)
            sizes = (len(part) if isinstance(part, list) else part for part in factors)
            if math.prod(sizes) <= MOST_LAYERS:
                return factors[0] * factors[1]
    raise ValueError(f"got {ast.unparse(node)}, must be integers, lists, + and *")


# Fields of the model that Megatron's arguments of the same name must agree with, as the exchange is
# planned from them. The number of layers is not among them, so that a shortened model can be tried.
MODEL_ARGUMENTS = (
    "hidden-size",
    "num-attention-heads",
    "num-experts",
    "moe-router-topk",
    "moe-ffn-hidden-size",
    "moe-router-num-groups",
    "moe-router-group-topk",
)
KERNELS = "moe-monta-kernels"


@dataclass(frozen=True, kw_only=True)
class RunExchanges:
    """Exchanges of a run, and where they lie.

    Attributes:
        model: the trained model, with the run's batch.
        cluster: the dispatcher's costs.
        ranks_per_node: ranks that are taken to share a node link.
        workloads: one for every way in which the exchanges lie on the nodes.
    """

    model: Model
    cluster: Cluster
    ranks_per_node: int
    workloads: list[Workload]


def exchanges_of_run(config: RunConfig, arguments: Arguments, file: str) -> RunExchanges:
    """Exchanges of a run that names a model and a cluster.

    Args:
        config: the configuration, with paths resolved and everything merged; it names a model.
        arguments: Megatron's arguments.
        file: the run file, for messages.

    Raises:
        ValueError: model, cluster, layout and arguments do not fit each other.
    """
    assert config.model is not None, "the caller has looked"
    model = model_of_run(config.model, arguments)
    # The dispatcher's cluster file: the run file's, unless the command line names another.
    cluster_file = str(arguments["moe-monta-cluster"].value)
    cluster = load_cluster(cluster_file).with_kernel_choice(kernels_of_run(arguments))
    layout = layout_of_run(config, model, file)
    if layout.world_size > cluster.num_ranks:
        raise ValueError(
            f"{file}: layout.nodes * ranks_per_node: got {layout.world_size}, must be at most the "
            f"{cluster.num_ranks} ranks of {cluster_file}; its num_nodes is that of the cluster"
        )
    ranks_per_node = size_of(arguments, "moe-monta-ranks-per-node", cluster.ranks_per_node)
    return RunExchanges(
        model=model,
        cluster=cluster,
        ranks_per_node=ranks_per_node,
        workloads=workloads_of(model, layout, ranks_per_node),
    )


def layout_of_run(config: RunConfig, model: Model, file: str) -> ParallelLayout:
    """The layout, which has to be able to train the model."""
    layout = config.layout.parallel
    incompatibility = layout.incompatibility(model)
    if incompatibility is not None:
        raise ValueError(f"{file}: layout.{incompatibility}")
    return layout


def model_of_run(path: str, arguments: Arguments) -> Model:
    """The model of a file, with the batch of the arguments, which have to be for that model."""
    model = load_model(path)
    for name in MODEL_ARGUMENTS:
        if name not in arguments:
            continue
        field = name.replace("-", "_")
        expected = getattr(model, field)
        if expected != arguments[name].read(SIZE):
            raise ValueError(
                f"{arguments[name].source}: got {arguments[name].value}, must be {expected} as "
                f"{path}: {field}; name another model file, or none"
            )
    # The training sets these; the model file only holds defaults for them.
    return with_batch(
        model,
        **{
            name.replace("-", "_"): arguments[name].read(SIZE)
            for name in ("seq-length", "micro-batch-size")
            if name in arguments
        },
    )


def kernels_of_run(arguments: Arguments) -> KernelChoice:
    """Value of `--moe-monta-kernels`.

    Raises:
        ValueError: something else than it may.
    """
    if KERNELS not in arguments:
        return "auto"
    given = arguments[KERNELS]
    choice = str(given.value)
    if choice not in get_args(KernelChoice):
        raise ValueError(f"{given.source}: got {choice}, must be auto, torch or fused")
    return cast("KernelChoice", choice)


def size_of(arguments: Arguments, name: str, default: int) -> int:
    """The size that an argument gives."""
    return arguments[name].read(SIZE) if name in arguments else default
