"""Pipelined, topology-aware expert-parallel token dispatch for Megatron-Core.

Importing this package imports neither torch nor Megatron; `docs/reference.md` shows its functions.
"""

from monta_megatron.common import __version__

# For type checkers. `typing` takes longer than all else before `monta` can answer Ctrl-C.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from monta_megatron.api import forget_groups, plan, register, statistics, with_monta

__all__ = [
    "__version__",
    "forget_groups",
    "plan",
    "register",
    "statistics",
    "with_monta",
]


def __getattr__(name: str) -> "Any":
    """The functions of `api`, which a training does not need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from monta_megatron import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
