"""Every layout that fits the model and the cluster, ranked by what its exchange costs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.model import Model
from monta_megatron.planner.plan import Phase, Plan
from monta_megatron.planner.search import MARGIN, slowest_plan
from monta_megatron.planner.workload import Workload
from monta_megatron.progress import NoProgress, Progress

# Mixed precision with the distributed optimizer: weights in 16 bits and gradients in 32 on every
# rank; master weights and two moments in 32 bits, sharded over the data parallel ranks.
BYTES_PER_PARAMETER = 2 + 4
BYTES_PER_PARAMETER_OVER_DATA_PARALLEL = 3 * 4


@dataclass(frozen=True, kw_only=True)
class RankedLayout:
    """A layout, with the plan for its exchange.

    Attributes:
        tp, ep, etp, cp, pp: sizes of the parallel groups.
        tokens_per_rank: tokens that a rank brings to an exchange.
        chain: the chain of the plan.
        num_chunks: the number of chunks of the plan.
        predicted_us: time of the exchanges of one layer and micro-batch.
        us_per_1k_tokens: the same per 1,000 tokens of a rank; layouts differ in tokens per rank.
        peak_bytes: the most that the executor holds at once on one rank.
        state_bytes: weights, gradients and optimizer state on one rank; activations come on top.
    """

    tp: int
    ep: int
    etp: int
    cp: int
    pp: int
    tokens_per_rank: int
    chain: str
    num_chunks: int
    predicted_us: float
    us_per_1k_tokens: float
    peak_bytes: float
    state_bytes: float


def rank_layouts(
    model: Model,
    cluster: Cluster,
    *,
    world_size: int,
    cp: int = 1,
    pp: int = 1,
    phase: Phase = "forward_backward",
    workloads: Callable[[ParallelLayout], Sequence[Workload]],
    memory_limit_bytes: float | None = None,
    margin: float = MARGIN,
    progress: Progress | None = None,
) -> list[RankedLayout]:
    """All (TP, EP, ETP) that fit, the cheapest exchange per token first.

    TP and ETP stay inside a node. If the cluster says how much memory a rank has, layouts whose
    weights, gradients, optimizer state and exchange do not fit into it are left out.

    Args:
        model: what is trained.
        cluster: the cluster it is trained on.
        world_size, cp, pp: the same for all layouts.
        phase: the phase to choose for.
        workloads: layout -> its exchanges; see `workload.workloads_of`.
        memory_limit_bytes, margin: for the plan of each layout; see `search.plan`.
        progress: gets a step for every layout.

    Raises:
        ValueError: no layout fits.
    """
    found = []
    memory_bytes = cluster.memory_bytes_per_rank
    least: float | None = None
    layouts = list(_layouts(model, cluster, world_size, cp, pp))
    progress = progress or NoProgress()
    progress.phase("layouts", len(layouts))
    for layout in layouts:
        progress.step()
        state = state_bytes(model, layout)
        least = state if least is None else min(least, state)
        limits = [] if memory_limit_bytes is None else [memory_limit_bytes]
        if memory_bytes is not None:
            limits.append(memory_bytes - state)
        if min(limits, default=0.0) < 0:
            continue
        of_layout = workloads(layout)
        try:
            plan, _ = slowest_plan(
                of_layout,
                cluster,
                phase=phase,
                memory_limit_bytes=min(limits, default=None),
                margin=margin,
            )
        except ValueError:
            # No chain fits into the memory that is left.
            continue
        found.append(_ranked(layout, plan, state))
    if not found:
        needs = "" if least is None else f"; the least that one needs is {least / 1e9:.0f} GB"
        raise ValueError(
            f"world_size: got {world_size}, no (tp, ep, etp) fits {model.name} on {cluster.name} "
            f"with cp {cp} and pp {pp}{needs}; more ranks or pipeline stages may help"
        )
    return sorted(found, key=lambda each: (each.us_per_1k_tokens, each.peak_bytes))


def state_bytes(model: Model, layout: ParallelLayout) -> float:
    """Bytes of weights, gradients and optimizer state on one rank, if pipeline stages are alike."""
    experts = min(model.num_expert_parameters, model.num_parameters_billions * 1e9)
    dense = model.num_parameters_billions * 1e9 - experts
    total = 0.0
    for parameters, parts in ((dense, layout.tp), (experts, layout.ep * layout.etp)):
        own = parameters / (parts * layout.pp)
        data_parallel = layout.world_size / (parts * layout.pp)
        total += own * (
            BYTES_PER_PARAMETER + BYTES_PER_PARAMETER_OVER_DATA_PARALLEL / data_parallel
        )
    return total


def _layouts(
    model: Model, cluster: Cluster, world_size: int, cp: int, pp: int
) -> Iterator[ParallelLayout]:
    in_node = _divisors(cluster.ranks_per_node)
    for tp, etp, ep in product(in_node, in_node, _divisors(model.num_experts)):
        if world_size % (tp * cp * pp) == 0 and world_size % (etp * ep * pp) == 0:
            layout = ParallelLayout(world_size=world_size, tp=tp, ep=ep, etp=etp, cp=cp, pp=pp)
            if layout.misfit(model) is None:
                yield layout


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _ranked(layout: ParallelLayout, plan: Plan, state: float) -> RankedLayout:
    choice = plan.chosen
    assert choice is not None, "it has just been made"
    predicted_us, peak_bytes = choice.predicted_us or 0.0, choice.peak_bytes or 0.0
    tokens = plan.situation.tokens_per_rank
    return RankedLayout(
        tp=layout.tp,
        ep=layout.ep,
        etp=layout.etp,
        cp=layout.cp,
        pp=layout.pp,
        tokens_per_rank=tokens,
        chain=plan.chain,
        num_chunks=plan.num_chunks,
        predicted_us=predicted_us,
        us_per_1k_tokens=predicted_us / max(tokens, 1) * 1e3,
        peak_bytes=peak_bytes,
        state_bytes=state,
    )
