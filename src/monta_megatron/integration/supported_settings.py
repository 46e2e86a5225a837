"""Supported Megatron-Core versions, and Megatron settings that change a dispatcher's work.

Every such setting is listed, with the test that shows that it works, with the reason why there is
nothing to do, or with the reason why it is an error when the configuration is made, so that none is
dropped unnoticed.
"""

import os
import re
from functools import partial
from typing import Any

from monta_megatron.common.rules import Unsupported

# The first release that is supported, and the first one after it that is not.
SUPPORTED = ((0, 16), (0, 21))
OVERRIDE_VARIABLE = "MONTA_ALLOW_ANY_MEGATRON"


def check_megatron_version() -> None:
    """Refuse a Megatron-Core outside the supported range.

    Raises:
        ImportError: Megatron-Core is not installed.
        ValueError: its version is outside the range and MONTA_ALLOW_ANY_MEGATRON is not 1.
    """
    from megatron.core.package_info import __version__ as version

    if os.environ.get(OVERRIDE_VARIABLE, "0") == "1" or is_supported(version):
        return
    from monta_megatron.common import __version__ as our_version

    (first, end) = (".".join(map(str, bound)) for bound in SUPPORTED)
    raise ValueError(
        f"megatron-core: version {version} found, monta-megatron {our_version} supports "
        f">= {first} and < {end}; install one of those, or set {OVERRIDE_VARIABLE}=1 to go on"
    )


def is_supported(version: str) -> bool:
    """Whether a version such as "0.19.2" or "0.20.0rc0" lies in the supported range."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return False
    return SUPPORTED[0] <= (int(numbers[1]), int(numbers[2])) < SUPPORTED[1]


_TESTS = "tests/dist/test_supported_settings.py::"

# Setting -> the test that shows that it works.
RUNS = {
    "moe_shared_expert_overlap": _TESTS + "test_shared_experts_overlap",
    "moe_shared_expert_intermediate_size": _TESTS + "test_shared_experts",
    "moe_expert_capacity_factor": _TESTS + "test_capacity_factor",
    "moe_pad_expert_input_to_capacity": _TESTS + "test_pad_to_capacity",
    "moe_router_padding_for_quantization": _TESTS + "test_router_padding",
    "moe_permute_fusion": "tests/dist/test_transformer_engine.py::test_te_spec_equals_stock",
    "moe_latent_size": _TESTS + "test_latent_size",
    "recompute_granularity='full'": "tests/megatron/test_training.py::test_training_settings",
    "recompute_modules=['moe']": _TESTS + "test_selective_recompute",
    "variable_seq_lengths": _TESTS + "test_token_count_changes_every_step",
    "cuda_graph_modules with moe_preprocess": _TESTS + "test_cuda_graph_attributes_replay",
    "overlap_moe_expert_parallel_comm": _TESTS + "test_overlap_schedule",
    "delay_wgrad_compute": _TESTS + "test_overlap_schedule",
    # With Transformer Engine's grouped tensors the router pads to 256 rows, in bf16 too.
    "moe_use_grouped_tensor": _TESTS + "test_router_padding",
    # Packed sequences (THD) reach a dispatcher as another number of tokens, [T, 1, H].
    "packed_seq_params": _TESTS + "test_token_count_changes_every_step",
    "batch_invariant_mode": _TESTS + "test_batch_invariant_sums",
}

# Setting -> why it does not reach a dispatcher. Nothing can run it on CPU ranks: it needs
# Transformer Engine or CUDA.
OUT_OF_REACH = {
    "gtp_weight_remat_size": "gathers weights of other modules; ranks with shards of one weight "
    "are in exchanges of their own",
    "expert_gtp_weight_remat_size": "gathers the experts' weights once for each call of them, "
    "which every rank makes once for a micro-batch, whatever its chain and chunks",
    "gtp_remat_opt_in_modules": "gathers weights of the latent projections, before and behind "
    "the six phases",
    "use_megatron_fsdp": "gathers and frees weights, of which a dispatcher has none, around calls "
    "of modules; the 1F1B overlap schedule makes these calls in the order that it has with stock",
}


def _graphs_whole_exchange(config: Any) -> bool:
    implementation = getattr(config, "cuda_graph_impl", "none")
    if implementation == "none":
        return False
    # 0.16 calls the field cuda_graph_scope; members are enums or strings, depending on release.
    modules = getattr(config, "cuda_graph_modules", None) or getattr(
        config, "cuda_graph_scope", None
    )
    names = {getattr(module, "name", str(module)) for module in modules or []}
    # 0.16 lists the whole iteration as one of the modules.
    whole = implementation == "full_iteration" or bool(names & {"full_iteration", "moe"})
    return whole or not names


def _is_quantized(name: str, config: Any) -> bool:
    return getattr(config, name, "bf16") != "bf16"


UNSUPPORTED = (
    Unsupported(
        "cuda_graph_impl",
        _graphs_whole_exchange,
        "it would capture the exchange of a whole MoE layer, which has not been tested on a GPU; "
        "name the modules to capture in cuda_graph_modules and leave 'moe' out",
    ),
    *(
        Unsupported(
            name,
            partial(_is_quantized, name),
            f"it quantizes what the NCCL EP backend of the flex dispatcher sends; {instead}",
        )
        for name, instead in (
            ("moe_dispatch_fwd_dtype", "moe_monta_wire_dtype sends tokens in eight bits here"),
            ("moe_combine_bwd_dtype", "gradients travel in their own dtype here"),
        )
    ),
    Unsupported(
        "overlap_dispatch_backward_with_experts_wgrad",
        lambda config: getattr(config, "overlap_dispatch_backward_with_experts_wgrad", False),
        "needs Transformer Engine's delayed weight gradients, untested with this dispatcher",
    ),
)


def check_supported(config: Any) -> None:
    """Check that a configuration asks for nothing that this dispatcher does not support.

    Raises:
        ValueError: names the setting and the reason.
    """
    _check(config, UNSUPPORTED, "moe_token_dispatcher_type='monta'")
    if getattr(config, "moe_monta_overlap_experts", False):
        from monta_megatron.integration.experts import UNSUPPORTED_WITH_OVERLAP

        _check(config, UNSUPPORTED_WITH_OVERLAP, "moe_monta_overlap_experts")


def _check(config: Any, settings: tuple[Unsupported, ...], asked_for: str) -> None:
    for unsupported in settings:
        if unsupported.is_set(config):
            raise ValueError(
                f"{unsupported.setting}: not supported with {asked_for}: {unsupported.reason}"
            )
