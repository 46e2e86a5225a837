"""scripts/quickstart.sh as it is started a second time: what it installs is there already."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from namespaces import skip_without_namespaces

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("MONTA_VENV", REPOSITORY / ".venv"))
LIMIT_S = 300


def quickstart(*words: str) -> tuple[dict[str, Any], str]:
    """summary.json and standard output."""
    if Path(sys.prefix).resolve() != ENVIRONMENT.resolve():
        pytest.skip(f"it would install into {ENVIRONMENT}; scripts/test.sh runs the tests there")
    command = [REPOSITORY / "scripts" / "quickstart.sh", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((REPOSITORY / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["loss_last_over_first"] < 1
    return summary, done.stdout


@pytest.mark.timeout(LIMIT_S)
def test_losses_of_monta_are_those_of_alltoall() -> None:
    summary, said = quickstart("--no-network", "--iterations", "8")
    assert summary["max_rel_loss_diff"] == 0
    assert summary["chain"] == "alltoall_allgather in 4 chunks"
    assert summary["iterations"] == 8
    assert summary["bytes"]["inter"] > 0 and summary["iteration"] is None
    assert "difference 0;" in said


@pytest.mark.timeout(LIMIT_S)
def test_over_a_network_fewer_bytes_and_the_same_losses() -> None:
    skip_without_namespaces()
    # Faster than the default, since only the bytes are asked for.
    summary, said = quickstart("--inter-mbit", "500")
    assert summary["max_rel_loss_diff"] <= 1e-6
    assert summary["chain"].startswith("hierarchical_")
    assert summary["iteration"]["monta"]["ratio"] > 0 and "times as fast" in said
    sent = summary["network_bytes"]
    # Of about 4 copies of a token one crosses; the gradients of all that is no expert do so too.
    assert 2.5 < sent["alltoall"] / sent["monta"] < 4.0
