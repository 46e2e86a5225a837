"""Co-activation of the experts of one layer, before and after a placement."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from monta_megatron.tools.pictures import figure
from monta_megatron.tools.place.collaboration import co_activation
from monta_megatron.tools.place.study import PlacedLayer, Places


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
