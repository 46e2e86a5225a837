"""Requests of `monta plan`, and what is planned for them: a layout, its chain, a rank's memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from monta_megatron.chains import CHAINS
from monta_megatron.common import strict_yaml
from monta_megatron.common.errors import UserError
from monta_megatron.common.rules import PositiveInt, require
from monta_megatron.planner.benefit import Benefit, benefit_of
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import (
    PARALLEL_ARGUMENTS,
    UNREAD_SPLITS,
    ParallelLayout,
    max_moe_layers,
    shape_of_layout,
    training_of_layout,
    uneven_stages,
)
from monta_megatron.planner.model import Model, Reader, load_model
from monta_megatron.planner.plan import NUM_CHUNKS, Plan
from monta_megatron.planner.plan import plan as plan_shape
from monta_megatron.planner.ranking import (
    RankedLayout,
    TrainingMemory,
    num_parameters,
    rank_layouts,
    training_memory,
)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A request, as flags and the Python API make it. None: not given.

    Attributes:
        model: a `Model`, its file, or the name of a preset.
        cluster: a `Cluster`, its file, or the name of a preset.
        world_size: number of ranks of the training; None for all ranks of the cluster.
        tp, ep, etp, cp, pp: sizes of a `ParallelLayout`; without the first three, layouts are
            ranked, see `rank_layouts`.
        ranks_per_node: number of ranks that a job uses of each node, or host; None for the
            cluster's.
        tokens: tokens per rank; None for the model's batch.
        seq_length: tokens per sequence; None for the model file's.
        micro_batch_size: sequences per micro-batch; None for the model file's.
        global_batch_size: sequences per iteration; None where it is not known.
    """

    model: Any
    cluster: Any
    world_size: PositiveInt | None = None
    tp: PositiveInt | None = None
    ep: PositiveInt | None = None
    etp: PositiveInt | None = None
    cp: PositiveInt | None = None
    pp: PositiveInt | None = None
    ranks_per_node: PositiveInt | None = None
    tokens: PositiveInt | None = None
    seq_length: PositiveInt | None = None
    micro_batch_size: PositiveInt | None = None
    global_batch_size: PositiveInt | None = None


@dataclass(frozen=True, kw_only=True)
class Planned(Plan):
    """The plan of a request.

    Attributes:
        model: the trained model, with the batch of the request.
        nodes: the nodes of the job, and their costs.
        layout: the layout that was named, or the first of `ranking`.
        ranking: the layouts that fit, the best first; None where a layout was named.
        memory: memory of the training on one rank.
        benefit: gain over stock in an iteration.
    """

    model: Model
    nodes: Cluster
    layout: ParallelLayout
    ranking: list[RankedLayout] | None
    memory: TrainingMemory
    benefit: Benefit

    def document(self) -> dict[str, Any]:
        """Fields of a JSON document; `docs/plans.md` has them."""
        plan = Plan(**{entry.name: getattr(self, entry.name) for entry in fields(Plan)})
        ranking = self.ranking
        return {
            **plan.document(),
            "model": self.model.name,
            "num_parameters": num_parameters(self.model),
            "layout": strict_yaml.plain(self.layout),
            "layouts": None if ranking is None else [layout.document() for layout in ranking],
            "memory": self.memory.document(),
            "benefit": self.benefit.document(),
        }


def plan_request(
    request: PlanRequest,
    *,
    node_size: int | None = None,
    chains: Sequence[str] = tuple(CHAINS),
    num_chunks: Sequence[int] = NUM_CHUNKS,
) -> Planned:
    """Read the files of a request, rank the layouts where it names none, and plan.

    Args:
        request: the request.
        node_size: ranks that the node link of a layout joins; None for the cluster's.
        chains: the chains to consider.
        num_chunks: the numbers of chunks to consider.

    Raises:
        UserError: a file or a size is wrong, no layout fits, or no chain can run.
    """
    # Step 1: model and cluster.
    for name, value, kind in (
        ("model", request.model, Model),
        ("cluster", request.cluster, Cluster),
    ):
        rule = f"be a file, the name of a preset, or a {kind.__name__}"
        require(isinstance(value, str | Path | kind), name, value, rule)
    model = request.model if isinstance(request.model, Model) else load_model(request.model)
    model = replace(
        model,
        seq_length=request.seq_length or model.seq_length,
        micro_batch_size=request.micro_batch_size or model.micro_batch_size,
    )
    cluster = request.cluster
    if not isinstance(cluster, Cluster):
        cluster = load_cluster(cluster)
    cluster = cluster.for_job(request.ranks_per_node)
    world_size = request.world_size or cluster.num_ranks
    rule = f"be at most the {cluster.num_ranks} ranks of {cluster.name} (its num_nodes)"
    require(world_size <= cluster.num_ranks, "world_size", world_size, rule)

    # Step 2: the layout.
    sizes = {name: size for name in PARALLEL_ARGUMENTS if (size := getattr(request, name))}
    layout: ParallelLayout
    if sizes.keys() & {"tp", "ep", "etp"}:
        layout, ranking = ParallelLayout(world_size=world_size, **sizes), None
    else:
        ranking = rank_layouts(model, cluster, world_size, request.tokens, **sizes)
        layout = ranking[0]
    if problem := layout.incompatibility(model):
        raise UserError(problem)

    # Step 3: the chain.
    shape = shape_of_layout(model, layout, node_size or cluster.ranks_per_node, request.tokens)
    # A chain that is named may run where "auto" does not choose it.
    training = training_of_layout(model, layout, auto=len(chains) > 1)
    plan = plan_shape(shape, cluster, chains=chains, num_chunks=num_chunks, training=training)
    notes = [
        f"{model.num_layers} layers on {layout.pp} stages need --{name} {layers}"
        for name, layers in (uneven_stages(model, layout.pp) or {}).items()
    ]
    split = next(filter(Reader(model.arguments, model.name).value, UNREAD_SPLITS), None)
    if layout.pp > 1 and split is not None:
        notes.append(f"{split} is not followed: stages are taken to have equal numbers of layers")
    plan = replace(plan, notes=(*model.notes, *cluster.doubts, *plan.notes, *notes))

    # Step 4: how often an iteration waits for it.
    tokens, number = shape.tokens_per_rank, None
    if request.global_batch_size is not None:
        number = layout.num_micro_batches(model, request.global_batch_size)
        number = math.ceil(number * layout.tokens_per_rank(model) / tokens)
    layers = max_moe_layers(model, layout.pp)
    return Planned(
        **vars(plan),
        model=model,
        nodes=cluster,
        layout=layout,
        ranking=ranking,
        memory=training_memory(model, cluster, layout, tokens),
        benefit=benefit_of(plan, training, layers, number),
    )
