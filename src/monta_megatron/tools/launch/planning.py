"""Plan and memory of a run, predicted from its arguments and kept with it for comparison.

The run itself is given the cluster, not this plan: a plan is for one number of tokens, and the
dispatcher plans again when the number changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from monta_megatron.chains import CHAINS, chunks_of
from monta_megatron.chains.alltoall import ALLTOALL
from monta_megatron.common.flags import DTYPE_BYTES, fraction, not_negative, positive
from monta_megatron.common.text import one_of
from monta_megatron.common.units import bytes_of_gb
from monta_megatron.integration.options import AUTO, DISPATCHER_TYPE
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.chain_price import price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import workloads_of
from monta_megatron.planner.models.model import Model
from monta_megatron.planner.models.training_memory import (
    HeldState,
    TrainingMemory,
    plan_within_memory,
    training_memory,
)
from monta_megatron.planner.plan import Plan, exchange_of
from monta_megatron.planner.select import NUM_CHUNKS
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.launch.arguments import DISPATCHER, SIZE, Arguments
from monta_megatron.tools.launch.exchanges import (
    ctas_of_run,
    exchanges_of_run,
    iteration_of_run,
    kernels_of_run,
    layout_of_run,
    model_of_run,
    num_micro_batches,
    size_of,
)
from monta_megatron.tools.launch.run_config import RunConfig, RunLayout

FULLY_SHARDED = ("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2")
ACTIVATIONS_OFFLOADED = ("cpu-offloading-num-layers", "fine-grained-activation-offloading")


def held_state(arguments: Arguments, layout: RunLayout) -> HeldState:
    """State that the arguments keep on a rank; where they leave it open, the least.

    Args:
        arguments: Megatron's arguments.
        layout: nodes and parallel sizes.
    """

    def text(name: str, default: str) -> str:
        return str(arguments[name].value) if name in arguments else default

    def dtype_bytes(name: str) -> int:
        # The least, 1, is fp8's; a name that does not exist is Megatron's to refuse.
        return DTYPE_BYTES.get(text(name, "fp32"), 1)

    def number(name: str) -> int | None:
        return arguments[name].read(SIZE) if name in arguments else None

    # Step 1: weights, gradients and optimizer state of a parameter.
    low_precision = "bf16" in arguments or "fp16" in arguments
    weight = (1 if "fp8-param-gather" in arguments else 2) if low_precision else 4
    gradient = dtype_bytes("main-grads-dtype")
    sums_in_low_precision = "grad-reduce-in-bf16" in arguments or (
        "fp16" in arguments and "accumulate-allreduce-grads-in-fp32" not in arguments
    )
    if low_precision and sums_in_low_precision:
        gradient = 2
    optimizer: float = dtype_bytes("main-params-dtype") if low_precision else 0
    adam = text("optimizer", "adam") == "adam"
    if adam:
        optimizer += dtype_bytes("exp-avg-dtype") + dtype_bytes("exp-avg-sq-dtype")
    if "optimizer-cpu-offload" in arguments:
        part = arguments.get("optimizer-offload-fraction")
        optimizer *= 0 if part is None else 1 - part.read(fraction)

    # Step 2: which of them are sharded. Other optimizers than Adam shard their state by themselves.
    on_every_rank: float = weight + gradient
    sharded = optimizer
    if any(name in arguments for name in FULLY_SHARDED):
        on_every_rank, sharded = 0, on_every_rank + optimizer
    elif adam and "use-distributed-optimizer" not in arguments:
        on_every_rank, sharded = on_every_rank + optimizer, 0

    # Step 3: the inputs of layers.
    layers_per_input: int | None = 1
    if any(name in arguments for name in ACTIVATIONS_OFFLOADED):
        layers_per_input = None
    elif text("recompute-method", "") == "uniform":
        layers_per_input = number("recompute-num-layers") or 1
    return HeldState(
        bytes_per_parameter=on_every_rank,
        sharded_bytes_per_parameter=sharded,
        num_micro_batches=num_micro_batches(arguments, layout.parallel.dp),
        layers_per_input=layers_per_input,
        num_layers=number("num-layers"),
    )


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Plan and memory of a run.

    Attributes:
        plan: None where there is nothing to plan.
        memory: what the run holds on a rank; None where that is not known.
        benefit: gain of an iteration over stock; None where that is not known.
        notes: for the user, one line each.
    """

    plan: Plan | None = None
    memory: TrainingMemory | None = None
    benefit: Benefit | None = None
    notes: tuple[str, ...]


