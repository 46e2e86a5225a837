"""`monta compare` for real: trainings on CPU ranks, and one that fails."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

CONFIG = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
COMPARE = [sys.executable, "-m", "monta_megatron.cli", "compare", "--config", "run.yaml"]
LIMIT_S = 280

pytestmark = [
    pytest.mark.timeout(LIMIT_S + 20),
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None
        or importlib.util.find_spec("megatron.training") is None,
        reason="needs megatron.training: pip install 'megatron-core[training]>=0.19'",
    ),
]

FAILING = """
import sys
if "alltoall" in sys.argv:
    raise ValueError("no such dispatcher today")
"""


def compare(folder: Path, *words: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    """Compare a smaller quickstart: two ranks, EP 2, each on a node of its own."""
    data = yaml.safe_load(CONFIG.read_text())
    for name in ("model", "cluster", "script"):
        data[name] = str((CONFIG.parent / data[name]).resolve())
    data["layout"] = {"nodes": 1, "ranks_per_node": 2, "ep": 2}
    data["megatron"] |= {"moe-monta-ranks-per-node": 1, "sequence-parallel": False}
    (folder / "run.yaml").write_text(yaml.safe_dump({**data, **changes}))
    return subprocess.run(
        [*COMPARE, *words], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )


def test_both_dispatchers_and_what_they_leave(tmp_path: Path) -> None:
    result = compare(tmp_path, "--iterations", "3", "--json")
    assert result.returncode == 0, result.stderr[-6000:]
    document = json.loads(result.stdout)
    rows = {row["dispatcher"]: row for row in document["rows"]}
    assert list(rows) == ["monta", "alltoall"]
    assert rows["monta"]["max_loss_difference"] == 0
    assert rows["monta"]["chain"] == "alltoall_allgather in 4 chunks"
    assert all(row["median_ms"] > 0 and row["peak_memory_bytes"] > 0 for row in rows.values())
    assert "CPU ranks" in document["left_out"]["flex"]
    directory = tmp_path / "runs" / "quickstart_launch-compare"
    saved = json.loads((directory / "compare.json").read_text())
    assert saved["rows"] == document["rows"] and document["exit_status"] == 0
    for training in document["trainings"]:
        # Ended early, on the schedule of the whole training, and without checkpoints.
        assert list(training["losses"]) == ["1", "2", "3"]
        script = Path(training["directory"], "run.sh").read_text()
        assert "--train-iters 10\n" in script and "--save " not in script
        assert not Path(training["directory"], "checkpoints").exists()


def test_the_training_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAILING)
    result = compare(tmp_path, script="fail.py", script_arguments={})
    assert (result.returncode, result.stdout) == (1, "")
    log = tmp_path / "runs" / "quickstart_launch-compare" / "alltoall-1" / "logs" / "run.log"
    assert result.stderr.splitlines()[-1] == (
        "monta compare: the run with alltoall failed, with exit status 1: "
        f"ValueError: no such dispatcher today; log: {log}"
    )
    assert log.is_file()
