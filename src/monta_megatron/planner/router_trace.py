"""Routing measured by Megatron's RouterTracer (`--moe-routing-trace-path FOLDER`).

It writes a file `router_trace_rank{r}.jsonl` per rank, one line per step and layer:

    {"step": 0, "layer": 3, "num_tokens": 128, "topk": 8, "top_indices": [[12, 45, ...], ...], ...}
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.common.quantities import counted
from monta_megatron.planner.model import Model
from monta_megatron.planner.sampled_routing import SampledRouting

# Enough tokens for shares within half a percent; the rest of a long trace is not read.
MAX_TOKENS_PER_FILE = 32768
# How often an expert has to be chosen, on average: its share is then known within about 10%.
LEAST_CHOICES = 100


def traced_routing(folder: str | Path, model: Model) -> SampledRouting:
    """The routing in a trace, taken over all its ranks, steps and layers.

    Args:
        folder: the folder with the tracer's files.
        model: the model that was traced.

    Raises:
        ValueError: one line that names the folder, or the file and its line, and the rule.
    """
    files = sorted(Path(folder).glob("router_trace_rank*.jsonl"))
    if not files:
        raise ValueError(
            f"{folder}: no router_trace_rank*.jsonl in it, must be a folder that Megatron wrote "
            "with --moe-routing-trace-path"
        )
    maps = [routing_map for path in files for routing_map in _maps(path, model)]
    num_tokens, least = sum(map(len, maps)), least_tokens(model)
    if num_tokens < least:
        raise ValueError(
            f"{folder}: got {counted(num_tokens, 'token')}, must be at least {least:,} for top-"
            f"{model.moe_router_topk} of {model.num_experts} experts, as each has to be chosen "
            f"about {LEAST_CHOICES} times; trace more steps"
        )
    return SampledRouting(name=f"trace {folder}", routing_map=np.concatenate(maps))


def least_tokens(model: Model) -> int:
    """Tokens without which a trace says too little about the model's experts."""
    return math.ceil(LEAST_CHOICES * model.num_experts / model.moe_router_topk)


def _maps(path: Path, model: Model) -> Iterator[NDArray[np.bool_]]:
    """The routing map [N, E] of each line."""
    num_tokens, most_tokens = 0, max(MAX_TOKENS_PER_FILE, least_tokens(model))
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if num_tokens >= most_tokens:
                return
            try:
                record = json.loads(line)
                indices = np.array(record["top_indices"], dtype=np.int64)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise ValueError(
                    f"{path}: line {number}: is no record of the tracer ({_one_line(error)})"
                ) from error
            if indices.size == 0:
                continue
            incompatibility = _incompatibility(record, indices, model)
            if incompatibility is not None:
                raise ValueError(f"{path}: line {number}: {incompatibility}")
            routing_map = np.zeros((len(indices), model.num_experts), dtype=np.bool_)
            np.put_along_axis(routing_map, indices, True, axis=1)
            num_tokens += len(indices)
            yield routing_map


def _incompatibility(
    record: dict[str, Any], indices: NDArray[np.int64], model: Model
) -> str | None:
    """Why a record is not of this model, or None if it may be."""
    if indices.ndim != 2 or indices.min() < 0 or indices.max() >= model.num_experts:
        return (
            f"top_indices: must be a list of experts from 0 to {model.num_experts - 1} for every "
            "token"
        )
    # The tracer counts layers from 0 or from 1; the layers of MTP are no layers of the model.
    layer = record.get("layer") if record.get("block", "decoder") == "decoder" else None
    # The tracer's shape of the hidden states, where it keeps these too: [N, H].
    shape = record.get("hs_shape")
    hidden_size = shape[-1] if isinstance(shape, list) and shape else None
    fields = (
        ("topk", indices.shape[1], "moe_router_topk", model.moe_router_topk),
        ("hs_shape", hidden_size, "hidden_size", model.hidden_size),
    )
    for name, value, field, expected in fields:
        if value not in (None, expected):
            return (
                f"{name}: got {value}, must be {expected}, {field} of {model.name}; the trace is "
                "of another model"
            )
    if isinstance(layer, int) and layer > model.num_layers:
        return (
            f"layer: got {layer}, must be at most {model.num_layers}, num_layers of {model.name}; "
            "the trace is of another model"
        )
    return None


def _one_line(error: Any) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:80]
