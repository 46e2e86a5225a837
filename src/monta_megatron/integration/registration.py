"""The way in: what is hooked into Megatron, and when.

`install` only leaves functions that run when Megatron's modules are imported (`import_hook`);
nothing of Megatron is imported here.

    (a) autoload     PyTorch's entry point calls `install` at `import torch`
    (b) register()   the user's code calls it
    (c) spec         `integration.layer.with_monta`, which patches nothing
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType

from monta_megatron.import_hook import after_import

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
    for module_name, patch in (
        ("megatron.core.transformer.transformer_config", _extend_transformer_config),
        ("megatron.core.transformer.moe.moe_layer", _patch_moe_layer),
        ("megatron.core.models.common.utils", _patch_should_free_input),
        ("megatron.core.models.gpt.fine_grained_callables", _patch_should_free_input),
        ("megatron.training.arguments", _patch_arguments),
    ):
        after_import(module_name, functools.partial(_apply, patch))


def register() -> None:
    """Check at once that the installed Megatron-Core is a supported one, then install."""
    from monta_megatron.integration.versions import check_megatron_version

    check_megatron_version()
    install(way_in="register")


def _apply(patch: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Run one patch; a Megatron that the patch does not fit must stay usable without us."""
    try:
        patch(module)
    except Exception as error:  # noqa: BLE001 - a Megatron of another shape fails in its own way
        print(
            f"monta: cannot hook into {module.__name__}, so moe_token_dispatcher_type='monta' is "
            f"not available: {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )


# Each body imports what it needs when it runs: the hook itself has to stay light.


def _extend_transformer_config(module: ModuleType) -> None:
    from monta_megatron.integration.config import extend_transformer_config

    extend_transformer_config(module)


def _patch_moe_layer(module: ModuleType) -> None:
    from monta_megatron.integration.layer import patch_moe_layer

    patch_moe_layer(module)


def _patch_should_free_input(module: ModuleType) -> None:
    from monta_megatron.integration.dispatcher_type import answer_should_free_input

    # 0.16 defines it in fine_grained_callables; later releases import it there from common.utils,
    # where it is wrapped already.
    function = module.__dict__.get("should_free_input")
    if function is not None and function.__module__ == module.__name__:
        module.should_free_input = answer_should_free_input(function)  # type: ignore[attr-defined]


def _patch_arguments(module: ModuleType) -> None:
    from monta_megatron.integration.arguments import patch_arguments

    patch_arguments(module)
