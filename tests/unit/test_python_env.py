"""scripts/python_env.sh: the Python that it finds, and what it shows while a command runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "python_env.sh"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def run(commands: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run shell commands in which the functions of the script are known."""
    shell = ["bash", "-c", f'set -euo pipefail; source "{SCRIPT}"; {commands}']
    return subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=60)


def test_a_python_behind_a_shim_is_found(tmp_path: Path) -> None:
    """pyenv's shims fail where another version is active, or none."""
    shims, programs = tmp_path / "pyenv" / "shims", tmp_path / "bin"
    real = tmp_path / "pyenv" / "versions" / f"{VERSION}.9" / "bin" / f"python{VERSION}"
    for folder in (shims, programs, real.parent):
        folder.mkdir(parents=True)
    for name in ("python", "python3", f"python{VERSION}"):
        (shims / name).write_text("#!/bin/sh\nexit 127\n")
        (shims / name).chmod(0o755)
    real.symlink_to(Path(sys.executable).resolve())
    for program in ("bash", "dirname"):
        (programs / program).symlink_to(str(shutil.which(program)))
    done = run(f"find_python {VERSION}", HOME=str(tmp_path), PATH=f"{shims}:{programs}")
    assert (done.returncode, done.stdout) == (0, f"{real}\n"), done.stderr


def test_what_runs_beside_is_shown_while_it_runs(tmp_path: Path) -> None:
    """It waits until its first line has been shown; its last one is repeated."""
    shown = tmp_path / "shown"
    waits = f"echo first; until grep -q first {shown}; do sleep 0.05; done; echo last; exit 3"
    commands = f"""
        begin_beside name bash -c '{waits}' 2>{shown}
        end_beside || echo "status $?"
    """
    done = run(commands, PATH=os.environ["PATH"])
    assert shown.read_text() == "[name] first\n[name] last\n"
    assert done.stdout == "first\nlast\nstatus 3\n"


def test_a_long_command_keeps_its_status_and_its_output() -> None:
    done = run("alive working bash -c 'echo out; exit 4' || echo $?", PATH=os.environ["PATH"])
    assert (done.stdout, done.stderr) == ("out\n4\n", "")
