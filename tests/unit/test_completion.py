"""`monta completion`: bash completes commands, flags and files with what it prints."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monta_megatron import cli
from monta_megatron.common import extras

if importlib.util.find_spec("shtab") is None:
    pytest.skip(f"needs {extras.install('completion')}", allow_module_level=True)

# What bash does at a tab, with the words so far as arguments.
TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_monta
echo "${COMPREPLY[*]}"
"""


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert cli.main(["completion", "bash"]) == 0
    path = tmp_path / "completion.bash"
    path.write_text(capsys.readouterr().out)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["monta", "cal"], "calibrate"),
        (["monta", "plan", "--mod"], "--model"),
        (["monta", "plan", "--phase", "forward_"], "forward_backward"),
        (["monta", "completion", "z"], "zsh"),
        (["monta", "plan", "--model", "mix"], "mixtral.yaml"),
    ],
)
def test_bash_completes(script: Path, words: list[str], expected: str) -> None:
    (script.parent / "mixtral.yaml").touch()
    result = subprocess.run(
        ["bash", "-c", TAB, "bash", str(script), *words],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.stdout.split() == [expected], result.stderr


def test_zsh_is_a_completion_function(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("#compdef monta")
    if shutil.which("zsh"):
        path = tmp_path / "_monta"
        path.write_text(text)
        subprocess.run(["zsh", "-n", str(path)], check=True, timeout=30)


def test_without_the_library_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == ("monta completion: shtab: not installed, must be; pip install shtab\n")


def test_a_reader_that_stops_is_no_error() -> None:
    command = f"{sys.executable} -m monta_megatron.cli completion bash | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.stdout.startswith("# AUTO") and result.stderr == ""
