"""`scripts/gpu_check.sh` counts only what has run; interpreters stand for a GPU machine."""

import os
import stat
import subprocess
from pathlib import Path

import golden
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
# Answers the script's two questions; BODY is what every part does.
STUB = """#!/usr/bin/env bash
if [ "$1" = -c ]; then
    case $2 in *device_count*) echo 1 ;; *nccl*) echo NCCL ;; esac
    exit 0
fi
BODY
"""
PROVES = "echo proven: something; [ $2 != record ] || touch $3"
# What every part does on one GPU, the version of NCCL, and arguments.
MACHINES = {
    # Its NCCL has one rank on a GPU.
    "nothing_runs": ("exit 0", "2.28.9", ()),
    "all_is_proven": (PROVES, "2.30.3", ()),
    "one_part_fails": (f'[ "$2" != bits ] || exit 1; {PROVES}', "2.30.3", ()),
    "over_the_limit": (PROVES, "2.30.3", ("--limit", "1")),
}


def checked(folder: Path, body: str, nccl: str, arguments: tuple[str, ...]) -> tuple[int, str]:
    """Exit status, and the report or the mistake."""
    stub, report = folder / "python", folder / "report.txt"
    stub.write_text(STUB.replace("NCCL", nccl).replace("BODY", body))
    stub.chmod(stub.stat().st_mode | stat.S_IEXEC)
    result = subprocess.run(
        [SCRIPT, *arguments, report],
        env={**os.environ, "MONTA_PYTHON": str(stub)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return result.returncode, report.read_text() if report.exists() else result.stderr


@pytest.mark.parametrize("name", MACHINES)
def test_what_did_not_run_is_not_proven(name: str, tmp_path: Path) -> None:
    status, text = checked(tmp_path, *MACHINES[name])
    _, _, summary = text.partition("# Summary")[2].partition("\n\n")
    path = Path(__file__).parent / "golden" / f"gpu_check_{name}.txt"
    golden.check(path, f"{summary}-> exit status {status}\n")


@pytest.mark.parametrize("arguments", [("--limit", "soon"), ("--fast",)])
def test_a_mistake_is_one_line(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    status, text = checked(tmp_path, PROVES, "2.28.9", arguments)
    assert status == 2 and arguments[0] in text and len(text.splitlines()) == 1
