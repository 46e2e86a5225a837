"""`monta place --trace`: the experts of every layer placed, and judged on held-out tokens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from numpy.typing import NDArray

from monta_megatron.common.files import write_whole
from monta_megatron.common.tables import Progress, table
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import ParallelLayout, exchanges, uniform_routing
from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import Model
from monta_megatron.tools.place.placement import (
    RoutingMap,
    busiest_load,
    copies_per_token,
    place_experts,
)
from monta_megatron.tools.place.trace import read_trace

# A placement that saves fewer copies of held-out tokens is refused.
LEAST_GAIN_PCT = 3.0


@dataclass(frozen=True, kw_only=True)
class PlacedLayer:
    """One layer, with its held-out tokens measured before and after.

    Attributes:
        order: [E] the expert at each position.
        before, after: copies of a token per "rank" and per "node", and "load", the token-expert
            pairs of the busiest rank over their mean.
    """

    order: NDArray[Any]
    before: Mapping[str, float]
    after: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """Placement of all layers.

    Attributes:
        model: the traced model.
        num_ranks: EP ranks of the exchange.
        num_nodes: nodes of the exchange.
        layers: layer, counted from 0 -> its placement.
    """

    model: Model
    num_ranks: int
    num_nodes: int
    layers: Mapping[int, PlacedLayer]

    @property
    def copies(self) -> dict[str, dict[str, float]]:
        """Copies of a held-out token per rank and node: "before", "after", and of uniform routing.

        Each is the mean of all layers.
        """
        routing = uniform_routing(self.model)
        parts = {"rank": self.num_ranks, "node": self.num_nodes}
        placed = self.layers.values()
        return {
            "before": {part: mean(layer.before[part] for layer in placed) for part in parts},
            "after": {part: mean(layer.after[part] for layer in placed) for part in parts},
            "uniform": {part: float(routing.hits(num).sum()) for part, num in parts.items()},
        }

    @property
    def gain_pct(self) -> float:
        """Copies saved, per rank or per node, where more are saved.

        The groups of a router, or a single node, may fix the other.
        """
        before, after = self.copies["before"], self.copies["after"]
        return max(100 * (1 - after[part] / before[part]) for part in before)

    @property
    def refused(self) -> str | None:
        """Why the placement is not written; None if it gains enough."""
        if self.gain_pct >= LEAST_GAIN_PCT:
            return None
        return (
            f"held-out tokens need {self.gain_pct:.1f}% fewer copies, must be at least "
            f"{LEAST_GAIN_PCT:g}%: these experts hardly cluster"
        )

    def document(self) -> dict[str, Any]:
        """The JSON document, which is also the file of the placement."""
        return {
            "model": self.model.name,
            "num_experts": self.model.num_experts,
            "ep": self.num_ranks,
            "num_nodes": self.num_nodes,
            "copies_per_token": self.copies,
            "gain_pct": self.gain_pct,
            "refused": self.refused,
            "layers": {
                str(layer): {"before": placed.before, "after": placed.after}
                for layer, placed in self.layers.items()
            },
            "placement": {
                str(layer): placed.order.tolist() for layer, placed in self.layers.items()
            },
        }

    def text(self) -> str:
        """A table by layer, the mean beside uniform routing, and the verdict."""
        columns = ("layer", ">ranks", ">placed", ">nodes", ">placed", ">load", ">placed")

        def cells(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
            return [f"{when[name]:.2f}" for name in before for when in (before, after)]

        copies = self.copies
        rows: list[tuple[object, ...]] = [
            *(
                (layer, *cells(placed.before, placed.after))
                for layer, placed in self.layers.items()
            ),
            ("mean", *cells(copies["before"], copies["after"]), "", ""),
            ("uniform", *cells(copies["uniform"], copies["uniform"]), "", ""),
        ]
        title = "Copies of a held-out token per rank and per node; load of the busiest rank"
        verdict = self.refused or f"{self.gain_pct:.1f}% fewer copies of held-out tokens"
        return f"{table(columns, rows, title)}\n\n{verdict}"


def place(
    trace: Path,
    model_file: str,
    cluster_file: str,
    *,
    ep: int | None,
    etp: int,
    pp: int,
    out: Path | None,
    progress: Progress,
) -> PlacementReport:
    """Place the experts of every layer of a trace; write the placement unless it is refused.

    Args:
        trace: folder of Megatron's `--moe-routing-trace-path`.
        model_file, cluster_file: files or presets.
        ep: EP ranks; None for all of the cluster.
        etp: expert tensor parallel size.
        pp: pipeline parallel size of the traced training.
        out: file of the placement, which must not exist.
        progress: told of every layer.

    Raises:
        ValueError: one line: a file or value is wrong.
    """
    if out is not None and out.exists():
        raise ValueError(f"--out: got {out}, must not exist")
    model, cluster = load_model(model_file), load_cluster(cluster_file)
    num_ranks = ep or cluster.num_ranks // etp
    num_nodes = _num_nodes(model, cluster, num_ranks, etp)
    layers = {}
    traced = read_trace(trace, model, pp)
    progress.phase("layers placed", len(traced))
    for layer, (training_TE, held_out_TE) in traced.items():
        groups = model.moe_router_num_groups or 1
        order = place_experts(training_TE, num_nodes, num_ranks, groups)
        layers[layer] = PlacedLayer(
            order=order,
            before=_measure(held_out_TE, num_ranks, num_nodes),
            after=_measure(held_out_TE[:, order], num_ranks, num_nodes),
        )
        progress.step()
    report = PlacementReport(model=model, num_ranks=num_ranks, num_nodes=num_nodes, layers=layers)
    if out is not None and report.refused is None:
        write_whole(out, json.dumps(report.document()) + "\n")
    return report


def _measure(routing_TE: RoutingMap, num_ranks: int, num_nodes: int) -> dict[str, float]:
    return {
        "rank": copies_per_token(routing_TE, num_ranks),
        "node": copies_per_token(routing_TE, num_nodes),
        "load": busiest_load(routing_TE, num_ranks),
    }


def _num_nodes(model: Model, cluster: Cluster, ep: int, etp: int) -> int:
    """Nodes of an exchange of `ep` x `etp` ranks.

    Raises:
        ValueError: experts, nodes or the router's groups do not divide evenly.
    """
    if ep * etp > cluster.num_ranks:
        raise ValueError(
            f"--ep: got {ep} at --etp {etp}, must be at most the {cluster.num_ranks} ranks of "
            f"{cluster.name}"
        )
    layout = ParallelLayout(world_size=ep * etp, ep=ep, etp=etp)
    uneven = layout.incompatibility(model)
    (exchange, *_) = exchanges(layout, model.num_experts, cluster.ranks_per_node)
    uneven = uneven or exchange.uneven_nodes()
    groups = model.moe_router_num_groups or 1
    for parts in (ep, exchange.num_nodes):
        if max(parts, groups) % min(parts, groups):
            uneven = uneven or (
                f"moe-router-num-groups: got {groups}, must divide {parts} or be a multiple of it, "
                "as the groups of a router stay together"
            )
    if uneven is not None:
        raise ValueError(f"--ep: got {ep} on {exchange.num_nodes} nodes: {uneven}")
    return exchange.num_nodes
