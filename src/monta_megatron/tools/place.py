"""`monta place --trace`: the experts of every layer placed, and judged on held-out tokens.

With `--moe-routing-trace-path FOLDER` each rank of Megatron writes a file
`router_trace_rank{r}.jsonl`, a line per step, micro-batch and layer. A layer's number is its
position in its pipeline stage:

    {"step": 0, "block": "decoder", "layer": 3, "num_tokens": 128, "topk": 8,
     "top_indices": [[12, 45, ...], ...], ...}

Notation: N = tokens of a layer in a file, T = in all files, E = experts, K = experts per token.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from monta_megatron.common.errors import UserError
from monta_megatron.common.files import write_whole
from monta_megatron.common.rules import require
from monta_megatron.common.text import Progress, counted, table
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import (
    ParallelLayout,
    exchange_of,
    stages_of,
    uniform_routing,
)
from monta_megatron.planner.model import Model, load_model
from monta_megatron.tools.placement import (
    MAX_LOAD,
    RoutingMap,
    busiest_load,
    copies_per_token,
    place_experts,
)

# Tokens read per layer, over all files: enough for collaboration to show.
MAX_TOKENS = 32768
# Mean number of choices per expert that makes its share known within about 10%.
MIN_CHOICES = 200
# A placement that saves fewer copies of held-out tokens is refused.
MIN_GAIN_PCT = 3.0


@dataclass(frozen=True, kw_only=True)
class PlacementReport:
    """Placement of all layers, measured on held-out tokens; its document is also its file.

    Attributes:
        model: name of the model.
        ep: EP ranks of the exchange.
        num_nodes: nodes of the exchange.
        copies_per_token: "before", "after" and "uniform" -> mean copies per "rank" and per "node"
            over all layers.
        layers: layer, counted from 0 -> "before" and "after" -> copies per "rank" and per "node",
            and "load", the token-expert pairs of the busiest rank over their mean.
        placement: layer -> [E] expert at each position.
    """

    model: str
    ep: int
    num_nodes: int
    copies_per_token: Mapping[str, Mapping[str, float]]
    layers: Mapping[int, Mapping[str, Mapping[str, float]]]
    placement: Mapping[int, list[int]]

    @property
    def gain_pct(self) -> float:
        """Share of all copies that is saved: those per node and, inside of nodes, per rank."""
        parts = ("rank", "node") if self.num_nodes > 1 else ("rank",)
        before, after = (
            sum(self.copies_per_token[when][part] for part in parts) for when in ("before", "after")
        )
        return 100 * (1 - after / before)

    @property
    def refused(self) -> str | None:
        """Why the placement is not written; None if it gains enough, at about today's load."""
        if self.gain_pct < MIN_GAIN_PCT:
            return (
                f"held-out tokens need {self.gain_pct:.1f}% fewer copies, must be at least "
                f"{MIN_GAIN_PCT:g}%: these experts hardly cluster"
            )
        rises = [layer["after"]["load"] / layer["before"]["load"] for layer in self.layers.values()]
        if mean(rises) > MAX_LOAD:
            return (
                f"held-out tokens load the busiest rank {mean(rises):.2f} times as much as today, "
                f"must be at most {MAX_LOAD:g}: trace other data"
            )
        return None

    def document(self) -> dict[str, Any]:
        """The JSON document."""
        return {**asdict(self), "gain_pct": self.gain_pct, "refused": self.refused}

    def text(self) -> str:
        """A table by layer, uniform routing, and the verdict."""
        columns = ("layer", ">ranks", ">placed", ">nodes", ">placed", ">load", ">placed")
        measured = [*self.layers.items(), ("mean", self.copies_per_token)]
        cells = [(part, when) for part in ("rank", "node", "load") for when in ("before", "after")]
        rows = []
        for name, values in measured:
            numbers = [values[when].get(part) for part, when in cells]
            rows.append((name, *(number and f"{number:.2f}" for number in numbers)))
        title = "Copies of a held-out token per rank and per node; load of the busiest rank"
        uniform = self.copies_per_token["uniform"]
        verdict = self.refused or f"{self.gain_pct:.1f}% fewer copies of held-out tokens"
        return (
            f"{table(columns, rows, title)}\n\n"
            f"uniform routing: {uniform['rank']:.2f} per rank, {uniform['node']:.2f} per node\n"
            f"{verdict}"
        )


