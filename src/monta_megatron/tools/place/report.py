"""`monta place --trace`: the experts of every layer placed, and judged on held-out tokens."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from monta_megatron.common.files import write_whole
from monta_megatron.common.text import Progress, table
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import ParallelLayout, exchange_of, uniform_routing
from monta_megatron.planner.model import Model, load_model
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
class PlacementReport:
    """Placement of all layers, measured on held-out tokens; its document is also its file.

    Attributes:
        model: name of the model.
        num_experts: E.
        ep: EP ranks of the exchange.
        num_nodes: nodes of the exchange.
        copies_per_token: "before", "after" and "uniform" -> copies per "rank" and per "node", the
            mean of all layers.
        layers: layer, counted from 0 -> "before" and "after" -> copies per "rank" and per "node",
            and "load", the token-expert pairs of the busiest rank over their mean.
        placement: layer -> [E] the expert at each position.
    """

    model: str
    num_experts: int
    ep: int
    num_nodes: int
    copies_per_token: Mapping[str, Mapping[str, float]]
    layers: Mapping[int, Mapping[str, Mapping[str, float]]]
    placement: Mapping[int, list[int]]

    @property
    def gain_pct(self) -> float:
        """Copies saved per rank or per node, where more are saved.

        The groups of a router, or a single node, may fix the other.
        """
        before, after = self.copies_per_token["before"], self.copies_per_token["after"]
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
        """The JSON document."""
        return {**asdict(self), "gain_pct": self.gain_pct, "refused": self.refused}

    def text(self) -> str:
        """A table by layer, the mean beside uniform routing, and the verdict."""
        columns = ("layer", ">ranks", ">placed", ">nodes", ">placed", ">load", ">placed")
        copies = self.copies_per_token
        uniform: Mapping[str, Mapping[str, float]] = {"before": copies["uniform"], "after": {}}
        rows = []
        for name, measured in (*self.layers.items(), ("mean", copies), ("uniform", uniform)):
            pairs = (
                (when, part) for part in ("rank", "node", "load") for when in ("before", "after")
            )
            values = [measured[when].get(part) for when, part in pairs]
            rows.append((name, *("" if value is None else f"{value:.2f}" for value in values)))
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
    # Step 1: the exchange.
    if out is not None and out.exists():
        raise ValueError(f"--out: got {out}, must not exist")
    model, cluster = load_model(model_file), load_cluster(cluster_file)
    ep = ep or cluster.num_ranks // etp
    parts = {"rank": ep, "node": _num_nodes(model, cluster, ep, etp)}

    def measure(routing_TE: RoutingMap) -> dict[str, float]:
        copies = {part: copies_per_token(routing_TE, num) for part, num in parts.items()}
        return {**copies, "load": busiest_load(routing_TE, ep)}

    # Step 2: each layer.
    layers, placement = {}, {}
    traced = read_trace(trace, model, pp)
    progress.phase("layers placed", len(traced))
    for layer, (training_TE, held_out_TE) in traced.items():
        groups = model.moe_router_num_groups or 1
        order = place_experts(training_TE, parts["node"], ep, groups)
        placement[layer] = order.tolist()
        layers[layer] = {"before": measure(held_out_TE), "after": measure(held_out_TE[:, order])}
        progress.step()

    # Step 3: all of them.
    routing = uniform_routing(model)
    copies = {
        when: {part: mean(measured[when][part] for measured in layers.values()) for part in parts}
        for when in ("before", "after")
    }
    copies["uniform"] = {part: float(routing.hits(num).sum()) for part, num in parts.items()}
    report = PlacementReport(
        model=model.name,
        num_experts=model.num_experts,
        ep=ep,
        num_nodes=parts["node"],
        copies_per_token=copies,
        layers=layers,
        placement=placement,
    )
    if out is not None and report.refused is None:
        write_whole(out, json.dumps(report.document()) + "\n")
    return report


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
    exchange = exchange_of(layout, model.num_experts, cluster.ranks_per_node)
    problem = layout.incompatibility(model) or exchange.uneven_nodes()
    groups = model.moe_router_num_groups or 1
    for parts in (ep, exchange.num_nodes):
        if max(parts, groups) % min(parts, groups):
            problem = problem or f"the router has {groups} groups, which must stay together"
    if problem is not None:
        raise ValueError(f"--ep: got {ep} on {exchange.num_nodes} nodes: {problem}")
    return exchange.num_nodes
