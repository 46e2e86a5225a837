"""Supported Megatron-Core versions, and the Megatron settings that are refused, with the reason.

`UNSUPPORTED` of `planner.training`, which plans read as well, is refused always, and
`UNSUPPORTED_WITH_OVERLAP` with moe_monta_overlap_experts: settings that Megatron takes with
alltoall, and with which results would be wrong, ranks would wait for ever, or nothing has been
tested. `check_supported` is asked about the parsed arguments, then about every configuration, and
at last by all ranks of an expert group together (`layer_setup`).
tests/dist/test_supported_settings.py and test_overlap_experts.py run the settings that work.
"""

import os
import re
from typing import Any

from monta_megatron.common import __version__
from monta_megatron.common.errors import UserError
from monta_megatron.integration.options import Options, etp_size_of
from monta_megatron.planner.training import UNSUPPORTED, Unsupported

# First supported release, and first unsupported one after it.
SUPPORTED = ((0, 16), (0, 21))
OVERRIDE_VARIABLE = "MONTA_ALLOW_ANY_MEGATRON"


def check_megatron_version() -> None:
    """Refuse a Megatron-Core outside the supported range.

    Raises:
        ImportError: Megatron-Core is not installed.
        UserError: its version is outside the range and MONTA_ALLOW_ANY_MEGATRON is not 1.
    """
    # Not at the top: `monta doctor` reads SUPPORTED where Megatron is missing.
    from megatron.core.package_info import __version__ as version

    if os.environ.get(OVERRIDE_VARIABLE, "0") == "1" or is_supported(version):
        return
    (first, end) = (".".join(map(str, bound)) for bound in SUPPORTED)
    raise UserError(
        f"megatron-core: version {version} found, monta-megatron {__version__} supports "
        f">= {first} and < {end}; install one of those, or set {OVERRIDE_VARIABLE}=1 to go on"
    )


def is_supported(version: str) -> bool:
    """Whether a version such as "0.19.2" or "0.20.0rc0" lies in the supported range."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return False
    return SUPPORTED[0] <= (int(numbers[1]), int(numbers[2])) < SUPPORTED[1]


# Settings that expect one call of the experts per micro-batch; with moe_monta_overlap_experts there
# is one per chunk.

FREES_WEIGHTS = (
    "it frees an expert's weights after each call, and there is one call for every chunk"
)

# Offloadable modules inside the experts.
_EXPERT_MODULES = {"expert_fc1", "moe_act", "fused_group_mlp"}

# With any of these set, Megatron tells modules which micro-batch is the first of an iteration.
_QUANTIZES = ("fp8", "fp4", "use_kitchen", "quant_recipe")


def _gathers_experts(config: Any) -> bool:
    # Users set the number of shards; Megatron derives the other field from it, after our checks.
    shards = getattr(config, "expert_tensor_parallel_num_weight_shards", None)
    return (getattr(config, "expert_gtp_weight_remat_size", None) or 1) > 1 or (
        shards is not None and shards > etp_size_of(config)
    )


UNSUPPORTED_WITH_OVERLAP = (
    Unsupported(
        "overlap_moe_expert_parallel_comm",
        "Megatron's schedule hides the exchange behind another micro-batch, and needs dispatch, "
        "experts and combine apart",
    ),
    Unsupported(
        "delay_wgrad_compute",
        "the weight gradients of one call of the experts are delayed, not those of every chunk",
    ),
    Unsupported(
        "fp8_recipe",
        "delayed scaling would take every chunk for a micro-batch; take another recipe",
        lambda config: bool(getattr(config, "fp8", None)) and config.fp8_recipe == "delayed",
    ),
    Unsupported(
        "gradient_accumulation_fusion with fp8 or fp4",
        "where weights are quantized once for all micro-batches, the weight gradients of a first "
        "chunk overwrite those of the others; give --no-gradient-accumulation-fusion",
        lambda config: (
            getattr(config, "gradient_accumulation_fusion", False)
            and any(getattr(config, name, None) for name in _QUANTIZES)
            and not getattr(config, "disable_parameter_transpose_cache", False)
        ),
    ),
    Unsupported(
        "moe_router_padding_for_quantization",
        "it aligns the rows of a micro-batch, not those of a chunk; leave it out, and the experts "
        "pad what they get",
        lambda config: any(
            getattr(config, f"moe_router_padding_for_{what}", False)
            for what in ("quantization", "fp8")
        ),
    ),
    Unsupported("use_megatron_fsdp", FREES_WEIGHTS),
    Unsupported(
        "expert_gtp_weight_remat_size",
        "ranks gather an expert's weights in each call together, but may have other numbers of "
        "chunks, and would wait for each other for ever",
        _gathers_experts,
    ),
    Unsupported("use_torch_fsdp2", FREES_WEIGHTS),
    Unsupported(
        "offload_modules",
        "offloading of the experts' activations expects one call of them in a micro-batch; leave "
        f"out {', '.join(sorted(_EXPERT_MODULES))}",
        lambda config: (
            getattr(config, "fine_grained_activation_offloading", False)
            and not _EXPERT_MODULES.isdisjoint(config.offload_modules or ())
        ),
    ),
    Unsupported(
        "cpu_offloading", "offloading of a whole layer's activations has not been tested with it"
    ),
    Unsupported("moe_paged_stash", "the stash expects one call of the experts in a micro-batch"),
    Unsupported(
        "log_moe_overload_factor",
        "Megatron counts the rows of a micro-batch where its experts are called once; the line "
        "'auto, ranks ...' says how far the busiest rank is above the mean",
    ),
)


def check_supported(config: Any) -> None:
    """Refuse a Megatron, or a configuration with a setting, that this dispatcher does not support.

    Raises:
        UserError: names the setting and the reason.
    """
    check_megatron_version()
    refused = [("moe_token_dispatcher_type='monta'", each) for each in UNSUPPORTED]
    if Options.of(config).overlap_experts:
        refused += [("moe_monta_overlap_experts", each) for each in UNSUPPORTED_WITH_OVERLAP]
    for option, each in refused:
        if each.holds(config):
            raise UserError(f"{each.setting}: not supported with {option}: {each.reason}")
