"""What all of Megatron that looks at `moe_token_dispatcher_type` gets to see.

Megatron has no registry of dispatchers: it compares a string, in many functions. A configuration
keeps the string "monta". This table says how each function that reads it is handled; a test finds
every comparison in the installed Megatron and fails on one that is not listed here.

    sees "alltoall"   the string is replaced for the time of the call: what holds for the stock
                      alltoall dispatcher holds for ours, which is a subclass of it
    sees "monta"      the comparison may see the real string; the reason says why that is right
    answered          the function is wrapped, and our answer replaces Megatron's
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from monta_megatron.integration.options import DISPATCHER_TYPE


class Comparison(NamedTuple):
    """A function of Megatron that compares the dispatcher type."""

    module: str
    function: str
    sees: Literal["alltoall", "monta", "answered"]
    reason: str


COMPARISONS = (
    Comparison(
        "megatron.core.transformer.transformer_config",
        "TransformerConfig.__post_init__",
        "alltoall",
        "its checks of shared-expert overlap, router padding, variable sequence lengths, 1F1B "
        "overlap, CUDA graphs and batch invariance hold for a subclass of the dispatcher",
    ),
    Comparison(
        "megatron.core.transformer.moe.moe_layer",
        "MoELayer.__init__",
        "alltoall",
        "the stock dispatcher that it builds is replaced by ours before anyone uses it",
    ),
    Comparison(
        "megatron.core.transformer.moe.moe_layer",
        "MoELayer._setup_inference_mode",
        "alltoall",
        "part of the constructor above (0.17)",
    ),
    Comparison(
        "megatron.core.models.common.utils",
        "should_free_input",
        "answered",
        "our token_dispatch leaves rows in expert order, so the experts' input is the dispatched "
        "tensor itself and has to outlive the forward pass",
    ),
    Comparison(
        "megatron.core.models.gpt.fine_grained_callables",
        "should_free_input",
        "answered",
        "where megatron-core 0.16 keeps the function above",
    ),
    Comparison(
        "megatron.core.models.gpt.fine_grained_callables",
        "build_transformer_layer_callables",
        "monta",
        "asks only whether it is the flex dispatcher",
    ),
    Comparison(
        "megatron.core.transformer.transformer_layer",
        "TransformerLayer.__init__.can_recompute_pre_mlp_layernorm_for_cudagraph",
        "monta",
        "refuses the recomputation under CUDA graphs and says so: safe, and it is a nested "
        "function that cannot be reached from outside",
    ),
    Comparison(
        "megatron.core.transformer.moe.moe_utils",
        "skip_routed_expert_padding",
        "monta",
        "asks only whether it is the flex dispatcher",
    ),
    Comparison(
        "megatron.core.transformer.moe.moe_utils",
        "_deepep_permute_pads_grouped_tensor_input",
        "monta",
        "asks only whether it is the flex dispatcher (after 0.19)",
    ),
    Comparison(
        "megatron.training.arguments",
        "validate_args",
        "monta",
        "asks only whether it is the flex dispatcher",
    ),
)


def is_monta(config: object) -> bool:
    """Whether a TransformerConfig, or parsed arguments, ask for this dispatcher."""
    return getattr(config, "moe_token_dispatcher_type", None) == DISPATCHER_TYPE


@contextmanager
def seen_as_alltoall(config: Any) -> Iterator[None]:
    """Inside this context, whoever reads `config` sees the stock dispatcher's name."""
    dispatcher_type = config.moe_token_dispatcher_type
    config.moe_token_dispatcher_type = "alltoall"
    try:
        yield
    finally:
        config.moe_token_dispatcher_type = dispatcher_type


def patch_should_free_input(module: Any) -> None:
    """Answer `should_free_input` where this module of Megatron defines it.

    0.16 defines it in fine_grained_callables; later releases import it there from common.utils,
    where it is wrapped already.
    """
    function = vars(module).get("should_free_input")
    if function is not None and function.__module__ == module.__name__:
        module.should_free_input = answer_should_free_input(function)


def answer_should_free_input(original: Callable[..., bool]) -> Callable[..., bool]:
    """Megatron's rule for the 1F1B schedule, with our answer for the experts' input.

    The inputs of dispatch and combine may be freed as stock's are: our autograd functions save none
    of them, and nothing else uses what is handed to dispatch. The experts' input may not. Stock's
    experts get a sorted copy of it, but ours the very tensor, which the grouped GEMM saves; in
    low precision too, for layers that stay in bf16 or whose input is offloaded.
    """

    @functools.wraps(original)
    def should_free_input(name: str, is_moe: bool, config: Any, *args: Any, **kwargs: Any) -> bool:
        if not is_monta(config):
            return original(name, is_moe, config, *args, **kwargs)
        with seen_as_alltoall(config):
            return name != "mlp" and original(name, is_moe, config, *args, **kwargs)

    return should_free_input