def place(
    trace: Path,
    model_file: str,
    cluster_file: str,
    *,
    ep: int,
    etp: int,
    pp: int,
    out: Path | None,
    progress: Progress,
) -> PlacementReport:
    """Place the experts of every layer of a trace; write the placement unless it is refused.

    Args:
        trace: folder of Megatron's `--moe-routing-trace-path`.
        model_file, cluster_file: files or presets.
        ep, etp: expert parallel and expert tensor parallel size.
        pp: pipeline parallel size of the traced training.
        out: placement file to write, which must not exist; None to write none.
        progress: progress display, which counts the layers.

    Raises:
        UserError: one line: a file or value is wrong.
    """
    # Step 1: the exchange.
    if out is not None and out.exists():
        raise UserError(f"--out: got {out}, must not exist")
    model, cluster = load_model(model_file), load_cluster(cluster_file)
    layout = ParallelLayout(world_size=ep * etp, ep=ep, etp=etp)
    exchange = exchange_of(layout, model.num_experts, cluster.ranks_per_node)
    cluster.check_has(exchange.num_nodes)
    num_nodes, groups = exchange.num_nodes, model.moe_router_num_groups or 1
    problem = layout.incompatibility(model) or exchange.uneven_nodes()
    if any(max(num, groups) % min(num, groups) for num in (ep, num_nodes)):
        problem = problem or f"the router has {groups} groups, which must stay together"
    if problem is not None:
        raise UserError(f"--ep: got {ep} on {counted(num_nodes, 'node')}: {problem}")
    parts = {"rank": ep, "node": num_nodes}

    def measure(routing_TE: RoutingMap) -> dict[str, float]:
        copies = {part: copies_per_token(routing_TE, num) for part, num in parts.items()}
        return {**copies, "load": busiest_load(routing_TE, ep)}

    # Step 2: each layer.
    layers, placement = {}, {}
    traced = read_trace(trace, model, pp)
    progress.phase("layers placed", len(traced))
    for layer, (training_TE, held_out_TE) in traced.items():
        order = place_experts(training_TE, num_nodes, ep, groups)
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
        ep=ep,
        num_nodes=num_nodes,
        copies_per_token=copies,
        layers=layers,
        placement=placement,
    )
    if out is not None and report.refused is None:
        write_whole(out, json.dumps(report.document()) + "\n")
    return report


def read_trace(folder: Path, model: Model, pp: int) -> dict[int, tuple[RoutingMap, RoutingMap]]:
    """Training and held-out tokens of each MoE layer; the last quarter of every rank is held out.

    Args:
        folder: value of Megatron's `--moe-routing-trace-path`.
        model: the traced model.
        pp: pipeline parallel size of the traced training, without virtual stages.

    Returns:
        Layer, counted from 0 -> [T, E] and [T, E], whether a token goes to an expert.

    Raises:
        UserError: one line that names the folder or the file, the value and the rule.
    """
    # Step 1: the files. Ranks are in the order of the stages, each of which has as many.
    prefix = "router_trace_rank"
    paths = {int(path.stem[len(prefix) :]): path for path in folder.glob(f"{prefix}*.jsonl")}
    if not paths:
        raise UserError(
            f"{folder}: must be a folder with {prefix}*.jsonl, which Megatron writes with "
            "--moe-routing-trace-path"
        )
    num_ranks, stages = max(paths) + 1, stages_of(model, pp)
    require(len(stages) == pp, "--pp", pp, f"leave each stage one of {model.num_layers} layers")
    if pp > 1 and (len(paths) < num_ranks or num_ranks % pp):
        files = f"{counted(len(paths), 'file')}, the last one of rank {num_ranks - 1}"
        raise UserError(f"{folder}: got {files}, must be those of all ranks of --pp {pp} stages")

    # Step 2: tokens of each layer, from all ranks of its stage.
    min_tokens = math.ceil(MIN_CHOICES * model.num_experts / model.moe_router_topk)
    tokens_per_file = math.ceil(max(MAX_TOKENS, min_tokens) * pp / len(paths))
    rows: dict[int, list[RoutingMap]] = defaultdict(list)
    for rank, path in sorted(paths.items()):
        stage = stages[rank * pp // num_ranks]
        expected = [n for n, has_experts in enumerate(model.moe_layers[stage]) if has_experts]
        by_layer = _read_file(path, model, tokens_per_file)
        if sorted(by_layer) != expected:
            raise UserError(
                f"{path}: got layers {sorted(by_layer)}, must be {expected}, those of "
                f"{model.name} with experts at --pp {pp}, which must be the traced training's"
            )
        for layer, routing_NE in by_layer.items():
            rows[stage.start + layer].append(routing_NE)

    # Step 3: split.
    num_tokens = min(sum(map(len, parts)) for parts in rows.values())
    if num_tokens < min_tokens:
        raise UserError(
            f"{folder}: got {num_tokens:,} tokens of a layer, must be at least {min_tokens:,} "
            f"for top-{model.moe_router_topk} of {model.num_experts} experts; trace more steps"
        )
    return {
        layer: (
            np.concatenate([part[: len(part) * 3 // 4] for part in parts]),
            np.concatenate([part[len(part) * 3 // 4 :] for part in parts]),
        )
        for layer, parts in sorted(rows.items())
    }


def _read_file(path: Path, model: Model, num_tokens: int) -> dict[int, RoutingMap]:
    """Layer of the stage -> its first `num_tokens` tokens, [N, E]; the rest is not read."""
    rows: dict[int, list[RoutingMap]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            # A training that was killed may leave part of a line.
            if not line.endswith("\n"):
                break
            try:
                record = json.loads(line)
                layer = record["layer"]
                # The others are layers of multi-token prediction.
                if record["block"] != "decoder":
                    continue
                # Layers take turns: where one has enough tokens, so do the others.
                if sum(map(len, rows[layer])) >= num_tokens:
                    break
                experts_NK = np.array(record["top_indices"], dtype=np.int64)
                # A record without a token has the list [].
                experts_NK = experts_NK.reshape(record["num_tokens"], model.moe_router_topk)
                routing_NE = np.zeros((len(experts_NK), model.num_experts), dtype=np.bool_)
                np.put_along_axis(routing_NE, experts_NK, True, axis=1)
            except (LookupError, TypeError, ValueError) as error:
                raise UserError(
                    f"{path}: line {number}: must be a record of Megatron's router trace, "
                    f"top-{model.moe_router_topk} of {model.num_experts} experts as in {model.name}"
                ) from error
            rows[layer].append(routing_NE)
    return {layer: np.concatenate(parts)[:num_tokens] for layer, parts in rows.items()}
