"""What `monta emulate` needs of a machine; bad input is in unit/bad_input."""

import os
import subprocess
import sys

import pytest
from commands import Monta

from monta_megatron.emulation import emulator

GOOD = ["--nodes", "2", "--ranks-per-node", "2", "--inter-mbit", "500"]
CMD = ["--", __file__]


@pytest.mark.parametrize("absent", ["ip", "tc", "unshare", "mount"])
def test_a_missing_command_is_named_with_its_package(
    absent: str, monkeypatch: pytest.MonkeyPatch, monta: Monta
) -> None:
    monkeypatch.setattr(
        emulator.shutil, "which", lambda name, path: None if name == absent else f"/bin/{name}"
    )
    line = monta.refusal("emulate", *GOOD, *CMD)
    package = "iproute2" if absent in ("ip", "tc") else "util-linux"
    assert line.startswith(f"monta emulate: `{absent}` not found: install {package} ")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give up a capability")
def test_root_that_may_not_make_namespaces_is_told_so() -> None:
    without = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    result = subprocess.run(
        [*without, sys.executable, "-m", "monta_megatron", "emulate", *GOOD, *CMD],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("monta emulate: private namespaces cannot be made (unshare: ")
    assert "--privileged" in line
