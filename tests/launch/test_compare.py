"""`monta compare` with trainings on CPU ranks, and one that fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import needs_training
from interrupts import interrupt, started, wait_for

CONFIG = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
COMPARE = [sys.executable, "-m", "monta_megatron", "compare", "run.yaml"]
LIMIT_S = 280

pytestmark = [pytest.mark.timeout(LIMIT_S + 20), needs_training]

FAILING = """
import sys
if "monta" in sys.argv:
    raise ValueError("no such dispatcher today")
"""


def write_run_file(folder: Path, **changes: Any) -> None:
    """A smaller quickstart: two ranks, EP 2, each on a node of its own."""
    data = yaml.safe_load(CONFIG.read_text())
    for name in ("model", "cluster", "script"):
        data[name] = str((CONFIG.parent / data[name]).resolve())
    data["layout"] = {"nodes": 1, "ranks_per_node": 2, "ep": 2}
    data["megatron"] |= {"moe-monta-ranks-per-node": 1, "sequence-parallel": False}
    (folder / "run.yaml").write_text(yaml.safe_dump({**data, **changes}))


def compare(folder: Path, *words: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    write_run_file(folder, **changes)
    return subprocess.run(
        [*COMPARE, *words], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )


SLEEPING = """
import os, pathlib, time
pathlib.Path(f"rank{os.environ['RANK']}").touch()
time.sleep(600)
"""


def test_both_dispatchers_and_their_run_directories(tmp_path: Path) -> None:
    result = compare(tmp_path, "--iterations", "3", "--pairs", "1", "--json")
    assert result.returncode == 0, result.stderr[-6000:]
    document = json.loads(result.stdout)
    rows = {row["dispatcher"]: row for row in document["rows"]}
    assert list(rows) == ["monta", "alltoall"]
    assert rows["monta"]["max_loss_difference"] == 0
    assert rows["monta"]["chain"] == "alltoall_allgather in 4 chunks"
    assert all(row["iteration_ms"] > 0 and row["peak_memory_bytes"] > 0 for row in rows.values())
    assert list(document["left_out"]) == ["flex"]
    assert document["has_trials"] is False
    # A line for every iteration while it runs.
    for name in ("monta-1", "alltoall-1"):
        for n in (1, 2, 3):
            assert f"monta compare: {name}: iteration {n}: " in result.stderr
    assert " ms, loss 5." in result.stderr
    directory = tmp_path / "runs" / "quickstart_launch-compare"
    saved = json.loads((directory / "compare.json").read_text())
    assert saved["rows"] == document["rows"]
    assert [len(row["trainings_ms"]) for row in document["rows"]] == [1, 1]
    for name in ("monta-1", "alltoall-1"):
        # Ended early, on the schedule of the whole training, and without checkpoints.
        script = (directory / name / "run.sh").read_text()
        assert "--train-iters 10\n" in script and "--exit-interval 3\n" in script
        assert "--save " not in script and not (directory / name / "checkpoints").exists()


def test_the_training_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAILING)
    result = compare(tmp_path, script="fail.py", script_arguments={})
    assert (result.returncode, result.stdout) == (2, "")
    log = tmp_path / "runs" / "quickstart_launch-compare" / "monta-1" / "logs" / "run.log"
    assert result.stderr.splitlines()[-1] == (
        "monta compare: monta-1 failed, with exit status 1: "
        f"ValueError: no such dispatcher today; log: {log}"
    )


def test_a_refused_run_is_one_line(tmp_path: Path) -> None:
    result = compare(tmp_path, "--", "--no-such-argument", "1")
    assert (result.returncode, result.stdout) == (2, "")
    assert "no-such-argument" in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("monta compare: ")
    assert not (tmp_path / "runs").exists()


def test_an_interrupt_ends_every_rank(tmp_path: Path) -> None:
    (tmp_path / "sleep.py").write_text(SLEEPING)
    write_run_file(tmp_path, script="sleep.py", script_arguments={})
    ranks, stderr = [tmp_path / "rank0", tmp_path / "rank1"], tmp_path / "stderr"
    with started([*COMPARE[1:], "--pairs", "1"], tmp_path) as (process, mark):
        wait_for(process, lambda: all(rank.exists() for rank in ranks), stderr)
        assert interrupt(process, os.kill, mark) == 130
    assert stderr.read_text().splitlines()[-1] == "monta compare: interrupted"
