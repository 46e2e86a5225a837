"""Names of `--routing`, or the folder of a trace. A command's help loads no numpy."""

import argparse
from pathlib import Path

from monta_megatron.common.text import one_of

# The workloads of token imbalance of Megatron-LM's pull request 7488, by the names they have there.
IMBALANCE_WORKLOADS = {
    "W0": "W0_balanced",
    "W1": "W1_hot_expert_set",
    "W2": "W2_hot_rank",
    "W3": "W3_spread_hot_experts",
    "W4": "W4_source_ragged",
    "W5": "W5_zero_expert_rank",
    "W6": "W6_rotating_hotspot",
    "W7": "W7_burst",
}
# Those of `named_routing`, then those of `imbalance_routing`.
ROUTINGS = ("uniform", "skewed", "node-limited", *IMBALANCE_WORKLOADS)
ROUTING_HELP = (
    "uniform, skewed, node-limited, W0 to W7 of Megatron-LM's pull request 7488, or a folder of "
    "Megatron's --moe-routing-trace-path"
)


def routing_or_folder(text: str) -> str:
    """An argparse type: one of `ROUTINGS`, or an existing folder."""
    name = next((name for name, long in IMBALANCE_WORKLOADS.items() if long == text), text)
    if name not in ROUTINGS and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(
            f"got {text!r}, must be a folder of Megatron's --moe-routing-trace-path, or "
            f"{one_of(text, ROUTINGS)}"
        )
    return name
