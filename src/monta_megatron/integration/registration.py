"""The way in: hooks into Megatron's modules, left until these are imported.

`install` only leaves functions that run when Megatron's modules are imported (`import_hook`);
nothing of Megatron is imported here.

    (a) autoload     PyTorch's entry point calls `install` at `import torch`
    (b) register()   the user's code calls it
    (c) spec         `integration.layer.with_monta`, which needs none of the hooks of (a) and (b)

Everything of Megatron and torch that a training changes (CPU ranks change more, see `emulation`):

    when             what                                                         by
    (a) or (b)       fields, __init__ and __post_init__ of TransformerConfig      arguments
                     should_free_input, of the 1F1B schedule                      arguments
                     validate_args                                                arguments
                     MoELayer.__init__                                            layer
    an MoE layer     its token_dispatcher; moe_token_dispatcher_type of its
                     configuration while Megatron constructs it                   layer
                     our groups in parallel_state._global_process_group_list      layer_setup
    rail, node group three names of torch's distributed_c10d, while it is made    torch_private
    `auto`           MegatronOptimizer: __init_subclass__, step of each class     optimizer_steps
                     OptimizerCudaGraphWrapper.__call__                           optimizer_steps
                     a hook before the steps of all PyTorch optimizers            optimizer_steps
    overlap_experts  routed_experts_compute of the layer's class                  experts
                     disable_parameter_transpose_cache of the experts' modules,
                     and grad_added_to_main_grad of their weights in backward     experts
"""

import functools
import pkgutil
import sys
from types import ModuleType

from monta_megatron.common.import_hook import after_import
from monta_megatron.exchange import launch_order

# For (a) and (b): a module of Megatron, and the function in this package that changes it. A name
# keeps this file light: the function is imported only when Megatron's module is.
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
    # A later look may be behind the first process group.
    launch_order.observe()
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
