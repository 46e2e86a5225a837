"""Every layout that fits the model and the cluster, ranked by the cost of its exchange."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from monta_megatron.chains.program import Phase
from monta_megatron.common.tables import Progress
from monta_megatron.common.units import GB_BYTES
from monta_megatron.core import Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.models.model import Model
from monta_megatron.planner.models.training_memory import (
    HEADROOM,
    TrainingMemory,
    training_memory,
)
from monta_megatron.planner.plan import Plan, slowest_plan


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
        state_bytes: weights, gradients and optimizer state on one rank.
        activation_bytes: see `training_memory.TrainingMemory`.
        needed_bytes: the three together.
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
    state_bytes: float | None
    activation_bytes: float
    needed_bytes: float | None


def rank_layouts(
    model: Model,
    cluster: Cluster,
    *,
    world_size: int,
    cp: int = 1,
    pp: int = 1,
    phase: Phase = "forward_backward",
    shapes: Callable[[ParallelLayout], Sequence[Shape]],
    progress: Progress | None = None,
) -> list[RankedLayout]:
    """All (TP, EP, ETP) that fit, the cheapest exchange per token first.

    TP and ETP stay inside a node. If the cluster says how much memory a rank has, layouts that do
    not fit into it are left out; see `training_memory`.

    Args:
        model: the trained model.
        cluster: the cluster it is trained on.
        world_size, cp, pp: the same for all layouts.
        phase: the phase to choose for.
        shapes: layout -> its exchanges; see `planner.layout.shapes_of`.
        progress: gets a step for every layout.

    Raises:
        ValueError: no layout fits.
    """
    ranked = []
    least: float | None = None
    layouts = list(layouts_of(model, cluster, world_size, cp, pp))
    progress = progress or Progress()
    progress.phase("layouts", len(layouts))
    for layout in layouts:
        progress.step()
        of_layout = shapes(layout)
        tokens = of_layout[0].tokens_per_rank
        memory = training_memory(model, cluster, layout, tokens, 0.0)
        if memory.fits:
            plan, _ = slowest_plan(of_layout, cluster, phase=phase)
            memory = replace(memory, exchange_bytes=plan.chosen.peak_bytes or 0.0)
        if memory.needed_bytes is not None:
            least = min(least or memory.needed_bytes, memory.needed_bytes)
        if memory.fits:
            ranked.append(_ranked(layout, plan, memory))
    if not ranked:
        needs = ""
        if least is not None:
            needs = (
                f"; the least that one needs is {least / GB_BYTES:.0f} GB, with {HEADROOM:.0%} "
                "of headroom"
            )
        raise ValueError(
            f"world_size: got {world_size}, no (tp, ep, etp) fits {model.name} on {cluster.name} "
            f"with cp {cp} and pp {pp}{needs}; more ranks or pipeline stages may help"
        )
    return sorted(ranked, key=lambda layout: (layout.us_per_1k_tokens, layout.peak_bytes))


def layouts_of(
    model: Model, cluster: Cluster, world_size: int, cp: int, pp: int
) -> Iterator[ParallelLayout]:
    """Every (TP, EP, ETP) that divides model and ranks; TP and ETP stay inside a node."""
    in_node = divisors(cluster.ranks_per_node)
    for tp, etp, ep in product(in_node, in_node, divisors(model.num_experts)):
        if world_size % (tp * cp * pp) == 0 and world_size % (etp * ep * pp) == 0:
            layout = ParallelLayout(world_size=world_size, tp=tp, ep=ep, etp=etp, cp=cp, pp=pp)
            if layout.incompatibility(model) is None:
                yield layout


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]


def _ranked(layout: ParallelLayout, plan: Plan, memory: TrainingMemory) -> RankedLayout:
    predicted_us = plan.predicted_us
    tokens = plan.key.tokens_per_rank
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
        peak_bytes=memory.exchange_bytes,
        state_bytes=memory.state_bytes,
        activation_bytes=memory.activation_bytes,
        needed_bytes=memory.needed_bytes,
    )
