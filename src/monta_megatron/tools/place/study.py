"""Gain of a placement on held-out tokens of each layer of a router trace."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout, exchanges, uniform_routing
from monta_megatron.planner.models.model import Model
from monta_megatron.planner.routing.recorded import RouterTrace, read_trace, router_of
from monta_megatron.tools.place.placement import Collaboration, collaboration, place_experts

Routings = NDArray[np.bool_]

# Of a layer, read from all ranks together: what experts have in common shows by then.
TOKENS_OF_LAYER = 32768
# The last ones of every rank: a placement is made from the others.
HELD_OUT_SHARE = 0.25


def read_layers(folder: str, model: Model, pp: int) -> dict[int, tuple[Routings, Routings]]:
    """Training and held-out tokens of each layer of the decoder.

    Args:
        folder: of Megatron's `--moe-routing-trace-path`.
        model: that was traced.
        pp: pipeline stages of the traced training, without virtual ones.

    Returns:
        Layer, counted from 0 -> [T, E], [T, E] whether a token goes to an expert.

    Raises:
        ValueError: one line that names the folder, or the file and its line, and the rule.
    """
    router = router_of(model)
    # The tokens kept of a file are shared by its layers, those of a layer by its files.
    num_files = len(list(Path(folder).glob("router_trace_rank*.jsonl")))
    trace = read_trace(folder, router, TOKENS_OF_LAYER * model.num_layers // max(num_files, pp))
    layers = {}
    for layer, rows in traced_layers(trace, model, pp).items():
        num_tokens = sum(map(len, rows))
        if num_tokens < 2 * router.least_tokens:
            raise ValueError(
                f"{folder}: layer {layer}: got {num_tokens:,} tokens, must be at least "
                f"{2 * router.least_tokens:,} for top-{router.topk} of {router.num_experts} "
                "experts, some of which are held out; trace more steps"
            )
        most = -(-TOKENS_OF_LAYER // len(rows))
        parts = [np.split(part, [-_num_held_out(part)]) for part in (part[:most] for part in rows)]
        training, held_out = zip(*parts, strict=True)
        layers[layer] = np.concatenate(training), np.concatenate(held_out)
    return layers


def traced_layers(trace: RouterTrace, model: Model, pp: int) -> dict[int, list[Routings]]:
    """Layer of the decoder, counted from 0 -> the rows of every rank that has it, [T, E] each.

    The tracer names a layer by its position in its pipeline stage. Megatron's stages follow each
    other in the order of the ranks.

    Raises:
        ValueError: the layers are not those of the model.
    """
    if model.num_layers % pp:
        raise ValueError(f"--pp: got {pp}, must divide num_layers ({model.num_layers})")
    of_stage = model.num_layers // pp
    num_ranks = max(trace.rows) + 1
    layers: dict[int, list[Routings]] = defaultdict(list)
    for rank, by_layer in trace.rows.items():
        stage = rank * pp // num_ranks
        numbers = {
            (block, index, layer): int(layer)
            for block, index, layer in by_layer
            if block != "mtp" and layer.isdecimal()
        }
        # Some of its ways count them from 1.
        first = 1 if of_stage in numbers.values() and 0 not in numbers.values() else 0
        for key, number in numbers.items():
            if number - first >= of_stage:
                raise ValueError(
                    f"{trace.folder}: rank {rank}: layer {number}, must be less than {of_stage}, "
                    f"num_layers of {model.name} in each of --pp {pp} stages"
                )
            layers[stage * of_stage + number - first].append(by_layer[key])
    if len(layers) != model.num_moe_layers:
        raise ValueError(
            f"{trace.folder}: got {len(layers)} layers with experts, must be the "
            f"{model.num_moe_layers} of {model.name} (num_moe_layers); where the traced training "
            "had pipeline stages, give them in --pp"
        )
    return dict(sorted(layers.items()))


def _num_held_out(rows: Routings) -> int:
    return max(round(len(rows) * HELD_OUT_SHARE), 1)


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
    (exchange, *_) = exchanges(layout, model.num_experts, cluster.ranks_per_node)
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
