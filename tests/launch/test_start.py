"""`monta launch` for real: a training on CPU ranks, a misspelt argument, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import needs_training
from interrupts import interrupt, started, wait_for

from monta_megatron.tools.launch.start import START
from monta_megatron.tools.plan.request import PlanRequest
from monta_megatron.tools.training_log import read_log

CONFIG = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
LAUNCH = [sys.executable, "-m", "monta_megatron", "launch"]
LIMIT_S = 280


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAUNCH, *words], cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )


@needs_training
@pytest.mark.timeout(LIMIT_S + 20)
def test_a_training_and_what_it_leaves(tmp_path: Path) -> None:
    result = launch(tmp_path, str(CONFIG), "--json", "--", "--train-iters", "4")
    assert result.returncode == 0, result.stderr[-6000:]
    document = json.loads(result.stdout)
    assert document["exit_status"] == 0 and document["arguments_checked"]
    assert document["plan"]["chain"] == "alltoall_allgather"
    directory = tmp_path / "runs" / "quickstart_launch"
    assert result.stderr.splitlines()[-1] == f"monta launch: log: {directory}/logs/run.log"
    assert str(directory / "cluster.yaml") in document["arguments"]
    assert document["directory"] == str(directory)
    record = [json.loads(line) for line in (directory / "record.jsonl").read_text().splitlines()]
    assert [entry["iteration"] for entry in record if "loss" in entry] == [1, 2, 3, 4]
    assert record[-1]["dispatcher"] == ["MontaTokenDispatcher"]
    assert record[-1]["bytes"]["inter"] > 0
    log = read_log(directory / "logs" / "run.log")
    assert list(log.times_ms) == [1, 2, 3, 4] and log.losses[1] > log.losses[4]
    assert log.chain == "alltoall_allgather in 4 chunks"
    request = log.request(PlanRequest(model="", cluster=""))
    assert (request.world_size, request.etp) == (4, 2)
    assert log.arguments["moe-token-dispatcher-type"] == "monta"
    versions = json.loads((directory / "versions.json").read_text())
    assert versions["versions"]["megatron-core"]


@needs_training
@pytest.mark.timeout(LIMIT_S + 20)
def test_what_megatron_refuses_starts_nothing_unless_forced(tmp_path: Path) -> None:
    words = [str(CONFIG), "--dry-run"]
    short = ["--", "--max-position-embeddings", "64"]
    result = launch(tmp_path, *words, *short)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("monta launch: Megatron refuses this, if ranks are as here: ")
    assert line.endswith("; --force goes on where the ranks are not as here")
    result = launch(tmp_path, *words, "--force", *short)
    assert result.returncode == 0 and "--max-position-embeddings 64" in result.stdout
    assert "note: Megatron refuses this" in result.stderr
    assert list(tmp_path.iterdir()) == []


# One rank of four fails, the others would go on.
FAILING = """
import os, time
if os.environ["RANK"] == "2":
    raise ValueError("no data on this rank")
time.sleep(100)
"""


@needs_training
@pytest.mark.timeout(LIMIT_S + 20)
def test_the_last_line_says_why_a_run_failed(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAILING)
    data = yaml.safe_load(CONFIG.read_text())
    for name in ("model", "cluster"):
        data[name] = str((CONFIG.parent / data[name]).resolve())
    data["script"] = "fail.py"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    result = launch(tmp_path, "run.yaml")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last == "monta launch: failed, with exit status 1: ValueError: no data on this rank"
    # The rank's own traceback, and one line of torchrun's.
    lines = [line for line in result.stdout.splitlines() if "OMP_NUM_THREADS" not in line]
    assert len(lines) < 10, result.stdout
    assert lines[-1] == "torchrun: rank 2 ended first, with exit status 1"


RUN_AND_LOG = """
import sys
from pathlib import Path
from monta_megatron.tools.launch.start import run_and_log
try:
    sys.exit(run_and_log(sys.argv[2:], Path(sys.argv[1]), sys.stdout.buffer))
except KeyboardInterrupt as interrupt:
    sys.exit(128 + interrupt.args[0])
"""
# In one piece as ranks share the pipe; does not end by itself.
RANK = "import os, time; os.write(1, b'runs\\n'); time.sleep(100)"


@pytest.mark.timeout(120)
def test_an_interrupt_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun with two ranks below `run_and_log`."""
    (tmp_path / "rank.py").write_text(RANK)
    for name in [name for name in os.environ if "SLURM" in name]:
        monkeypatch.delenv(name)
    command = ["bash", str(START), "--ranks-per-node", "2", "--nodes", "1", "--", "rank.py"]
    words = ["-c", RUN_AND_LOG, "run.log", *command]
    with started(words, tmp_path, PYTHON=sys.executable) as (process, mark):
        stdout = tmp_path / "stdout"
        wait_for(process, lambda: stdout.read_text().count("runs") == 2, tmp_path / "stderr")
        assert interrupt(process, os.kill, mark) == 128 + signal.SIGINT


def test_the_exit_status_is_passed_on(tmp_path: Path) -> None:
    run = [sys.executable, "-c", RUN_AND_LOG, str(tmp_path / "run.log"), "bash", "-c"]
    assert subprocess.run([*run, "echo said; exit 3"]).returncode == 3
    assert subprocess.run([*run, "kill -9 $$"]).returncode == 128 + signal.SIGKILL
    assert (tmp_path / "run.log").read_text() == "said\n"
