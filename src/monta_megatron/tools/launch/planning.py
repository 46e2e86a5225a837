"""Plan of a run, predicted from its arguments and kept with it for comparison.

The run itself is given the cluster, not this plan: a plan is for one number of tokens, and the
dispatcher plans again when the number changes.
"""

from dataclasses import dataclass, replace

from monta_megatron.chains import CHAINS, chunks_of
from monta_megatron.chains.alltoall import ALLTOALL
from monta_megatron.common.text import one_of
from monta_megatron.core import Shape
from monta_megatron.integration.options import AUTO, DISPATCHER_TYPE
from monta_megatron.planner.benefit import Benefit
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import most_moe_layers
from monta_megatron.planner.models.training_memory import TrainingMemory, training_memory
from monta_megatron.planner.plan import NUM_CHUNKS, Plan, plan
from monta_megatron.planner.price import price
from monta_megatron.tools.launch.arguments import DISPATCHER, SIZE, Arguments
from monta_megatron.tools.launch.exchanges import exchanges_of_run, num_micro_batches
from monta_megatron.tools.launch.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Plan of a run.

    Attributes:
        plan: None where there is nothing to plan.
        memory: of a rank, by the formula that ranks layouts; None without a plan.
        benefit: gain of an iteration over stock; None where that is not known.
        notes: for the user, one line each.
    """

    plan: Plan | None = None
    memory: TrainingMemory | None = None
    benefit: Benefit | None = None
    notes: tuple[str, ...]


def plan_run(config: RunConfig, arguments: Arguments, file: str) -> PlannedRun:
    """Plan a run.

    Args:
        config: the configuration, with paths resolved and everything merged.
        arguments: Megatron's arguments.
        file: the run file, for messages.

    Raises:
        ValueError: model, cluster, layout and arguments do not fit each other.
    """
    if DISPATCHER not in arguments or arguments[DISPATCHER].value != DISPATCHER_TYPE:
        return PlannedRun(notes=(f"no plan: {DISPATCHER} is not {DISPATCHER_TYPE}",))
    if "num-experts" not in arguments or "moe-monta-cluster" not in arguments:
        return PlannedRun(notes=("no plan: the file names no model and cluster",))

    # Step 1: check that model, cluster and layout fit together.
    exchanges = exchanges_of_run(config, arguments, file)
    model, cluster, layout = exchanges.model, exchanges.cluster, config.layout.parallel
    notes = list(model.notes)
    if exchanges.ranks_per_node != config.layout.ranks_per_node:
        notes.append(
            f"{exchanges.ranks_per_node} ranks are taken to share a node link, and "
            f"{config.layout.ranks_per_node} a node; --moe-monta-ranks-per-node changes the former"
        )

    # Step 2: plan the exchange that the dispatcher will have to plan.
    chains, num_chunks = _candidates(arguments)
    shape = exchanges.shape
    planned = plan(shape, cluster, chains=chains, num_chunks=num_chunks)
    memory = training_memory(model, cluster, layout, shape.tokens_per_rank)
    benefit = replace(
        planned.benefit or _over_alltoall(planned, shape, cluster),
        num_moe_layers=most_moe_layers(model, layout.pp),
        num_micro_batches=num_micro_batches(arguments, layout.dp),
    )
    return PlannedRun(
        plan=planned, memory=memory, benefit=benefit, notes=(*notes, f"needs {memory.text}")
    )


def _over_alltoall(plan: Plan, shape: Shape, cluster: Cluster) -> Benefit:
    """Benefit of a chain that was named, which leaves nothing to choose from."""
    stock = price(shape, cluster, ALLTOALL, 1, plan.phase)
    return Benefit(chain=plan.chain, chosen_us=plan.predicted_us, alltoall_us=stock.total_us)


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
