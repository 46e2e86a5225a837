"""Router traces of Megatron: the experts of each token, layer by layer.

With `--moe-routing-trace-path FOLDER` each rank writes a file `router_trace_rank{r}.jsonl`, a line
per step, micro-batch and layer. A layer's number is its position in its pipeline stage:

    {"step": 0, "block": "decoder", "layer": 3, "num_tokens": 128, "topk": 8,
     "top_indices": [[12, 45, ...], ...], ...}

Notation: N = tokens of a layer in a file, T = in all files, E = experts, K = experts per token.
"""

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from monta_megatron.planner.model import Model
from monta_megatron.tools.place.placement import RoutingMap

# Tokens of a layer that are read, from all files together: collaboration shows by then.
MOST_TOKENS = 32768
# The last tokens of every rank, which a placement is judged on and not made from.
HELD_OUT_SHARE = 0.25
# Choices of an expert, on average: its share is then known within about 10%.
LEAST_CHOICES = 100


def read_trace(folder: Path, model: Model, pp: int) -> dict[int, tuple[RoutingMap, RoutingMap]]:
    """Training and held-out tokens of each layer with experts.

    Args:
        folder: value of Megatron's `--moe-routing-trace-path`.
        model: the traced model.
        pp: pipeline parallel size of the traced training, without virtual stages.

    Returns:
        Layer, counted from 0 -> [T, E] and [T, E], whether a token goes to an expert.

    Raises:
        ValueError: one line that names the folder or the file, the value and the rule.
    """
    # Step 1: the files, whose ranks are in the order of the stages.
    prefix = "router_trace_rank"
    paths = {int(path.stem[len(prefix) :]): path for path in folder.glob(f"{prefix}*.jsonl")}
    if not paths:
        raise ValueError(
            f"{folder}: must be a folder with {prefix}*.jsonl, which Megatron writes with "
            "--moe-routing-trace-path"
        )
    num_ranks = max(paths) + 1
    if model.num_layers % pp or num_ranks % pp:
        raise ValueError(
            f"--pp: got {pp}, must divide the {num_ranks} ranks of {folder} and the "
            f"{model.num_layers} layers of {model.name}"
        )

    # Step 2: tokens of each layer, from all ranks of its stage.
    layers_of_stage = model.num_layers // pp
    least_tokens = 2 * math.ceil(LEAST_CHOICES * model.num_experts / model.moe_router_topk)
    tokens_of_file = math.ceil(max(MOST_TOKENS, least_tokens) * pp / num_ranks)
    rows: dict[int, list[RoutingMap]] = defaultdict(list)
    for rank, path in sorted(paths.items()):
        first = rank * pp // num_ranks * layers_of_stage
        expected = [n for n in range(layers_of_stage) if model.moe_layers[first + n]]
        by_layer = _read_file(path, model, tokens_of_file)
        if sorted(by_layer) != expected:
            raise ValueError(
                f"{path}: got layers {sorted(by_layer)}, must be {expected}, those of "
                f"{model.name} with experts at --pp {pp}, which must be the traced training's"
            )
        for layer, routing_NE in by_layer.items():
            rows[first + layer].append(routing_NE)

    # Step 3: split.
    num_tokens = min(sum(map(len, parts)) for parts in rows.values())
    if num_tokens < least_tokens:
        raise ValueError(
            f"{folder}: got {num_tokens:,} tokens of a layer, must be at least {least_tokens:,} "
            f"for top-{model.moe_router_topk} of {model.num_experts} experts; trace more steps"
        )
    return {layer: _split(parts) for layer, parts in sorted(rows.items())}


def _split(parts: list[RoutingMap]) -> tuple[RoutingMap, RoutingMap]:
    """[N, E] of each rank -> training and held-out tokens of all."""
    starts = [len(part) - max(round(len(part) * HELD_OUT_SHARE), 1) for part in parts]
    training = [part[:start] for part, start in zip(parts, starts, strict=True)]
    held_out = [part[start:] for part, start in zip(parts, starts, strict=True)]
    return np.concatenate(training), np.concatenate(held_out)


def _read_file(path: Path, model: Model, num_tokens: int) -> dict[int, RoutingMap]:
    """Layer of the stage -> its first `num_tokens` tokens, [N, E]; the rest is not read."""
    rows: dict[int, list[RoutingMap]] = defaultdict(list)
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            # A training that was killed may leave part of a line.
            if not line.endswith("\n"):
                break
            layer, routing_NE = _read_line(line, model, f"{path}: line {number}")
            # Layers take turns: where one has enough tokens, so do the others.
            if layer is not None and sum(map(len, rows[layer])) >= num_tokens:
                break
            if layer is not None:
                rows[layer].append(routing_NE)
    return {layer: np.concatenate(parts)[:num_tokens] for layer, parts in rows.items()}


def _read_line(line: str, model: Model, where: str) -> tuple[int | None, RoutingMap]:
    """Layer and [N, E] of a record; None for a layer of multi-token prediction."""
    try:
        record = json.loads(line)
        layer = record["layer"] if record["block"] == "decoder" else None
        experts_NK = np.array(record["top_indices"], dtype=np.int64)
        # A record without a token has the list [].
        experts_NK = experts_NK.reshape(record["num_tokens"], model.moe_router_topk)
        routing_NE = np.zeros((len(experts_NK), model.num_experts), dtype=np.bool_)
        np.put_along_axis(routing_NE, experts_NK, True, axis=1)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: must be a record of Megatron's router trace, top-{model.moe_router_topk} of "
            f"{model.num_experts} experts as in {model.name}"
        ) from error
    return layer, routing_NE
