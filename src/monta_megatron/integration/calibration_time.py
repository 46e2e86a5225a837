"""The option --moe-monta-calibrate-seconds: its default, and its rules."""

import math

import torch

from monta_megatron.common.rules import require
from monta_megatron.integration.options import DEFAULT_CALIBRATE_S

NAME = "moe_monta_calibrate_seconds"


def calibrate_seconds(source: object, needs_costs: bool) -> float:
    """The time for a training to measure its costs; 0 where it does not.

    Args:
        source: a TransformerConfig or parsed arguments.
        needs_costs: whether "auto" chooses, and no file gives it the costs.

    Raises:
        ValueError: it is no number >= 0, or given where no costs are needed.
    """
    seconds = getattr(source, NAME, None)
    if seconds is not None:
        is_time = type(seconds) in (int, float) and 0 <= seconds < math.inf
        require(is_time, NAME, repr(seconds), "be a number >= 0; 0 is off")
        rule = "be 0 or left out beside a cluster file, or where a flag or a plan names the chain"
        require(seconds == 0 or needs_costs, NAME, repr(seconds), rule)
        return float(seconds)
    # Deterministic mode is to do the same in every run, which times never do; the cores that CPU
    # ranks share are slower in one second than in the next.
    deterministic = getattr(source, "deterministic_mode", False)
    is_off = deterministic or not torch.accelerator.is_available()
    return 0.0 if is_off else DEFAULT_CALIBRATE_S
