"""Routing measured by Megatron's RouterTracer (`--moe-routing-trace-path FOLDER`).

It writes a file `router_trace_rank{r}.jsonl` per rank, one line per step and layer:

    {"step": 0, "layer": 3, "num_tokens": 128, "topk": 8, "top_indices": [[12, 45, ...], ...], ...}
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monta_megatron.planner.sampled_routing import SampledRouting

# Enough tokens for shares within half a percent; the rest of a long trace is not read.
MAX_TOKENS_PER_FILE = 32768


def traced_routing(folder: str | Path, num_experts: int) -> SampledRouting:
    """The routing in a trace, taken over all its ranks, steps and layers.

    Args:
        folder: the folder with the tracer's files.
        num_experts: E of the model.

    Raises:
        ValueError: one line that names the folder, or the file and its line, and the rule.
    """
    files = sorted(Path(folder).glob("router_trace_rank*.jsonl"))
    if not files:
        raise ValueError(
            f"{folder}: no router_trace_rank*.jsonl in it, must be a folder that Megatron wrote "
            "with --moe-routing-trace-path"
        )
    maps = [found for path in files for found in _maps(path, num_experts)]
    if not maps:
        raise ValueError(f"{folder}: no tokens in it, must have at least one")
    return SampledRouting(name=f"trace {folder}", routing_map=np.concatenate(maps))


def _maps(path: Path, num_experts: int) -> Iterator[NDArray[np.bool_]]:
    """The routing map [N, E] of each line."""
    num_tokens = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if num_tokens >= MAX_TOKENS_PER_FILE:
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
            if indices.ndim != 2 or indices.min() < 0 or indices.max() >= num_experts:
                raise ValueError(
                    f"{path}: line {number}: top_indices: must be a list of experts from 0 to "
                    f"{num_experts - 1} for every token"
                )
            routing_map = np.zeros((len(indices), num_experts), dtype=np.bool_)
            np.put_along_axis(routing_map, indices, True, axis=1)
            num_tokens += len(indices)
            yield routing_map


def _one_line(error: Any) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:80]
