"""Supported Megatron-Core versions, and Megatron settings that are refused, with the reason.

What runs is shown by tests/dist/test_supported_settings.py.
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
        "it would capture the exchange of a whole MoE layer, which has not been tested on a GPU; "
        "name the modules to capture in cuda_graph_modules and leave 'moe' out",
        _graphs_whole_exchange,
    ),
    *(
        Unsupported(
            name,
            "it quantizes what the NCCL EP backend of the flex dispatcher sends; rows and "
            "gradients have their own dtype here",
            partial(_is_quantized, name),
        )
        for name in ("moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype")
    ),
    Unsupported(
        "overlap_dispatch_backward_with_experts_wgrad",
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
