"""Report of `monta place` and `monta plan` on experts chosen together, as text and picture."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.common.tables import table
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.models.model import Model
from monta_megatron.planner.routing.recorded import read_trace, router_of
from monta_megatron.tools.pictures import figure
from monta_megatron.tools.place.placement import Collaboration, co_activation
from monta_megatron.tools.place.study import PlacedLayer, Places, measured, places_of, traced_layers


def draw_co_activation(
    path: Path, routing_map: NDArray[np.bool_], order: NDArray[np.int64], layer: int, places: Places
) -> None:
    """Draw how often tokens choose two experts together, as a PNG.

    Args:
        path: of the PNG.
        routing_map: [T, E] tokens of the layer.
        order: [E] the expert that comes to each position.
        layer: its number.
        places: whose borders are drawn: ranks thin, nodes thick.

    Raises:
        ValueError: the file cannot be written.
    """
    together = co_activation(routing_map)
    np.fill_diagonal(together, np.nan)
    with figure(path, (9.0, 4.4)) as drawn:
        axes = drawn.subplots(1, 2)
        placed = together[np.ix_(order, order)]
        for axis, shares, name in zip(axes, (together, placed), ("before", "after"), strict=True):
            image = axis.imshow(100 * shares, cmap="magma_r", vmin=0)
            for parts, width in ((places.ep, 0.4), (places.num_nodes, 1.2)):
                for border in range(0, len(order) + 1, len(order) // parts):
                    for draw in (axis.axhline, axis.axvline):
                        draw(border - 0.5, color="#333333", linewidth=width)
            axis.set(title=f"{name} the placement", xlabel="position of an expert")
        drawn.colorbar(image, ax=axes, label="% of tokens that choose both", shrink=0.8)
        drawn.suptitle(f"Layer {layer}: experts chosen together; lines part ranks and nodes")


def draw_most_won(
    folder: Path,
    layers: Mapping[int, tuple[NDArray[np.bool_], NDArray[np.bool_]]],
    placed: Mapping[int, PlacedLayer],
    places: Places,
) -> None:
    """Draw the held-out tokens of the layer whose ranks win most.

    Args:
        folder: of the PNG.
        layers: layer -> training and held-out tokens.
        placed: layer -> its placement.
        places: where experts lie.

    Raises:
        ValueError: the file cannot be written.
    """

    def kept(layer: int) -> float:
        before, after = (placed[layer].held_out[when]["rank"] for when in ("before", "after"))
        return after.copies / before.copies

    layer = min(placed, key=kept)
    path = folder / f"co_activation_layer_{layer}.png"
    draw_co_activation(path, layers[layer][1], placed[layer].order, layer, places)


def collaboration_of_trace(
    folder: str, model: Model, cluster: Cluster, layout: ParallelLayout
) -> dict[int, dict[str, Collaboration]] | str:
    """Layer -> "rank" and "node" -> needs of its tokens, as the experts lie now.

    Args:
        folder: of the trace, which has been read for this model.
        model, cluster: the trained model, and where.
        layout: of the training, whose pipeline stages the trace is taken to have.

    Returns:
        The layers; or why they cannot be told, which is no reason not to plan.
    """
    try:
        places = places_of(model, cluster, layout.ep, layout.etp)
        layers = traced_layers(read_trace(folder, router_of(model), 0), model, layout.pp)
    except ValueError as error:
        return str(error)
    return {layer: measured(np.concatenate(rows), model, places) for layer, rows in layers.items()}


def collaboration_document(layers: Mapping[int, Mapping[str, Collaboration]]) -> dict[str, Any]:
    """For --json."""
    return {
        str(layer): {what: asdict(value) for what, value in by_part.items()}
        for layer, by_part in layers.items()
    }


def collaboration_lines(layers: Mapping[int, Mapping[str, Collaboration]]) -> list[str]:
    """A table: copies of a token and pairs of its experts, by layer, beside uniform routing."""
    columns = [
        "layer",
        *(f">{what}" for what in ("ranks", "uniform", "nodes", "uniform")),
        *(f">{what}" for what in ("in one rank", "uniform", "in one node", "uniform")),
    ]
    rows = [
        (
            layer,
            *(
                f"{value:.2f}"
                for part in by_part.values()
                for value in (part.copies, part.uniform_copies)
            ),
            *(
                f"{value:.1%}"
                for part in by_part.values()
                for value in (part.intra, part.uniform_intra)
            ),
        )
        for layer, by_part in layers.items()
    ]
    title = "Of a token: ranks and nodes with its experts; pairs of its experts that lie in one"
    return table(columns, rows, title).splitlines()


def placement_lines(document: Mapping[str, Any], placed: Mapping[int, PlacedLayer]) -> list[str]:
    """A table: copies before and after by layer on held-out tokens, the mean, and the gain."""
    columns = [
        "layer",
        *(f">{what}" for what in ("ranks", "placed", "nodes", "placed", "load", "placed")),
    ]

    def cells(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
        return [f"{when[what]:.2f}" for what in before for when in (before, after)]

    rows: list[tuple[object, ...]] = []
    for layer, result in placed.items():
        before, after = result.held_out["before"], result.held_out["after"]
        copies = [{what: part.copies for what, part in when.items()} for when in (before, after)]
        loads = (f"{when['rank'].load:.2f}" for when in (before, after))
        rows.append((layer, *cells(*copies), *loads))
    copies = document["copies_per_token"]
    rows.append(("mean", *cells(copies["before"]["held_out"], copies["after"]["held_out"]), "", ""))
    title = "Of a held-out token: ranks and nodes with its experts; load of the busiest rank"
    notes = [
        f"layer {layer} stays as it is: {result.note}"
        for layer, result in placed.items()
        if result.note is not None
    ]
    verdict = document["refused"] or f"{document['gain_pct']:.1f}% fewer copies"
    return [*table(columns, rows, title).splitlines(), *notes, "", verdict]
