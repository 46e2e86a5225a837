"""The points of the study of scale: layouts of a model on so many GPUs, with what they cost."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from studies.common import run

from monta_megatron.planner.assumptions import Assumptions, assumptions_of
from monta_megatron.planner.chain_price import ChainPrice
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster, with_inter_rate
from monta_megatron.planner.layout import workloads_of
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import Model, with_batch
from monta_megatron.planner.models.training_memory import training_memory
from monta_megatron.planner.select import Selection, select_chain
from monta_megatron.planner.workload import Workload
from monta_megatron.tools.estimate import iteration as communication
from monta_megatron.tools.estimate.exchange import ExchangeTime, exchange_time, less_saved
from monta_megatron.tools.estimate.iteration import Iteration, estimate_iteration
from monta_megatron.tools.estimate.layers import Architecture, TrainingSettings

TPS, PPS, EPS = (1, 2, 8), (1, 4, 16), (8, 16, 32, 64, 128, 256)
SEQ_LENGTH = 4096
# 16.8 million tokens, as of Llama 3 405B on 16,384 GPUs (arXiv 2407.21783).
GLOBAL_BATCH = 4096
# A scalable unit of a DGX SuperPOD: 32 nodes of 8, which reach the others by the spine.
POD_RANKS = 256
RANKS_PER_NODE = 8
GPU = "H100"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A layout at a size.

    Attributes:
        settings: the training.
        needed_bytes: of a rank, with the planner's choice.
        fits: whether they are at most what it has.
        price: the planner's choice.
        stock, chosen: the iterations with `alltoall` and with it.
        stock_overlapped, chosen_overlapped: the same beside another micro-batch (1F1B).
    """

    settings: TrainingSettings
    needed_bytes: float
    fits: bool
    price: ChainPrice
    stock: Iteration
    chosen: Iteration
    stock_overlapped: Iteration
    chosen_overlapped: Iteration


def all_to_all_ratio(num_ranks: int, oversubscription: float) -> float:
    """The rate of an AllToAll of neighbouring ranks over that of one inside a pod.

    Of what a rank sends, the share of the other pods shares the links between the pods.
    """
    crossing = max(1 - POD_RANKS / num_ranks, 0.0)
    return 1 / max(1.0, oversubscription * crossing)


def ring_ratio(stride: int, oversubscription: float) -> float:
    """Likewise of rings whose neighbours lie `stride` ranks apart: so many of them leave a pod."""
    return 1 / max(1.0, oversubscription * min(stride / POD_RANKS, 1.0))


@cache
def selection_of(workload: Workload, cluster: Cluster) -> Selection:
    """The planner's choice, without a limit."""
    return select_chain(workload, cluster)


@cache
def stock_time(
    architecture: Architecture, settings: TrainingSettings, cluster: Cluster, assumed_key: str
) -> ExchangeTime:
    """Stock's exchange, which does not depend on the pipeline or on the number of ranks."""
    return exchange_time(architecture, settings, cluster, assumed_of(assumed_key))


@cache
def assumed_of(cluster_name: str) -> Assumptions:
    """The constants."""
    return assumptions_of(GPU, cluster_name)


def layouts(model: Model, world_size: int) -> Iterator[TrainingSettings]:
    """All that fit the model and its batch; exchanges of up to experts x ETP ranks."""
    for tp, pp, ep in product(TPS, PPS, EPS):
        for etp in (1, tp) if tp == max(TPS) else (1,):
            if world_size % (tp * pp) or world_size % (ep * etp * pp) or model.num_experts % ep:
                continue
            try:
                settings = TrainingSettings(
                    world_size=world_size,
                    tp=tp,
                    pp=pp,
                    ep=ep,
                    etp=etp,
                    seq_length=SEQ_LENGTH,
                    global_batch_size=GLOBAL_BATCH,
                    recompute="selective",
                )
            except ValueError:
                # More data parallel ranks than sequences.
                continue
            if settings.layout.incompatibility(model) is None:
                yield settings


