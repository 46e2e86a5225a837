"""`monta launch` for real, and how it and `monta compare` end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Monta, needs_training
from interrupts import interrupt, started, wait_for
from run_files import QUICKSTART, TWO_RANKS, edited
from run_python import run_python

from monta_megatron.tools.plan.request import PlanRequest
from monta_megatron.tools.training_log import read_log

LIMIT_S = 280

pytestmark = [pytest.mark.timeout(LIMIT_S + 20), needs_training]


def test_a_training_and_what_it_leaves(tmp_path: Path) -> None:
    words = ("launch", edited(tmp_path, *TWO_RANKS), "--json", "--", "--train-iters", "4")
    result = run_python("-m", "monta_megatron", *words, cwd=tmp_path, limit_s=LIMIT_S)
    assert result.returncode == 0, result.stderr[-6000:]
    document = json.loads(result.stdout)
    assert document["exit_status"] == 0 and document["arguments_checked"]
    assert document["plan"]["chain"] == "alltoall_allgather"
    directory = tmp_path / "runs" / "quickstart_launch"
    path = directory / "logs" / "run.log"
    assert result.stderr.splitlines()[-1] == f"monta launch: log: {path}"
    assert str(directory / "cluster.yaml") in document["arguments"]
    assert document["directory"] == str(directory)
    record = [json.loads(line) for line in (directory / "record.jsonl").read_text().splitlines()]
    assert [entry["iteration"] for entry in record if "loss" in entry] == [1, 2, 3, 4]
    assert record[-1]["dispatcher"] == ["MontaTokenDispatcher"]
    assert record[-1]["bytes"]["inter"] > 0
    log = read_log(path)
    assert list(log.times_ms) == [1, 2, 3, 4] and log.losses[1] > log.losses[4]
    assert log.chain == "alltoall_allgather in 4 chunks"
    request = log.request(PlanRequest(model="", cluster=""), str(path))
    assert (request.world_size, request.ep) == (2, 2)
    assert log.arguments["moe-token-dispatcher-type"] == "monta"
    versions = json.loads((directory / "versions.json").read_text())
    assert versions["versions"]["megatron-core"]


def test_what_megatron_refuses_starts_nothing_unless_forced(
    tmp_path: Path, monta: Monta, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("--", "--max-position-embeddings", "64")
    line = monta.refusal("launch", QUICKSTART, "--dry-run", *short)
    assert line.startswith("monta launch: Megatron refuses this, if ranks are as here: ")
    assert line.endswith("; --force goes on where the ranks are not as here")
    status, script, said = monta("launch", QUICKSTART, "--dry-run", "--force", *short)
    assert status == 0 and "--max-position-embeddings 64" in script
    assert "note: Megatron refuses this" in said
    unknown = ("--", "--no-such-argument", "1")
    assert "no-such-argument" in monta.refusal("compare", QUICKSTART, *unknown)
    assert list(tmp_path.iterdir()) == []
    in_a_container = edited(tmp_path, ("slurm", {"container": {"image": "a.sif"}}))
    _, _, said = monta("launch", in_a_container, "--dry-run", "--force", *unknown)
    assert "if ranks are as here: --no-such-argument: no argument of Megatron" in said


# One rank fails, the other would go on.
FAILING = """
import os, signal, sys
if "monta" in sys.argv and os.environ["RANK"] == "1":
    raise ValueError("no data on this rank")
signal.pause()
"""
WHY = "with exit status 1: ValueError: no data on this rank"


@pytest.mark.parametrize(
    ("command", "status", "printed", "last"),
    [
        ("launch", 1, "torchrun: rank 1 ended first, with exit status 1", f"failed, {WHY}"),
        ("compare", 2, "", f"monta-1 failed, {WHY}; log: {{}}-compare/monta-1/logs/run.log"),
    ],
)
def test_the_last_line_says_why_a_run_failed(
    command: str, status: int, printed: str, last: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    file = edited(tmp_path, *TWO_RANKS, ("script", "train.py"), ("script_arguments", {}))
    result = run_python("-m", "monta_megatron", command, file, cwd=tmp_path, limit_s=LIMIT_S)
    last = last.format(tmp_path / "runs" / "quickstart_launch")
    assert result.stderr.splitlines()[-1] == f"monta {command}: {last}"
    assert result.returncode == status
    # The rank's own traceback, and one line of torchrun's.
    lines = [line for line in result.stdout.splitlines() if "OMP_NUM_THREADS" not in line]
    assert len(lines) < 10 and "".join(lines[-1:]) == printed, result.stdout


SLEEPING = """
import os, pathlib, signal
pathlib.Path(f"rank{os.environ['RANK']}").touch()
signal.pause()
"""


@pytest.mark.parametrize(
    ("words", "last"),
    [
        ("launch run.yaml", "monta launch: interrupted; every rank has ended"),
        ("compare run.yaml --pairs 1", "monta compare: interrupted"),
    ],
)
def test_an_interrupt_ends_every_rank(words: str, last: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEPING)
    edited(tmp_path, *TWO_RANKS, ("script", "train.py"), ("script_arguments", {}))
    ranks, stderr = [tmp_path / "rank0", tmp_path / "rank1"], tmp_path / "stderr"
    with started(["-m", "monta_megatron", *words.split()], tmp_path) as (process, mark):
        wait_for(process, lambda: all(rank.exists() for rank in ranks), stderr)
        assert interrupt(process, os.kill, mark) == 130
    assert stderr.read_text().splitlines()[-1] == last


RUN_AND_LOG = """
import sys
from pathlib import Path
from monta_megatron.tools.launch.start import run_and_log
sys.exit(run_and_log(["bash", "-c", sys.argv[1]], Path("run.log"), sys.stdout.buffer))
"""


@pytest.mark.parametrize(("script", "status"), [("echo said; exit 3", 3), ("kill -9 $$", 137)])
def test_the_exit_status_is_passed_on(script: str, status: int, tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", RUN_AND_LOG, script], cwd=tmp_path)
    assert run.returncode == status
    assert (tmp_path / "run.log").read_text() == "said\n" * ("said" in script)
