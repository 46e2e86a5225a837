"""What `monta place` and `monta plan` print of experts that tokens choose together."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from monta_megatron.common.tables import table
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.models.model import Model
from monta_megatron.planner.routing.recorded import read_trace, router_of
from monta_megatron.tools.place.collaboration import Collaboration
from monta_megatron.tools.place.study import PlacedLayer, measured, places_of
from monta_megatron.tools.place.traced_layers import traced_layers


def collaboration_of_trace(
    folder: str, model: Model, cluster: Cluster, layout: ParallelLayout
) -> dict[int, dict[str, Collaboration]] | str:
    """Layer -> "rank" and "node" -> what its tokens need, as the experts lie now.

    Args:
        folder: of the trace, which has been read for this model.
        model, cluster: what is trained, and where.
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
    """A table: copies before and after by layer on held-out tokens, the mean, and what it wins."""
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
