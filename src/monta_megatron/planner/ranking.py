"""Layouts that fit a model and a cluster, ranked by the cost of their exchange.

Whether a layout fits is one formula: weights, gradients and the distributed optimizer's state of
the largest pipeline stage, with the logits in the last. Activations, which depend on recomputation,
and the exchange are left to the headroom.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from monta_megatron.common.errors import UserError
from monta_megatron.common.text import counted, size_text, time_text
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import (
    ParallelLayout,
    shape_of_layout,
    stages_of,
    training_of_layout,
)
from monta_megatron.planner.model import Model
from monta_megatron.planner.plan import MARGIN, Recommendation, recommend

# Share of a rank's memory that is left to everything else.
HEADROOM = 0.1


def num_parameters(model: Model) -> int | None:
    """Parameters of the whole model; None where they cannot be counted."""
    if model.layer_parameters is None:
        return None
    tables = model.table_parameters * (1 if model.is_tied else 2)
    experts = sum(model.moe_layers) * model.expert_parameters
    return sum(model.layer_parameters) + experts + tables


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Memory of a training on one rank.

    Attributes:
        needed_bytes: bytes of weights, gradients, optimizer state and logits; None where the
            parameters cannot be counted.
        available_bytes: bytes that a rank may use; None where the cluster file does not say.
        state_bytes: bytes of a parameter's weight, gradient, and optimizer state.
    """

    needed_bytes: float | None
    available_bytes: float | None
    state_bytes: tuple[int, int, int]

    @property
    def fits(self) -> bool:
        """Whether the headroom is left; True where one of the two is not known."""
        needed, available = self.needed_bytes, self.available_bytes
        return needed is None or available is None or needed <= (1 - HEADROOM) * available

    @property
    def text(self) -> str:
        """Needed and available memory."""
        if self.needed_bytes is None:
            return "a memory that is not known, as the model's parameters cannot be counted"
        available = "a rank's memory (memory_gb_per_rank: not in the cluster file)"
        if self.available_bytes is not None:
            available = f"a rank's {size_text(self.available_bytes)}"
        text = f"{size_text(self.needed_bytes)} of {available} for weights, gradients, optimizer "
        text += "({} + {} + {} bytes) and logits".format(*self.state_bytes)
        return text if self.fits else f"{text}; does not fit with {HEADROOM:.0%} headroom"

    def document(self) -> dict[str, Any]:
        """The fields of a JSON document."""
        return {**asdict(self), "fits": self.fits}