@cache
def points(name: str, world_size: int, oversubscription: float) -> tuple[Point, ...]:
    """Every layout of a model at a size."""
    model = with_batch(load_model(name), SEQ_LENGTH, 1)
    of = load_cluster("h100_8x_ndr")
    cluster = replace(of, num_nodes=world_size // of.ranks_per_node)
    found = []
    for settings in layouts(model, world_size):
        ranks = settings.ep * settings.etp
        ratios = (all_to_all_ratio(ranks, oversubscription), ring_ratio(ranks, oversubscription))
        found.append(_point(model, run(name)[0], settings, cluster, *ratios))
    return tuple(found)


@cache
def _point(
    model: Model,
    of: Architecture,
    settings: TrainingSettings,
    cluster: Cluster,
    exchange_ratio: float,
    ring_ratio: float,
) -> Point:
    # Step 1: the exchange, on as many nodes as it needs, so that its price is that of all sizes.
    ranks = settings.ep * settings.etp
    small = replace(cluster, num_nodes=max(2, ranks // cluster.ranks_per_node))
    network = small if exchange_ratio == 1 else with_inter_rate(small, exchange_ratio)
    layout = settings.layout
    workload = workloads_of(model, replace(layout, world_size=ranks * settings.tp, pp=1), 8)[0]
    selection = selection_of(workload, network)
    alone = replace(settings, world_size=ranks * settings.tp, pp=1)
    stock = stock_time(of, alone, network, cluster.name)

    # Step 2: the fastest chain that the memory has room for.
    memory = training_memory(model, cluster, layout, [workload])
    left = memory.left_bytes or 0.0
    price = selection.price
    if price.peak_bytes > left:
        within = [other for other in selection.prices if other.peak_bytes <= left]
        price = within[0] if within else min(selection.prices, key=lambda each: each.peak_bytes)
    needed = memory.needed_bytes + price.peak_bytes
    alltoall = next(each for each in selection.prices if each.chain.name == "alltoall")

    # Step 3: the iterations.
    assumed = assumed_of(cluster.name)
    chosen = less_saved(stock, alltoall, price)
    overlapped = replace(settings, overlap=True, virtual_stages=2 if settings.pp > 1 else 1)
    slower_ms = _slower_gradients_ms(of, settings, cluster, assumed, ring_ratio)

    def iteration(how: TrainingSettings, exchange: ExchangeTime) -> Iteration:
        made = estimate_iteration(of, how, cluster, assumed, exchange)
        made.parts_ms["gradient reduction"] += slower_ms
        return made

    return Point(
        settings=settings,
        needed_bytes=needed,
        fits=price.peak_bytes <= left,
        price=price,
        stock=iteration(settings, stock),
        chosen=iteration(settings, chosen),
        stock_overlapped=iteration(overlapped, stock),
        chosen_overlapped=iteration(overlapped, chosen),
    )


def _slower_gradients_ms(
    of: Architecture,
    settings: TrainingSettings,
    cluster: Cluster,
    assumed: Assumptions,
    ratio: float,
) -> float:
    """What the links between pods add to the gradient reduction of the experts.

    Rings of the other parameters have a stride of at most TP 8, too few to fill those links.
    """
    stride = settings.ep * settings.etp
    held = communication.stage_parameters(of, settings).of_experts
    size = settings.world_size // settings.pp // stride
    per_value = communication.GRADIENT_BYTES + communication.VALUE_BYTES
    ring_us = communication.ring_us(cluster, held * per_value, size, stride)
    return assumed["gradient_exposed"] * (1 / ratio - 1) * ring_us / 1e3


def best(of: tuple[Point, ...], which: str) -> Point:
    """The fastest point that fits; where none does, the one that needs least."""
    fitting = [point for point in of if point.fits]
    if not fitting:
        return min(of, key=lambda point: point.needed_bytes)
    return min(fitting, key=lambda point: getattr(point, which).total_ms)


def over_nodes(of: tuple[Point, ...]) -> tuple[Point, ...]:
    """Those whose exchange does not lie inside a node."""
    return tuple(point for point in of if point.settings.ep * point.settings.etp > RANKS_PER_NODE)


def gain_pct(of: tuple[Point, ...], kind: str = "") -> float:
    """What the best layout with the planner's choice saves of the best one with `alltoall`."""
    stock, chosen = (
        getattr(best(of, f"{name}{kind}"), f"{name}{kind}").total_ms for name in ("stock", "chosen")
    )
    # Rounded, so that no rounding error is a loss.
    return round(100 * (stock - chosen) / stock, 6) + 0.0


def percent(of: tuple[Point, ...], kind: str = "") -> str:
    """Of a table: "-" where no layout fits."""
    if not any(point.fits for point in of):
        return "-"
    return f"{gain_pct(of, kind):.0f}%"
