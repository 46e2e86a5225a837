"""`scripts/gpu_check.sh` counts only what has run; interpreters stand for a GPU machine."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "gpu_check.sh"
# Answers the script's two questions; BODY is what every part does.
STUB = """#!/usr/bin/env bash
if [ "$1" = -c ]; then
    case $2 in *device_count*) echo 1 ;; *nccl*) echo NCCL ;; esac
    exit 0
fi
BODY
"""


def checked(
    folder: Path, body: str, nccl: str = "2.28.9", *arguments: str
) -> tuple[int, str, list[str]]:
    """Exit status, the report, and the lines of its summary."""
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
    text = report.read_text() if report.exists() else result.stderr
    return result.returncode, text, text.partition("# Summary")[2].splitlines()[2:]


def test_what_did_not_run_is_not_passed(tmp_path: Path) -> None:
    """An interpreter that does nothing, on one GPU whose NCCL has one rank on it."""
    status, _, summary = checked(tmp_path, "exit 0")
    assert status == 3
    assert summary[0] == "proven: 0"
    assert summary[1] == "failed: 0"
    text = "\n".join(summary)
    assert "not run, so not proven: 9" in text
    for name in ("replay: nothing was recorded", "host times: nothing was recorded"):
        assert name in text
    assert "NCCL: there is one GPU, and NCCL 2.28.9 has one rank on it" in text


PROVES = "echo proven: something; [ $2 != record ] || touch $3"


def test_a_newer_nccl_has_two_ranks_on_a_gpu(tmp_path: Path) -> None:
    status, text, summary = checked(tmp_path, PROVES, "2.30.3")
    assert status == 0, text
    assert "failed: 0" in summary and "not run, so not proven: 0" in summary
    assert "  NCCL, 2 ranks on one GPU: something" in summary
    assert "  replay, 1 launch queues: something" in summary
    # Of the parts with more than one process, what needs no NCCL comes first.
    processes = [line.partition(":")[0].strip() for line in summary if "processes" in line]
    assert processes == ["Gloo, 2 processes", "Gloo, 4 processes"]
    assert text.index("## Gloo, 4 processes") < text.index("## NCCL, 2 ranks on one GPU")


def test_one_failure_is_named_and_the_rest_runs(tmp_path: Path) -> None:
    body = f'[ "$2" != bits ] || {{ echo no kernel; exit 1; }}; {PROVES}'
    status, text, summary = checked(tmp_path, body, "2.30.3")
    assert status == 1 and "no kernel" in text
    assert summary[summary.index("failed: 1") + 1] == "  kernel bits: exit status 1"


def test_the_limit_leaves_a_report(tmp_path: Path) -> None:
    status, _, summary = checked(tmp_path, PROVES, "2.30.3", "--limit", "1")
    assert status == 3 and summary[0] == "proven: 0"
    assert "  kernel bits: the limit of 1 s is over" in summary


@pytest.mark.parametrize("arguments", [["--limit", "soon"], ["--fast"]])
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str]) -> None:
    status, text, _ = checked(tmp_path, PROVES, "2.28.9", *arguments)
    assert status == 2 and arguments[0] in text and len(text.splitlines()) == 1
