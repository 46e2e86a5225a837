"""Router traces: the files that Megatron's RouterTracer writes, as the routing of each layer.

With `--moe-routing-trace-path FOLDER` the tracer writes a file `router_trace_rank{r}.jsonl` per
rank, one line per step, micro-batch and layer:

    {"step": 0, "layer": 3, "num_tokens": 128, "topk": 8, "top_indices": [[12, 45, ...], ...], ...}

Notation: T = tokens of a layer, E = experts, N = tokens of a layer in a file.
"""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from monta_megatron.planner.models.model import Model
from monta_megatron.tools.place.placement import Routings

# Block, index of an MTP head, layer: as the tracer has them.
LayerName: TypeAlias = tuple[str, str, str]
# Layer -> its rows in the order of the steps, [N, E].
Layers: TypeAlias = dict[LayerName, Routings]

# Of a layer, read from all ranks together: what experts have in common shows by then.
TOKENS_OF_LAYER = 32768
# The last ones of every rank: a placement is made from the others.
HELD_OUT_SHARE = 0.25
# How often an expert has to be chosen, on average: its share is then known within about 10%.
LEAST_CHOICES = 100


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
    # Half of them would do for all tokens together; some are held out.
    least = 2 * math.ceil(LEAST_CHOICES * model.num_experts / model.moe_router_topk)
    trace = read_trace(folder, model, pp, max(TOKENS_OF_LAYER, least))
    layers = {}
    for layer, rows in traced_layers(folder, trace, model, pp).items():
        num_tokens = sum(map(len, rows))
        if num_tokens < least:
            raise ValueError(
                f"{folder}: layer {layer}: got {num_tokens:,} tokens, must be at least {least:,} "
                f"for top-{model.moe_router_topk} of {model.num_experts} experts, some of which "
                "are held out; trace more steps"
            )
        parts = [np.split(part, [-_num_held_out(part)]) for part in rows]
        training, held_out = zip(*parts, strict=True)
        layers[layer] = np.concatenate(training), np.concatenate(held_out)
    return layers


def _num_held_out(rows: Routings) -> int:
    return max(round(len(rows) * HELD_OUT_SHARE), 1)


def read_trace(folder: str, model: Model, pp: int, num_tokens: int) -> dict[int, Layers]:
    """Read a trace: rank -> layer -> its rows. The rest of a long file is not read.

    Args:
        folder: the folder with the tracer's files.
        model: that was traced.
        pp: pipeline stages of the traced training.
        num_tokens: tokens of a layer that are enough, from all files together.

    Raises:
        ValueError: one line that names the folder, or the file and its line, and the rule.
    """
    files = {
        int(digits): path
        for path in Path(folder).glob("router_trace_rank*.jsonl")
        if (digits := path.stem.removeprefix("router_trace_rank")).isdecimal()
    }
    if not files:
        raise ValueError(
            f"{folder}: no router_trace_rank*.jsonl in it, must be a folder that Megatron wrote "
            "with --moe-routing-trace-path"
        )
    # A layer's tokens are shared by the files of its stage.
    tokens_of_file = math.ceil(num_tokens / max(len(files) // pp, 1))
    trace = {}
    for rank, path in sorted(files.items()):
        try:
            trace[rank] = _rows(path, model, tokens_of_file)
        except OSError as error:
            raise ValueError(
                f"{path}: cannot be read: {error.strerror}; must be a file of the tracer"
            ) from error
    return trace


def traced_layers(
    folder: str, trace: Mapping[int, Layers], model: Model, pp: int
) -> dict[int, list[Routings]]:
    """Layer of the decoder, counted from 0 -> the rows of every rank that has it, [N, E] each.

    The tracer names a layer by its position in its pipeline stage. Megatron's stages follow each
    other in the order of the ranks.

    Raises:
        ValueError: the layers are not those of the model.
    """
    if model.num_layers % pp:
        raise ValueError(f"--pp: got {pp}, must divide num_layers ({model.num_layers})")
    of_stage = model.num_layers // pp
    num_ranks = max(trace) + 1
    layers: dict[int, list[Routings]] = defaultdict(list)
    for rank, by_layer in trace.items():
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
                    f"{folder}: rank {rank}: layer {number}, must be less than {of_stage}, "
                    f"num_layers of {model.name} in each of --pp {pp} stages"
                )
            layers[stage * of_stage + number - first].append(by_layer[key])
    if len(layers) != model.num_moe_layers:
        raise ValueError(
            f"{folder}: got {len(layers)} layers with experts, must be the "
            f"{model.num_moe_layers} of {model.name} (num_moe_layers); where the traced training "
            "had pipeline stages, give them in --pp"
        )
    return dict(sorted(layers.items()))


def _rows(path: Path, model: Model, num_tokens: int) -> Layers:
    """Layer -> its rows, in the order of the file."""
    by_layer: dict[LayerName, list[Routings]] = defaultdict(list)
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
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
            layer = (str(record.get("block")), str(record.get("mtp_idx")), str(record.get("layer")))
            # The layers of a file take turns: where one is full, so are the others.
            if sum(map(len, by_layer[layer])) >= num_tokens:
                break
            routing_map = np.zeros((len(indices), model.num_experts), dtype=np.bool_)
            np.put_along_axis(routing_map, indices, True, axis=1)
            by_layer[layer].append(routing_map)
    return {layer: np.concatenate(maps)[:num_tokens] for layer, maps in by_layer.items()}


def _incompatibility(
    record: dict[str, Any], indices: NDArray[np.int64], model: Model
) -> str | None:
    """Why a record is not of this model's router, or None if it may be."""
    if indices.ndim != 2 or indices.min() < 0 or indices.max() >= model.num_experts:
        return (
            f"top_indices: must be a list of experts from 0 to {model.num_experts - 1} for every "
            "token"
        )
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
    # The tracer counts layers from 0 or from 1; the layers of MTP are no layers of the model.
    layer = record.get("layer") if record.get("block", "decoder") == "decoder" else None
    if isinstance(layer, int) and layer > model.num_layers:
        return (
            f"layer: got {layer}, must be at most {model.num_layers}, num_layers of "
            f"{model.name}; the trace is of another model"
        )
    return None


def _one_line(error: Any) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:80]
