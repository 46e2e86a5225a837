"""Plan of a run, predicted from its arguments and kept with it for comparison.

The run itself is given the cluster, not this plan: a plan is for one number of tokens, and the
dispatcher plans again when the number changes.
"""

from monta_megatron.chains import CHAINS, chunks_of
from monta_megatron.common.text import one_of
from monta_megatron.integration.options import AUTO, DISPATCHER_TYPE
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import shape_of_layout
from monta_megatron.planner.models.model import model_of
from monta_megatron.planner.models.training_memory import training_memory
from monta_megatron.planner.plan import NUM_CHUNKS, Plan, plan
from monta_megatron.tools.launch.arguments import CLUSTER, DISPATCHER, Arguments, is_given, size_of
from monta_megatron.tools.launch.run_config import RunConfig


def plan_run(
    config: RunConfig, arguments: Arguments, name: str
) -> tuple[Plan | None, tuple[str, ...]]:
    """Plan a run.

    Args:
        config: the configuration, with paths resolved and everything merged.
        arguments: Megatron's arguments.
        name: of the model.

    Returns:
        The plan, or None where there is nothing to plan; notes for the user.

    Raises:
        ValueError: model, cluster, layout and arguments do not fit each other.
    """
    if arguments[DISPATCHER] != DISPATCHER_TYPE:
        return None, (f"no plan: {DISPATCHER} is not {DISPATCHER_TYPE}",)
    if not is_given(arguments, "num-experts") or not is_given(arguments, CLUSTER):
        return None, ("no plan: the file names no model and cluster",)

    # Step 1: check that model, cluster and layout fit together.
    model, layout = model_of(arguments, name, "megatron"), config.layout.parallel
    has_kernels = arguments.get("moe-monta-kernels") != "torch"
    cluster = load_cluster(str(arguments[CLUSTER])).with_kernels(has_kernels)
    try:
        cluster = cluster.of_job(config.layout.ranks_per_node)
    except ValueError as error:
        raise ValueError(f"layout.{error}") from error
    incompatibility = layout.incompatibility(model)
    if incompatibility is not None:
        raise ValueError(f"layout.{incompatibility}")
    if layout.world_size > cluster.num_ranks:
        raise ValueError(
            f"layout.nodes * ranks_per_node: got {layout.world_size}, must be at most the "
            f"{cluster.num_ranks} ranks of {cluster.name}; its num_nodes is that of the cluster"
        )
    ranks_per_node = size_of(arguments, "moe-monta-ranks-per-node", cluster.ranks_per_node)
    notes = list(model.notes)
    if ranks_per_node != config.layout.ranks_per_node:
        notes.append(
            f"{ranks_per_node} ranks are taken to share a node link, and "
            f"{config.layout.ranks_per_node} a node; --moe-monta-ranks-per-node changes the former"
        )

    # Step 2: plan the exchange that the dispatcher will have to plan.
    chains, num_chunks = _candidates(arguments)
    shape = shape_of_layout(model, layout, ranks_per_node)
    planned = plan(shape, cluster, chains=chains, num_chunks=num_chunks)
    memory = training_memory(model, cluster, layout, shape.tokens_per_rank)
    return planned, (*notes, f"needs {memory.text}")


def _candidates(arguments: Arguments) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The chains and numbers of chunks that the run can choose from."""
    name = "moe-monta-num-chunks"
    num_chunks = size_of(arguments, name, 1) if is_given(arguments, name) else None
    chain, known = arguments.get("moe-monta-chain", AUTO), (AUTO, *CHAINS)
    if chain == AUTO:
        return tuple(CHAINS), NUM_CHUNKS if num_chunks is None else (num_chunks,)
    if chain not in known:
        raise ValueError(f"--moe-monta-chain: got {chain}, must be {one_of(chain, known)}")
    return (chain,), (chunks_of(CHAINS[chain], num_chunks, f"--{name}"),)
