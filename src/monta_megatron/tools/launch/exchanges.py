"""What a run exchanges: model, cluster, layout and Megatron's arguments, which have to fit."""

from dataclasses import dataclass
from typing import cast, get_args

from monta_megatron.chains.layout import DEFAULT_CTAS, Ctas
from monta_megatron.planner.cluster import Cluster, KernelChoice
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import ParallelLayout, workloads_of
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import Model, with_batch
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.launch.arguments import SIZE, Arguments
from monta_megatron.tools.launch.run_config import RunConfig

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
    """What a run exchanges, and where.

    Attributes:
        model: what is trained, with the run's batch.
        cluster: the dispatcher's costs.
        ranks_per_node: ranks that are taken to share a node link.
        workloads: one for every way in which the exchanges lie on the nodes.
    """

    model: Model
    cluster: Cluster
    ranks_per_node: int
    workloads: list[Workload]


def exchanges_of_run(config: RunConfig, arguments: Arguments, file: str) -> RunExchanges:
    """What a run that names a model and a cluster exchanges.

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
    """What `--moe-monta-kernels` says.

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


def ctas_of_run(arguments: Arguments) -> Ctas:
    """The budgets of a run's own communicators."""
    both = {
        name: size_of(arguments, "moe-monta-max-ctas", default)
        for name, default in DEFAULT_CTAS._asdict().items()
    }
    rail, node = (
        size_of(arguments, f"moe-monta-{name}-ctas", budget) for name, budget in both.items()
    )
    return Ctas(rail=rail, node=node)


def size_of(arguments: Arguments, name: str, default: int) -> int:
    """The size that an argument gives."""
    return arguments[name].read(SIZE) if name in arguments else default
