"""The way in: hooks into Megatron's modules, left until these are imported.

`install` only leaves functions that run when Megatron's modules are imported (`import_hook`);
nothing of Megatron is imported here.

    (a) autoload     PyTorch's entry point calls `install` at `import torch`
    (b) register()   the user's code calls it
    (c) spec         `integration.layer.with_monta`, which patches nothing
"""

import functools
import pkgutil
import sys
from types import ModuleType

from monta_megatron.common.import_hook import after_import

# A module of Megatron, and the function in this package that changes it: by name, so that this file
# stays light and the function is imported only when Megatron's module is.
PATCHES = (
    ("megatron.core.transformer.transformer_config", "arguments:extend_transformer_config"),
    ("megatron.core.transformer.moe.moe_layer", "layer:patch_moe_layer"),
    ("megatron.core.models.common.utils", "arguments:patch_should_free_input"),
    ("megatron.core.models.gpt.fine_grained_callables", "arguments:patch_should_free_input"),
    ("megatron.training.arguments", "arguments:patch_arguments"),
)

_ways_in: list[str] = []


def ways_in() -> tuple[str, ...]:
    """The ways in that are active in this process: "autoload", "register"."""
    return tuple(_ways_in)


def install(way_in: str) -> None:
    """Hook into Megatron's modules, now or once imported; a second call only notes its way in."""
    if way_in not in _ways_in:
        _ways_in.append(way_in)
    if len(_ways_in) > 1:
        return
    for module_name, patch in PATCHES:
        after_import(module_name, functools.partial(_apply, patch))


def register() -> None:
    """Check at once that the installed Megatron-Core is a supported one, then install."""
    # As in PATCHES: the autoload hook imports this file in every process that imports torch.
    from monta_megatron.integration.supported_settings import check_megatron_version

    check_megatron_version()
    install(way_in="register")


def _apply(patch: str, module: ModuleType) -> None:
    """Run one patch; a Megatron that the patch does not fit must stay usable without us."""
    try:
        pkgutil.resolve_name(f"monta_megatron.integration.{patch}")(module)
    except Exception as error:  # noqa: BLE001 - a Megatron of another shape fails in its own way
        print(
            f"monta: cannot hook into {module.__name__}, so moe_token_dispatcher_type='monta' is "
            f"not available: {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )
