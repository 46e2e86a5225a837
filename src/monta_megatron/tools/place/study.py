"""Placement of the experts of each layer, and its gain on held-out tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout, exchange_of, uniform_routing
from monta_megatron.planner.models.model import Model
from monta_megatron.tools.place.placement import Collaboration, collaboration, place_experts
from monta_megatron.tools.place.trace import Routings

# Busiest rank's share of the mean, and gain in percent, unless something else is asked for.
MAX_LOAD = 1.1
MIN_GAIN_PCT = 3.0


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places of an exchange's experts.

    Attributes:
        ep: EP ranks, which have as many experts each.
        num_nodes: nodes, which have as many ranks each.
    """

    ep: int
    num_nodes: int

    @property
    def parts(self) -> dict[str, int]:
        """Counted unit -> number of parts of the experts."""
        return {"rank": self.ep, "node": self.num_nodes}


@dataclass(frozen=True, kw_only=True)
class PlacedLayer:
    """One layer: its new order, and collaboration by "rank" and "node" before and after.

    Attributes:
        order: [E] the expert that comes to each position.
        note: why it stays as it is; None where it does not.
        training, held_out: "before" and "after" -> "rank" and "node" -> what its tokens need.
    """

    order: NDArray[np.int64]
    note: str | None
    training: Mapping[str, Mapping[str, Collaboration]]
    held_out: Mapping[str, Mapping[str, Collaboration]]


def places_of(model: Model, cluster: Cluster, ep: int, etp: int) -> Places:
    """Places of the experts in an exchange of `ep` x `etp` ranks.

    Raises:
        ValueError: the model's experts, its groups or the nodes do not divide evenly.
    """
    if ep * etp > cluster.num_ranks:
        raise ValueError(
            f"--ep: got {ep} at --etp {etp}, must be at most the {cluster.num_ranks} ranks of "
            f"{cluster.name}"
        )
    layout = ParallelLayout(world_size=ep * etp, ep=ep, etp=etp)
    incompatibility = layout.incompatibility(model)
    if incompatibility is not None:
        raise ValueError(f"layout: {incompatibility}")
    exchange = exchange_of(layout, model.num_experts, cluster.ranks_per_node)
    uneven = exchange.uneven_nodes()
    if uneven is not None:
        raise ValueError(f"--ep: got {ep}, must fill its nodes: {uneven}")
    places = Places(ep=ep, num_nodes=exchange.num_nodes)
    groups = model.moe_router_num_groups or 1
    for what, parts in places.parts.items():
        if max(parts, groups) % min(parts, groups):
            raise ValueError(
                f"moe_router_num_groups: got {groups}, must divide the {parts} {what}s of the "
                "exchange or be a multiple of them, as the router's groups stay together"
            )
    return places


def measured(routing_map: Routings, model: Model, places: Places) -> dict[str, Collaboration]:
    """Collaboration by rank and node: [T, E] -> "rank" and "node"."""
    uniform = uniform_routing(model)
    return {
        what: collaboration(routing_map, parts, uniform) for what, parts in places.parts.items()
    }


def place_layer(
    training: Routings, held_out: Routings, model: Model, places: Places, max_load: float
) -> PlacedLayer:
    """Place the experts of one layer; they stay where the load allows no better place.

    Args:
        training: [T, E] what the order is made from.
        held_out: [T, E] what it is judged on.
        model: whose layer it is.
        places: where experts lie.
        max_load: most token-expert pairs of a rank, over their mean.
    """
    groups = model.moe_router_num_groups or 1
    order = place_experts(training, places.num_nodes, places.ep, max_load, groups)
    load, note = measured(training[:, order], model, places)["rank"].load, None
    if load > max_load:
        note = (
            f"its busiest rank would get {load:.2f} times the mean, must get at most {max_load:g} "
            "(--max-load)"
        )
        order = np.arange(model.num_experts)
    return PlacedLayer(
        order=order,
        note=note,
        training=_before_and_after(training, order, model, places),
        held_out=_before_and_after(held_out, order, model, places),
    )


def _before_and_after(
    routing_map: Routings, order: NDArray[np.int64], model: Model, places: Places
) -> dict[str, dict[str, Collaboration]]:
    return {
        "before": measured(routing_map, model, places),
        "after": measured(routing_map[:, order], model, places),
    }


def place_model(
    layers: Mapping[int, tuple[Routings, Routings]],
    model: Model,
    places: Places,
    max_load: float,
    advance: Callable[[], None],
) -> dict[int, PlacedLayer]:
    """Place the experts of every layer.

    Args:
        layers: layer -> training and held-out tokens.
        model, places, max_load: see `place_layer`.
        advance: called after each layer.
    """
    placed = {}
    for layer, (training, held_out) in layers.items():
        placed[layer] = place_layer(training, held_out, model, places, max_load)
        advance()
    return placed