def plan_run(
    config: RunConfig, arguments: Arguments, file: str, ignore_memory: bool = False
) -> PlannedRun:
    """Plan a run.

    Args:
        config: the configuration, with paths resolved and everything merged.
        arguments: Megatron's arguments.
        file: the run file, for messages.
        ignore_memory: plan a run that does not fit into the memory of a rank, too.

    Raises:
        ValueError: model, cluster, layout and arguments do not fit each other, or the run does not
            fit into the memory of a rank.
    """
    if DISPATCHER not in arguments or arguments[DISPATCHER].value != DISPATCHER_TYPE:
        why = f"{DISPATCHER} is not {DISPATCHER_TYPE}"
        return PlannedRun(notes=(f"no plan, and memory not checked: {why}",))
    if config.model is not None and "moe-monta-plan" in arguments:
        return _given_plan(config, arguments, file, ignore_memory)
    if config.model is None or "moe-monta-cluster" not in arguments:
        why = "the file names no model and cluster"
        return PlannedRun(notes=(f"no plan, and memory not checked: {why}",))

    # Step 1: check that model, cluster and layout fit together.
    exchanges = exchanges_of_run(config, arguments, file)
    model, workloads = exchanges.model, exchanges.workloads
    cluster = exchanges.cluster.with_ctas(ctas_of_run(arguments))
    notes = list(model.notes)
    if exchanges.ranks_per_node != config.layout.ranks_per_node:
        notes.append(
            f"{exchanges.ranks_per_node} ranks are taken to share a node link, and "
            f"{config.layout.ranks_per_node} a node; --moe-monta-ranks-per-node changes the former"
        )

    # Step 2: plan the exchanges that the dispatcher will have to plan, in the memory that is left.
    chains, num_chunks = _candidates(arguments)
    memory = _memory(config, arguments, model, cluster, workloads, ignore_memory)
    plan, workload, memory = plan_within_memory(
        workloads,
        cluster,
        memory,
        where=f"{file}: layout",
        chains=chains,
        num_chunks=num_chunks,
        memory_limit_bytes=memory_limit_bytes(arguments),
        or_least=True,
        overlapped_compute_us=_overlapped_compute_us(arguments),
    )
    benefit = None
    if plan.key.overlapped_compute_us == 0:
        benefit = replace(
            plan.benefit or _over_alltoall(plan, workload, cluster),
            iteration=iteration_of_run(model, arguments, config.layout.parallel),
        )
    return PlannedRun(
        plan=plan, memory=memory, benefit=benefit, notes=(*notes, f"needs {memory.describe()}")
    )


