"""scripts/quickstart.sh as it is started a second time: what it installs is there already."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("MONTA_VENV", REPOSITORY / ".venv"))
LIMIT_S = 300


@pytest.mark.timeout(LIMIT_S)
def test_losses_of_monta_are_those_of_alltoall() -> None:
    if Path(sys.prefix).resolve() != ENVIRONMENT.resolve():
        pytest.skip(f"it would install into {ENVIRONMENT}; scripts/test.sh runs the tests there")
    command = [REPOSITORY / "scripts" / "quickstart.sh"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((REPOSITORY / "runs" / "quickstart" / "summary.json").read_text())
    assert summary["max_rel_loss_diff"] == 0
    assert summary["loss_last"] < summary["loss_first"]
    assert (summary["chain"], summary["iterations"]) == ("alltoall_allgather", 40)
    assert {"num_chunks", "layout"} < summary.keys()
    assert summary["bytes"]["inter"] > 0
    assert "difference 0;" in done.stdout
