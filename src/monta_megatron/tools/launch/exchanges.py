"""Exchanges of a run from Megatron's arguments: model, layout, MoE layers, micro-batches."""

import math
from dataclasses import dataclass
from pathlib import Path

from monta_megatron.core import Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import ParallelLayout, shape_of_layout
from monta_megatron.planner.models.model import Model, model_of
from monta_megatron.tools.launch.arguments import SIZE, Arguments
from monta_megatron.tools.launch.run_config import RunConfig


def num_micro_batches(arguments: Arguments, dp: int) -> int:
    """Micro-batches of a data parallel rank in an iteration, once the batch is ramped up.

    Args:
        arguments: Megatron's arguments.
        dp: data parallel size.
    """
    micro, batch = (arguments.get(name) for name in ("micro-batch-size", "global-batch-size"))
    samples = (1 if micro is None else micro.read(SIZE)) * dp
    return 1 if batch is None else math.ceil(batch.read(SIZE) / samples)


KERNELS = "moe-monta-kernels"


@dataclass(frozen=True, kw_only=True)
class RunExchanges:
    """Exchanges of a run, and where they lie.

    Attributes:
        model: the trained model, with the run's batch.
        cluster: the dispatcher's costs.
        ranks_per_node: ranks that are taken to share a node link.
        shape: of the exchange on the most nodes.
    """

    model: Model
    cluster: Cluster
    ranks_per_node: int
    shape: Shape


def exchanges_of_run(config: RunConfig, arguments: Arguments, file: str) -> RunExchanges:
    """Exchanges of a run that names a cluster.

    Args:
        config: the configuration, with paths resolved and everything merged.
        arguments: Megatron's arguments.
        file: the run file, for messages.

    Raises:
        ValueError: model, cluster, layout and arguments do not fit each other.
    """
    model = model_of_run(config, arguments, file)
    # The dispatcher's cluster file: the run file's, unless the command line names another.
    cluster_file = str(arguments["moe-monta-cluster"].value)
    cluster = load_cluster(cluster_file).with_kernels(may_fuse(arguments))
    try:
        cluster = cluster.of_job(config.layout.ranks_per_node)
    except ValueError as error:
        raise ValueError(f"{file}: layout.{error}") from error
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
        shape=shape_of_layout(model, layout, ranks_per_node),
    )


def layout_of_run(config: RunConfig, model: Model, file: str) -> ParallelLayout:
    """The layout, which has to be able to train the model."""
    layout = config.layout.parallel
    incompatibility = layout.incompatibility(model)
    if incompatibility is not None:
        raise ValueError(f"{file}: layout.{incompatibility}")
    return layout


def model_of_run(config: RunConfig, arguments: Arguments, file: str) -> Model:
    """The model that a run's arguments say.

    Raises:
        ValueError: names the argument that is missing or wrong.
    """
    name = config.name if config.model is None else Path(config.model).stem
    values = {key: argument.value for key, argument in arguments.items()}
    return model_of(values, name, f"{file}: megatron")


def may_fuse(arguments: Arguments) -> bool:
    """Whether `--moe-monta-kernels` lets Triton kernels run.

    Raises:
        ValueError: it has an unknown value.
    """
    if KERNELS not in arguments:
        return True
    given = arguments[KERNELS]
    if given.value not in ("auto", "torch", "fused"):
        raise ValueError(f"{given.source}: got {given.value}, must be auto, torch or fused")
    return given.value != "torch"


def size_of(arguments: Arguments, name: str, default: int) -> int:
    """The size that an argument gives."""
    return arguments[name].read(SIZE) if name in arguments else default