def _given_plan(
    config: RunConfig, arguments: Arguments, file: str, ignore_memory: bool
) -> PlannedRun:
    """The plan of --moe-monta-plan, checked against the run that is to use it.

    Raises:
        ValueError: it was made for something else, or the run does not fit into the memory of a
            rank with it.
    """
    given = arguments["moe-monta-plan"]
    plan = Plan.load(str(given.value))
    assert config.model is not None, "the caller has looked"
    model = model_of_run(config.model, arguments)
    ctas = ctas_of_run(arguments)
    cluster, ranks_per_node = None, config.layout.ranks_per_node
    if "moe-monta-cluster" in arguments:
        cluster = load_cluster(str(arguments["moe-monta-cluster"].value))
        cluster = cluster.with_ctas(ctas)
        ranks_per_node = cluster.ranks_per_node
    ranks_per_node = size_of(arguments, "moe-monta-ranks-per-node", ranks_per_node)
    workloads = workloads_of(model, layout_of_run(config, model, file), ranks_per_node)
    kernels = kernels_of_run(arguments)
    named = {} if kernels == "auto" else {"kernels": kernels}
    for workload in workloads:
        incompatibility = plan.incompatibility({**exchange_of(workload), **named}) or CHAINS[
            plan.chain
        ].incompatibility(workload.layout)
        if incompatibility is not None:
            raise ValueError(f"{given.source}: {given.value}: {incompatibility}")
    benefit = plan.benefit
    if benefit is not None:
        benefit = replace(
            benefit, iteration=iteration_of_run(model, arguments, config.layout.parallel)
        )
    used = f"no plan made: {given.value} is used"
    doubts = plan.doubts_under(ctas)
    if cluster is None:
        note = f"{used}, and memory is not checked, as there is no cluster file"
        return PlannedRun(plan=plan, benefit=benefit, notes=(note, *doubts))
    if cluster.name != plan.key.cluster:
        used += f", made by the costs of {plan.key.cluster} and not of {cluster.name}"
    _, _, memory = plan_within_memory(
        workloads,
        cluster,
        _memory(config, arguments, model, cluster, workloads, ignore_memory),
        where=f"{file}: layout",
        chains=(plan.chain,),
        num_chunks=(plan.num_chunks,),
    )
    notes = (used, *doubts, *model.notes, f"needs {memory.describe()}")
    return PlannedRun(plan=plan, memory=memory, benefit=benefit, notes=notes)


def _over_alltoall(plan: Plan, workload: Workload, cluster: Cluster) -> Benefit:
    """Benefit of a chain that was named, which leaves nothing to choose from."""
    assert plan.predicted_us is not None, "it has just been planned"
    stock = price_chain(workload, cluster, ALLTOALL, 1, plan.key.phase)
    return Benefit(chain=plan.chain, chosen_us=plan.predicted_us, alltoall_us=stock.total_us)


def _memory(
    config: RunConfig,
    arguments: Arguments,
    model: Model,
    cluster: Cluster,
    workloads: Sequence[Workload],
    ignore_memory: bool,
) -> TrainingMemory:
    """Memory of the run beside its exchange, by Megatron's arguments."""
    return training_memory(
        model,
        cluster,
        config.layout.parallel,
        workloads,
        held=held_state(arguments, config.layout),
        ignore_memory=ignore_memory,
    )


def memory_limit_bytes(arguments: Arguments) -> float | None:
    """Bytes allowed by --moe-monta-memory-limit-gb; None where nothing limits them."""
    limit = arguments.get("moe-monta-memory-limit-gb")
    return None if limit is None else bytes_of_gb(limit.read(positive))


def _overlapped_compute_us(arguments: Arguments) -> float:
    """Computation that overlaps the exchange, which the dispatcher's options check."""
    given = arguments.get("moe-monta-overlapped-compute-us")
    return 0.0 if given is None else given.read(not_negative)


def _candidates(arguments: Arguments) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The chains and numbers of chunks that the run can choose from."""
    chunks = arguments.get("moe-monta-num-chunks")
    num_chunks = None if chunks is None else chunks.read(SIZE)
    chosen = arguments.get("moe-monta-chain")
    if chosen is None or chosen.value == AUTO:
        return tuple(CHAINS), NUM_CHUNKS if num_chunks is None else (num_chunks,)
    known = (AUTO, *CHAINS)
    if chosen.value not in known:
        raise ValueError(
            f"{chosen.source}: got {chosen.value}, must be {one_of(chosen.value, known)}"
        )
    field = chosen.source if chunks is None else chunks.source
    return (chosen.value,), (chunks_of(CHAINS[chosen.value], num_chunks, field),)
