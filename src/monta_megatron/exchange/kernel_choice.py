"""Whether Triton kernels do the work of an exchange: the same bits, in fewer launches."""

import logging
from functools import cache

import torch.distributed as dist

from monta_megatron.common.rules import require
from monta_megatron.exchange.groups import gather_objects


@cache
def is_fused(choice: str, device: str) -> bool:
    """What `--moe-monta-kernels` means for rows on this type of device; raises ValueError."""
    if choice == "torch":
        return False
    problem = "" if device == "cuda" else f"rows are on {device}, not on a GPU"
    if device == "cuda":
        try:
            import triton  # noqa: F401
        except ImportError as error:
            problem = f"Triton cannot be imported: {error}"
            logging.getLogger(__name__).warning("PyTorch's operations run, as %s", problem)
    rule = f"be auto or torch where {problem}"
    require(not problem or choice == "auto", "moe_monta_kernels", choice, rule)
    return not problem


def are_all_fused(choice: str, device: str, group: dist.ProcessGroup) -> bool:
    """Whether they do on all ranks of a group, which all call this.

    What is timed has to be the same on all of them; a training refuses ranks that differ, by name.
    """
    try:
        fused = is_fused(choice, device)
    except ValueError:
        fused = False
    return all(gather_objects(fused, group))
