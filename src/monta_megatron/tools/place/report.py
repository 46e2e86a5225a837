"""Report of `monta place`: experts chosen together and their placement, as text and picture."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.common.tables import Progress, table
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import Model
from monta_megatron.tools.pictures import check_can_plot, figure
from monta_megatron.tools.place.placement import Collaboration, co_activation, write_placement
from monta_megatron.tools.place.study import (
    MAX_LOAD,
    MIN_GAIN_PCT,
    PlacedLayer,
    Places,
    place_model,
    places_of,
)
from monta_megatron.tools.place.trace import read_layers


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


def collaboration_fields(by_part: Mapping[str, Collaboration]) -> dict[str, Any]:
    """Plain data, by part."""
    return {what: asdict(value) for what, value in by_part.items()}


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


@dataclass(frozen=True, kw_only=True)
class PlaceRequest:
    """A placement that is asked for.

    Attributes:
        trace: folder of Megatron's `--moe-routing-trace-path`.
        model, cluster: files or presets.
        ep: EP ranks; None for all of the cluster.
        etp: expert tensor parallel size.
        pp: pipeline stages of the traced training.
        max_load: most token-expert pairs of a rank over their mean; None for the default.
        min_gain_pct: fewer copies than which nothing is written; None likewise.
        plot: folder for a picture of co-activation.
        out: the placement's file.
        force: overwrite it.
    """

    trace: str
    model: str
    cluster: str
    ep: int | None
    etp: int
    pp: int
    max_load: float | None
    min_gain_pct: float | None
    plot: str | None
    out: Path | None
    force: bool


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """Report of a placement.

    Attributes:
        model: whose experts are placed.
        places: where experts lie.
        placed: layer -> its new order and collaboration.
        min_gain_pct: fewer copies of held-out tokens that it has to save.
    """

    model: Model
    places: Places
    placed: Mapping[int, PlacedLayer]
    min_gain_pct: float

    @cached_property
    def copies(self) -> dict[str, dict[str, dict[str, float]]]:
        """Mean copies of a token: "before", "after" -> "training", "held_out" -> by part."""
        return {
            when: {tokens: self._mean_copies(tokens, when) for tokens in ("training", "held_out")}
            for when in ("before", "after")
        }

    @property
    def gain_pct(self) -> float:
        """Copies that held-out tokens save, at the level that saves more.

        A router's groups, or one node, may fix the other.
        """
        before, after = (self.copies[when]["held_out"] for when in ("before", "after"))
        return max(100 * (1 - after[what] / before[what]) for what in self.places.parts)

    @property
    def refused(self) -> str | None:
        """Why nothing is written; None if it is."""
        if self.gain_pct >= self.min_gain_pct:
            return None
        return (
            f"held-out tokens need {self.gain_pct:.1f}% fewer copies, must be at least "
            f"{self.min_gain_pct:g}% (--min-gain): these experts hardly cluster"
        )

    def document(self) -> dict[str, Any]:
        """The JSON document, which is also the placement's file."""
        return {
            "model": self.model.name,
            "num_experts": self.model.num_experts,
            "ep": self.places.ep,
            "num_nodes": self.places.num_nodes,
            "copies_per_token": self.copies,
            "gain_pct": self.gain_pct,
            "refused": self.refused,
            "layers": {
                str(layer): {
                    "note": result.note,
                    "held_out": {
                        when: collaboration_fields(by_part)
                        for when, by_part in result.held_out.items()
                    },
                }
                for layer, result in self.placed.items()
            },
            "placement": {
                str(layer): result.order.tolist() for layer, result in self.placed.items()
            },
        }

    def text(self) -> str:
        """Experts chosen together before, then the placement."""
        before = {layer: result.held_out["before"] for layer, result in self.placed.items()}
        return "\n".join([*collaboration_lines(before), "", *self._placement_lines()])

    def _mean_copies(self, tokens: str, when: str) -> dict[str, float]:
        of_layers = [getattr(layer, tokens)[when] for layer in self.placed.values()]
        return {
            what: float(np.mean([by_part[what].copies for by_part in of_layers]))
            for what in self.places.parts
        }

    def _placement_lines(self) -> list[str]:
        """A table: copies before and after by layer on held-out tokens, the mean, and the gain."""
        columns = [
            "layer",
            *(f">{what}" for what in ("ranks", "placed", "nodes", "placed", "load", "placed")),
        ]

        def cells(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
            return [f"{when[what]:.2f}" for what in before for when in (before, after)]

        rows: list[tuple[object, ...]] = []
        for layer, result in self.placed.items():
            before, after = result.held_out["before"], result.held_out["after"]
            copies = [
                {what: part.copies for what, part in when.items()} for when in (before, after)
            ]
            loads = (f"{when['rank'].load:.2f}" for when in (before, after))
            rows.append((layer, *cells(*copies), *loads))
        means = self.copies
        rows.append(
            ("mean", *cells(means["before"]["held_out"], means["after"]["held_out"]), "", "")
        )
        title = "Of a held-out token: ranks and nodes with its experts; load of the busiest rank"
        notes = [
            f"layer {layer} stays as it is: {result.note}"
            for layer, result in self.placed.items()
            if result.note is not None
        ]
        verdict = self.refused or f"{self.gain_pct:.1f}% fewer copies"
        return [*table(columns, rows, title).splitlines(), *notes, "", verdict]


def place(request: PlaceRequest, progress: Progress) -> PlacementReport:
    """Place the experts of every layer of a trace, and write the placement if it saves enough.

    Raises:
        ValueError: one line: a file or value is wrong.
    """
    out, max_load = request.out, request.max_load or MAX_LOAD
    if out is not None and out.exists() and not (request.force and out.is_file()):
        raise ValueError(f"--out: got {out}, must not exist; --force overwrites a file")
    if max_load < 1:
        raise ValueError(f"--max-load: got {max_load:g}, must be at least 1, the mean itself")
    model, cluster = load_model(request.model), load_cluster(request.cluster)
    places = places_of(model, cluster, request.ep or cluster.num_ranks, request.etp)
    check_can_plot(request.plot)
    layers = read_layers(request.trace, model, request.pp)
    progress.phase("layers placed", len(layers))
    placed = place_model(layers, model, places, max_load, progress.step)
    if request.plot is not None:
        draw_most_won(Path(request.plot), layers, placed, places)
    least = MIN_GAIN_PCT if request.min_gain_pct is None else request.min_gain_pct
    report = PlacementReport(model=model, places=places, placed=placed, min_gain_pct=least)
    if out is not None and report.refused is None:
        write_placement(out, report.document())
    return report
