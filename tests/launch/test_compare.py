"""`monta compare` with trainings on CPU ranks; how others end is in test_start.py."""

import json
import re
from pathlib import Path

import pytest
from commands import needs_training
from run_files import TWO_RANKS, edited
from run_python import run_python

LIMIT_S = 280

pytestmark = [pytest.mark.timeout(LIMIT_S + 20), needs_training]


def test_both_dispatchers_and_their_run_directories(tmp_path: Path) -> None:
    words = ("compare", edited(tmp_path, *TWO_RANKS), "--iterations", "3", "--pairs", "1", "--json")
    result = run_python("-m", "monta_megatron", *words, cwd=tmp_path, limit_s=LIMIT_S)
    assert result.returncode == 0, result.stderr[-6000:]
    document = json.loads(result.stdout)
    rows = {row["dispatcher"]: row for row in document["rows"]}
    assert list(rows) == ["monta", "alltoall"]
    assert rows["monta"]["max_loss_difference"] == 0
    assert rows["monta"]["chain"] == "alltoall_allgather in 4 chunks"
    assert all(row["iteration_ms"] > 0 and row["peak_memory_bytes"] > 0 for row in rows.values())
    assert [len(row["trainings_ms"]) for row in document["rows"]] == [1, 1]
    assert list(document["left_out"]) == ["flex"]
    directory = tmp_path / "runs" / "quickstart_launch-compare"
    assert json.loads((directory / "compare.json").read_text())["rows"] == document["rows"]
    assert document["tune_steps"] == 0
    for name in ("monta-1", "alltoall-1"):
        assert f"compare: {name} starts; log: {directory / name}/logs/run.log\n" in result.stderr
        assert re.search(rf"monta compare: {name}: [\d,.]+ ms an iteration", result.stderr)
        # Ended early, on the schedule of the whole training, and without checkpoints.
        script = (directory / name / "run.sh").read_text()
        assert "--train-iters 10\n" in script and "--exit-interval 3\n" in script
        assert "--save " not in script and not (directory / name / "checkpoints").exists()
