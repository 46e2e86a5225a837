"""What `monta emulate` refuses: one line that says why, exit status 2, nothing started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monta_megatron import cli
from monta_megatron.emulation import emulator

GOOD = ["--nodes", "2", "--ranks-per-node", "2", "--inter-mbit", "500"]
CMD = ["--", __file__]
BENCH = ["bench", "--experts", "8", "--top-k", "2", "--hidden", "32", "--tokens", "16"]


def changed(name: str, value: str) -> list[str]:
    words = [*GOOD, *CMD]
    words[words.index(name) + 1] = value
    return words


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (changed("--nodes", "1"), ["--nodes", "got '1'", ">= 2"]),
        (changed("--ranks-per-node", "0"), ["--ranks-per-node", "got '0'", ">= 1"]),
        (changed("--nodes", "201"), ["--nodes", "got 201 of 2", "of 400 ranks"]),
        (changed("--inter-mbit", "0"), ["--inter-mbit", "got '0'", "> 0"]),
        (changed("--inter-mbit", "nan"), ["--inter-mbit", "got 'nan'", "> 0"]),
        ([*GOOD, "--", "-m"], ["CMD", "'-m'", "finds"]),
        ([*GOOD, "--", "absent.py"], ["CMD", "'absent.py'", "exists"]),
        ([*GOOD, "--", "-m", "absent.module"], ["CMD", "-m absent.module", "finds"]),
        ([*GOOD, "-m", "monta_megatron", "bench"], ["-m monta_megatron", "CMD go after --"]),
        ([*GOOD, "--", "monta", "bnech"], ["'bnech'", "choose from"]),
        ([*GOOD, "--", "monta", *BENCH, "--ep", "3"], ["--ep", "got 3", "divides the 4 ranks"]),
        ([*GOOD, "--", "bench", "--experts", "8"], ["CMD", "'bench --experts'", "monta COMMAND"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["emulate", *words])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    assert status == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("monta")
    for word in expected:
        assert word in line


@pytest.mark.parametrize(
    "words",
    [
        ["monta", *BENCH],
        ["-m", "monta_megatron", *BENCH],
        ["-m", "json.tool", "--help"],
        ["-m", "beside_me"],
        [__file__, "anything"],
    ],
)
def test_commands_that_are_started(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    monkeypatch.setattr(emulator, "run", lambda command: started.append(command) or 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside_me.py").touch()
    assert cli.main(["emulate", *GOOD, "--", *words]) == 0
    expected = ["-m", "monta_megatron", *words[1:]] if words[0] == "monta" else words
    assert started[0][-len(expected) :] == expected


@pytest.mark.parametrize("absent", ["ip", "tc", "unshare", "mount"])
def test_a_missing_command_is_named_with_its_package(
    absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        emulator.shutil, "which", lambda name, path: None if name == absent else f"/bin/{name}"
    )
    assert cli.main(["emulate", *GOOD, *CMD]) == 2
    (line,) = capsys.readouterr().err.splitlines()
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
