"""Whether this machine can emulate a cluster."""

import os
from pathlib import Path

import pytest

from monta_megatron.emulation import emulator


def skip_without_namespaces() -> None:
    """Skip a test, or a module that calls this, and say what is missing."""
    try:
        emulator.unshare_command()
    except ValueError as error:
        pytest.skip(f"monta emulate: {error}", allow_module_level=True)
    if os.geteuid() != 0 and not Path("/run/netns").exists():
        reason = "/run/netns has to exist for who is not root"
        pytest.skip(f"monta emulate: {reason}", allow_module_level=True)
