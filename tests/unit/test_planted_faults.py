"""Faults of tests/faults.yaml can be planted: the code that each changes is there once."""

from pathlib import Path

from run_python import run_python

SCRIPT = Path(__file__).parents[2] / "scripts" / "planted_faults.py"


def test_each_has_its_place() -> None:
    result = run_python(SCRIPT, "--check")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "76 faults can be planted\n"