def training_memory(
    model: Model, cluster: Cluster, layout: ParallelLayout, tokens: int
) -> TrainingMemory:
    """Memory of a training on a rank.

    Weights and gradients are on every rank; the optimizer's state is sharded over data-parallel
    ranks, in the dtypes of the model's arguments.

    Args:
        model: the trained model.
        cluster: the cluster it is trained on.
        layout: sizes of the groups of ranks.
        tokens: tokens per rank and micro-batch.
    """
    weight, gradient, optimizer = model.state_bytes

    def state_bytes(parameters: int, parts: int) -> float:
        data_parallel = layout.world_size / (parts * layout.pp)
        return parameters / parts * (weight + gradient + optimizer / data_parallel)

    needed_bytes, layers = None, model.layer_parameters or ()
    stages = stages_of(model, layout.pp) if layers else []
    for number, stage in enumerate(stages):
        is_first, is_last = number == 0, number == len(stages) - 1
        # The last stage has the output layer, or a copy of the embedding that is its matrix.
        tables = is_first + is_last - (is_first and is_last and model.is_tied)
        dense = sum(layers[stage]) + tables * model.table_parameters
        experts = sum(model.moe_layers[stage]) * model.expert_parameters
        stage_bytes = state_bytes(dense, layout.tp) + state_bytes(experts, layout.ep * layout.etp)
        # Logits, [S * B / CP, V / TP] as they are, and in fp32 for the loss.
        stage_bytes += is_last * tokens * model.vocab_size * (model.value_bytes + 4)
        needed_bytes = max(needed_bytes or 0.0, stage_bytes)
    return TrainingMemory(
        needed_bytes=needed_bytes,
        available_bytes=cluster.memory_gb_per_rank and cluster.memory_gb_per_rank * 1e9,
        state_bytes=model.state_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class RankedLayout(ParallelLayout, Recommendation):
    """A layout, with the recommendation for its exchange.

    Attributes:
        num_nodes: number of nodes that an exchange lies on.
        tokens: tokens per rank in an exchange.
        us_per_1k_tokens: recommended time per 1,000 tokens of a rank; layouts differ in tokens.
        peak_bytes: largest number of bytes that the executor holds at once on one rank.
        needed_bytes: memory of a training on one rank; None where the parameters cannot be counted.
    """

    num_nodes: int
    tokens: int
    us_per_1k_tokens: float
    peak_bytes: float
    needed_bytes: float | None

    @property
    def runs(self) -> str:
        """What is recommended, for people: "stock alltoall", "alltoall_dedup x2"."""
        return f"stock {self.stock}" if self.stock_wins else f"{self.chain} x{self.num_chunks}"

    @property
    def shown_peak_bytes(self) -> float | None:
        """What our chain holds, where it is recommended; stock's peak is not priced."""
        return None if self.stock_wins else self.peak_bytes

    @property
    def name(self) -> str:
        """For messages: "EP 8 (TP 2, PP 4)"."""
        others = (("ETP", self.etp), ("TP", self.tp), ("PP", self.pp))
        named = ", ".join(f"{name} {size}" for name, size in others if size > 1)
        return f"EP {self.ep} ({named})" if named else f"EP {self.ep}"


def rank_layouts(
    model: Model,
    cluster: Cluster,
    world_size: int,
    tokens: int | None,
    cp: int = 1,
    pp: int | None = None,
) -> list[RankedLayout]:
    """All (TP, EP, ETP) that fit, the cheapest exchange per token first, as by `_cost`.

    Each has the fewest pipeline stages with which it fits, but no more than an exchange in a node
    needs. TP and ETP stay inside a node. Where the cluster file states no memory, everything fits;
    see `training_memory`.

    Args:
        model: the trained model.
        cluster: the cluster it is trained on.
        world_size: ranks of the training.
        tokens: tokens per rank; None for the model's batch.
        cp: context parallel size of all layouts.
        pp: number of pipeline stages; None for as many as it takes.

    Raises:
        UserError: no layout fits, or memory is limited and the parameters cannot be counted.
    """
    if model.layer_parameters is None and cluster.memory_gb_per_rank is not None:
        raise UserError(
            f"--ep: not given, must be: the parameters of {model.name} cannot be counted "
            f"({'; '.join(model.uncounted)}), so its layouts cannot be ranked by memory"
        )

    # Step 1: the first number of stages with which each exchange fits.
    fitting: dict[tuple[int, int, int], ParallelLayout] = {}
    min_bytes = math.inf
    for stages in [pp] if pp else divisors(world_size):
        for layout in layouts_of(model, cluster, world_size, cp, stages):
            num_tokens = tokens or layout.tokens_per_rank(model)
            memory = training_memory(model, cluster, layout, num_tokens)
            min_bytes = min(min_bytes, memory.needed_bytes or math.inf)
            if memory.fits:
                fitting.setdefault((layout.tp, layout.ep, layout.etp), layout)
        if any(cluster.ranks_per_node % layout.exchange_size == 0 for layout in fitting.values()):
            break
    if not fitting:
        needs = f"; the least needs {size_text(min_bytes)} of a rank"
        raise UserError(
            f"world_size: got {world_size}, no (tp, ep, etp) with cp {cp} and pp {pp or 'any'} "
            f"fits {model.name} on {cluster.name}{needs if min_bytes < math.inf else ''}, beside "
            f"{HEADROOM:.0%} of headroom; more ranks may help"
        )

    # Step 2: the plan of each.
    ranking = []
    for layout in fitting.values():
        shape = shape_of_layout(model, layout, cluster.ranks_per_node, tokens)
        training, num_tokens = training_of_layout(model, layout), shape.tokens_per_rank
        recommended, selection = recommend(shape, cluster, training)
        ranked = RankedLayout(
            **vars(layout),
            **vars(recommended),
            num_nodes=shape.layout.num_nodes,
            tokens=num_tokens,
            us_per_1k_tokens=recommended.recommended_us / num_tokens * 1e3,
            peak_bytes=selection.price.peak_bytes,
            needed_bytes=training_memory(model, cluster, layout, num_tokens).needed_bytes,
        )
        ranking.append(ranked)
    return sorted(ranking, key=lambda layout: (_cost(layout), layout.pp, layout.peak_bytes))


def _cost(layout: RankedLayout) -> float:
    """Time per token; one that crosses nodes has to save more than predictions are good for."""
    return layout.us_per_1k_tokens * (1 + MARGIN * (layout.num_nodes > 1))


def best(ranking: Sequence[RankedLayout], in_node: bool) -> RankedLayout | None:
    """The cheapest layout whose exchange stays in a node, or that crosses nodes."""
    return next((layout for layout in ranking if (layout.num_nodes == 1) == in_node), None)


def cross_or_stay(ranking: Sequence[RankedLayout]) -> str:
    """Whether to cross nodes, by the best layouts that do and do not."""
    inside, across = best(ranking, in_node=True), best(ranking, in_node=False)
    if inside is None or across is None:
        return (
            f"every exchange that fits {'crosses nodes' if inside is None else 'stays in a node'}"
        )
    inside_us = inside.recommended_us
    across_us = across.us_per_1k_tokens * inside.tokens / 1e3
    # Other layouts in a node may need less memory than the fastest.
    in_node = [layout for layout in ranking if layout.num_nodes == 1 and layout.pp == inside.pp]
    in_node_bytes = min(layout.needed_bytes or 0.0 for layout in in_node)
    saved_bytes = in_node_bytes - (across.needed_bytes or 0.0)
    if _cost(across) < _cost(inside):
        advice = "crossing costs less"
    elif across.pp < inside.pp:
        advice = f"cross only if {across.pp} instead of {inside.pp} stages pay for it"
    elif saved_bytes > 0:
        advice = f"cross only if {size_text(saved_bytes)} less on a rank pay for it"
    else:
        advice = "stay in a node"
    return (
        f"{inside.name} in a node costs {time_text(inside_us, across_us)} per layer and "
        f"micro-batch, {across.name} over {counted(across.num_nodes, 'node')} "
        f"{time_text(across_us, inside_us)} for as many tokens: {advice}"
    )


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
    """All divisors of a number, smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]
