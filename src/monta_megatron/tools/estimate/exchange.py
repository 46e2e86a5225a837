"""Exchange time of one MoE layer and micro-batch: stock's, the planner's, flex's."""

from dataclasses import dataclass, replace
from functools import lru_cache

from monta_megatron.chains import Chain
from monta_megatron.chains.alltoall import ALLTOALL
from monta_megatron.planner.assumptions import Assumptions
from monta_megatron.planner.chain_price import ChainPrice, price_chain
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import with_inter_rate
from monta_megatron.planner.curves import HostCosts
from monta_megatron.planner.experts import Work
from monta_megatron.planner.flex import Backend, FlexExchange, memory_rate, one_way_us
from monta_megatron.planner.layout import exchanges
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.estimate.layers import Architecture, TrainingSettings

PROB_BYTES = 4
NO_HOST = HostCosts(
    collective_us=0, operation_us=0, counts_to_host_us=0, kind="datasheet", source="left out"
)


@dataclass(frozen=True, kw_only=True)
class ExchangeTime:
    """Two passes forward, two backward.

    Attributes:
        forward_us: dispatch and combine.
        backward_us: their backward passes.
        num_chunks: in which the exchange may overlap its layer's experts.
    """

    forward_us: float
    backward_us: float
    num_chunks: int = 1


def workload_of(model: Architecture, settings: TrainingSettings, cluster: Cluster) -> Workload:
    """The exchange of a training: the first of those that lie on the nodes in different ways."""
    layout = exchanges(settings.layout, model.num_experts, cluster.ranks_per_node)[0]
    return Workload(
        layout=layout,
        hidden_size=model.hidden_size,
        value_bytes=settings.value_bytes,
        prob_bytes=PROB_BYTES,
        routing=model.routing,
        tokens_per_rank=settings.tokens_per_rank,
    )


def exchange_time(
    model: Architecture, settings: TrainingSettings, cluster: Cluster, assumed: Assumptions
) -> ExchangeTime:
    """Exchange time of the settings' dispatcher."""
    if settings.dispatcher == "alltoall":
        return _alltoall_time(model, settings, cluster, assumed)
    return _flex_time(model, settings, cluster, assumed, settings.dispatcher)


def chosen_time(
    model: Architecture,
    settings: TrainingSettings,
    workload: Workload,
    cluster: Cluster,
    assumed: Assumptions,
    chain: Chain,
    num_chunks: int,
) -> ExchangeTime:
    """Exchange time of the planner's choice, in a training with stock's alltoall.

    Flat chains get no more of the network than stock. Chains that send tokens permute them with
    kernels of their own.
    """
    if chain.rows == "tokens":
        settings = replace(settings, permute_fusion=True)
    stock = exchange_time(model, settings, cluster, assumed)
    flat = flat_network(cluster, assumed)
    where = cluster if chain.name.startswith("hierarchical") else flat
    alltoall = price_chain(workload, flat, ALLTOALL, 1, "forward_backward")
    chosen = price_chain(workload, where, chain, num_chunks, "forward_backward")
    return less_saved(stock, alltoall, chosen)


def less_saved(stock: ExchangeTime, alltoall: ChainPrice, chosen: ChainPrice) -> ExchangeTime:
    """Stock's time, less the saving of a choice by the planner's prices.

    Both prices have the host's time in them; stock's time here has not, as it is a part of its
    layer's.
    """
    before, after = of_price(alltoall), of_price(chosen)
    return ExchangeTime(
        forward_us=stock.forward_us + after.forward_us - before.forward_us,
        backward_us=stock.backward_us + after.backward_us - before.backward_us,
        num_chunks=chosen.num_chunks,
    )


def of_price(price: ChainPrice) -> ExchangeTime:
    """A chain's price, whose first two passes are the forward ones."""
    times = [of_pass.total_us for of_pass in price.passes]
    return ExchangeTime(
        forward_us=sum(times[:2]), backward_us=sum(times[2:]), num_chunks=price.num_chunks
    )


def flat_network(cluster: Cluster, assumed: Assumptions) -> Cluster:
    """The cluster as flat chains find it; a fitted share of its network has crossed rails in it."""
    share = assumed["alltoall_network_share"]
    if share == 1:
        return cluster
    links = tuple(replace(link, cross_rail_rate=None) for link in cluster.links)
    return with_inter_rate(replace(cluster, links=links), share)


def _alltoall_time(
    model: Architecture, settings: TrainingSettings, cluster: Cluster, assumed: Assumptions
) -> ExchangeTime:
    """Stock's alltoall: the planner's price of that chain, at its share of the network."""
    workload = workload_of(model, settings, cluster)
    priced = of_price(_price_alltoall(workload, flat_network(cluster, assumed)))
    if settings.permute_fusion:
        return priced
    permuted = settings.tokens_per_rank * model.router_topk * model.hidden_size
    num_bytes = permuted * settings.value_bytes * assumed["unfused_permute_passes"]
    passes = Work(kind="memory", num_bytes=num_bytes)
    more_us = 2 * passes.forward_us(assumed, memory_rate(cluster))
    return ExchangeTime(
        forward_us=priced.forward_us + more_us, backward_us=priced.backward_us + more_us
    )


@lru_cache(maxsize=1024)
def _price_alltoall(workload: Workload, cluster: Cluster) -> ChainPrice:
    # Host time of stock's own code is part of a layer's `host_layer_us`.
    without_host = replace(cluster, launch=NO_HOST)
    return price_chain(workload, without_host, ALLTOALL, 1, "forward_backward")


def _flex_time(
    model: Architecture,
    settings: TrainingSettings,
    cluster: Cluster,
    assumed: Assumptions,
    backend: Backend,
) -> ExchangeTime:
    exchange = FlexExchange(
        routing=model.routing,
        tokens_per_rank=settings.tokens_per_rank,
        row_bytes=model.hidden_size * settings.value_bytes,
        ep=settings.ep,
        etp=settings.etp,
        ranks_per_node=cluster.ranks_per_node,
    )
    one_way = one_way_us(exchange, cluster, backend, assumed)
    return ExchangeTime(forward_us=2 * one_way, backward_us=2 * one_way)
