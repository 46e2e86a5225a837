"""Logs as Megatron-LM's loop prints them, made from sizes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Arguments as they are printed: those of the model, and of its training.
_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
QWEN3_30B: dict[str, Any] = _DATA["qwen3_30b"]
TRAINING: dict[str, Any] = _DATA["training"]


def arguments_block(arguments: Mapping[str, Any]) -> list[str]:
    """The block that Megatron prints when a training starts."""
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in arguments.items()]
    return [
        "------------------------ arguments ------------------------",
        *sorted(lines, key=str.lower),
        "-------------------- end of arguments ---------------------",
    ]


def iteration_lines(times_ms: Sequence[float], first: int = 1) -> list[str]:
    """The loop's line of each iteration."""
    last = first + len(times_ms) - 1
    return [
        f" [2026-01-01 00:00:{number % 60:02}.000000] iteration {number:8}/{last:8} | consumed "
        f"samples: {256 * number:12} | elapsed time per iteration (ms): {ms:.1f} | throughput per "
        "GPU (TFLOP/s/GPU): 123.4 | learning rate: 1.0E-04 | global batch size:   256 | lm loss: "
        "9.1E+00 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        for number, ms in enumerate(times_ms, first)
    ]


def training_log(arguments: Mapping[str, Any], iteration_ms: float, gpu: str = "H100") -> str:
    """The log of twelve iterations, the first of which takes three times as long."""
    times_ms = [3 * iteration_ms, *[iteration_ms * (1 + 0.001 * (n % 3 - 1)) for n in range(11)]]
    return "\n".join(
        [
            f"using NVIDIA {gpu} 80GB HBM3",
            *arguments_block({**TRAINING, **arguments}),
            "[Rank 0] (after 2 iterations) memory (MB) | allocated: 30000 | max allocated: 60000.0",
            *iteration_lines(times_ms),
            "",
        ]
    )
