"""The tokens of each layer in a router trace, and those that judge what was learned from others."""

from collections import defaultdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from monta_megatron.planner.models.model import Model
from monta_megatron.planner.routing.recorded import RouterTrace, read_trace, router_of

Routings = NDArray[np.bool_]

# Of a layer, read from all ranks together: what experts have in common shows by then.
TOKENS_OF_LAYER = 32768
# The last ones of every rank: a placement is made from the others.
HELD_OUT_SHARE = 0.25


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
    router = router_of(model)
    # What is kept of a file is shared by the layers of its stage, what of a layer by its files.
    num_files = len(list(Path(folder).glob("router_trace_rank*.jsonl")))
    trace = read_trace(folder, router, TOKENS_OF_LAYER * model.num_layers // max(num_files, pp))
    layers = {}
    for layer, rows in traced_layers(trace, model, pp).items():
        num_tokens = sum(map(len, rows))
        if num_tokens < 2 * router.least_tokens:
            raise ValueError(
                f"{folder}: layer {layer}: got {num_tokens:,} tokens, must be at least "
                f"{2 * router.least_tokens:,} for top-{router.topk} of {router.num_experts} "
                "experts, some of which are held out; trace more steps"
            )
        most = -(-TOKENS_OF_LAYER // len(rows))
        parts = [np.split(part, [-_num_held_out(part)]) for part in (part[:most] for part in rows)]
        training, held_out = zip(*parts, strict=True)
        layers[layer] = np.concatenate(training), np.concatenate(held_out)
    return layers


def traced_layers(trace: RouterTrace, model: Model, pp: int) -> dict[int, list[Routings]]:
    """Layer of the decoder, counted from 0 -> the rows of every rank that has it, [T, E] each.

    The tracer names a layer by its position in its pipeline stage. Megatron's stages follow each
    other in the order of the ranks.

    Raises:
        ValueError: the layers are not those of the model.
    """
    if model.num_layers % pp:
        raise ValueError(f"--pp: got {pp}, must divide num_layers ({model.num_layers})")
    of_stage = model.num_layers // pp
    num_ranks = max(trace.rows) + 1
    layers: dict[int, list[Routings]] = defaultdict(list)
    for rank, by_layer in trace.rows.items():
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
                    f"{trace.folder}: rank {rank}: layer {number}, must be less than {of_stage}, "
                    f"num_layers of {model.name} in each of --pp {pp} stages"
                )
            layers[stage * of_stage + number - first].append(by_layer[key])
    if len(layers) != model.num_moe_layers:
        raise ValueError(
            f"{trace.folder}: got {len(layers)} layers with experts, must be the "
            f"{model.num_moe_layers} of {model.name} (num_moe_layers); where the traced training "
            "had pipeline stages, give them in --pp"
        )
    return dict(sorted(layers.items()))


def _num_held_out(rows: Routings) -> int:
    return max(round(len(rows) * HELD_OUT_SHARE), 1)
