"""Megatron's dispatcher `flex`: what its backends need, as far as that shows before a training."""

import importlib.util
from collections.abc import Mapping
from typing import Any

from monta_megatron.tools.launch.arguments import Arguments

FLEX = "flex"
BACKEND = "moe-flex-dispatcher-backend"
CAPACITY = "moe-expert-rank-capacity-factor"
# Backend -> module and name in it that Megatron imports for it.
NEEDED = {
    "deepep": ("deep_ep", "Buffer"),
    "hybridep": ("deep_ep", "HybridEPBuffer"),
    "ncclep": ("transformer_engine.pytorch", "ep"),
}


def why_no_flex(arguments: Arguments, environment: Mapping[str, Any]) -> str | None:
    """What `flex` lacks here; None if nothing is known to.

    Args:
        arguments: Megatron's, which name the backend.
        environment: of the ranks.
    """
    if str(environment.get("MONTA_CPU_RANKS", "")) == "1":
        return "the ranks are CPU ranks, and its backends are for GPUs"
    backend = _backend(arguments)
    if backend not in NEEDED:
        # Megatron's parser names those that it knows.
        return None
    module, name = NEEDED[backend]
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed, which its backend {backend} needs (--{BACKEND})"
    if backend == "ncclep" and not _has_value(arguments, CAPACITY):
        return f"--{CAPACITY} is not given, which its backend {backend} needs"
    # Not before: its import takes seconds.
    import torch

    if not torch.cuda.is_available():
        return "no GPU here"
    try:
        # As `from module import name`: the name may be a module, too.
        getattr(__import__(module, fromlist=[name]), name)
    except (ImportError, AttributeError, OSError) as error:
        return f"its backend {backend} needs {name} of {module}, which cannot be imported: {error}"
    return None


def _backend(arguments: Arguments) -> str:
    if _has_value(arguments, BACKEND) and not _has_value(arguments, "moe-enable-deepep"):
        return str(arguments[BACKEND].value)
    # Megatron's default.
    return "deepep"


def _has_value(arguments: Arguments, name: str) -> bool:
    return name in arguments and arguments[name].value is not False
