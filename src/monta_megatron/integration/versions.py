"""The Megatron-Core versions that this package was tested with."""

import os
import re

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
    from monta_megatron.common.version import __version__ as our_version

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
