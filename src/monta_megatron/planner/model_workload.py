"""What a model exchanges: the workloads of its layouts, and how often in an iteration."""

import math
from collections.abc import Callable
from dataclasses import replace

from monta_megatron.chains.layout import Layout
from monta_megatron.planner.benefit import Iteration
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout, exchanges
from monta_megatron.planner.model import Model
from monta_megatron.planner.routing import Routing, UniformRouting
from monta_megatron.planner.workload import Workload


def workload_of_model(
    model: Model, layout: Layout, tokens_per_rank: int, routing: Routing | None = None
) -> Workload:
    """A model's exchange, with the model's own router unless a routing is given."""
    return Workload(
        layout=layout,
        hidden_size=model.hidden_size,
        value_bytes=model.value_bytes,
        prob_bytes=model.prob_bytes,
        routing=uniform_routing(model) if routing is None else routing,
        tokens_per_rank=tokens_per_rank,
    )


def with_experts(workload: Workload, model: Model, cluster: Cluster) -> Workload:
    """A workload with what the model's experts take on a cluster."""
    from monta_megatron.planner.experts import ExpertSizes, experts_of

    sizes = ExpertSizes(
        num_local_experts=workload.layout.num_local_experts,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.moe_ffn_hidden_size // workload.layout.etp,
        value_bytes=model.value_bytes,
    )
    return replace(workload, experts=experts_of(sizes, cluster))


def workloads_of(
    model: Model,
    layout: ParallelLayout,
    ranks_per_node: int,
    tokens_per_rank: int | None = None,
    routing: Callable[[Layout], Routing] | None = None,
) -> list[Workload]:
    """One workload for every way in which the layout's exchanges lie on the nodes.

    Args:
        model: what is trained.
        layout: how the ranks are grouped.
        ranks_per_node: ranks joined by the node link.
        tokens_per_rank: None for the number that follows from the model's batch.
        routing: layout of an exchange -> its routing; None for the model's own router.
    """
    tokens = layout.tokens_per_rank(model) if tokens_per_rank is None else tokens_per_rank
    return [
        workload_of_model(model, exchange, tokens, None if routing is None else routing(exchange))
        for exchange in exchanges(layout, model.num_experts, ranks_per_node)
    ]


def iteration_of(model: Model, pp: int, num_micro_batches: int | None) -> Iteration:
    """How often an iteration waits for an exchange, with the layers split as evenly as they go.

    A model does not say which of its layers are dense. The mean of the stages is a lower bound of
    the MoE layers of the stage with the most; it is their number if no stage has room for more.

    Args:
        model: what is trained.
        pp: pipeline parallel size.
        num_micro_batches: None where the batch is not known.
    """
    mean, most = (math.ceil(layers / pp) for layers in (model.num_moe_layers, model.num_layers))
    return Iteration(
        num_moe_layers=mean,
        is_lower_bound=mean < min(most, model.num_moe_layers),
        num_stages=pp,
        num_micro_batches=num_micro_batches,
    )


def uniform_routing(model: Model) -> UniformRouting:
    """The model's router with every expert as likely as any other."""
    return UniformRouting(
        num_experts=model.num_experts,
        topk=model.moe_router_topk,
        num_groups=model.moe_router_num_groups or 1,
        group_topk=model.moe_router_group_topk or 1,
    )
