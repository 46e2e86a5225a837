"""Ctrl-C on what starts ranks: no process stays, no file is half written, one line says it.

A terminal sends SIGINT to the whole process group. `monta calibrate`, `emulate` and `launch` have
such tests beside their own; commands of one process are in mistakes/interrupts.txt.
"""

import os
import shutil
from pathlib import Path

import pytest
from free_ports import free_ports
from interrupts import interrupt, lines_of, started, wait_for

REPOSITORY = Path(__file__).parents[2]
BENCH = "-m monta_megatron bench --experts 4 --top-k 2 --hidden 64 --tokens 64 --repeats 100000"
# A launcher, such as torchrun or srun, whose status is that of its ranks.
TWO_RANKS = """\
import os, signal, subprocess, sys

signal.signal(signal.SIGINT, lambda *_: None)
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[1:]], env=os.environ | dict.fromkeys(
        ("RANK", "LOCAL_RANK"), rank))
    for rank in "01"
]
statuses = {rank.wait() for rank in ranks}
sys.exit(statuses.pop() if len(statuses) == 1 else f"statuses {statuses}")
"""


@pytest.mark.parametrize("moment", ["checks of", "repeats"])
def test_bench(tmp_path: Path, moment: str) -> None:
    stderr = tmp_path / "stderr"
    (port,) = free_ports(1)
    words = ["-c", TWO_RANKS, *BENCH.split()]
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    with started(words, tmp_path, MONTA_CPU_RANKS="1", MASTER_ADDR="127.0.0.1", **launch) as (
        process,
        mark,
    ):
        wait_for(process, lambda: moment in lines_of(stderr), stderr)
        assert interrupt(process, os.killpg, mark) == 130
    assert (tmp_path / "stdout").read_text() == ""
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}
    said = stderr.read_text()
    lines = [line for line in said.splitlines() if line.startswith("monta bench: ")]
    assert lines[-1] == "monta bench: interrupted"
    assert "Traceback" not in said and "RuntimeError" not in said


def test_quickstart(tmp_path: Path) -> None:
    # A copy, which keeps its results in a folder of its own.
    folder = tmp_path / "scripts" / "quickstart"
    shutil.copytree(REPOSITORY / "scripts" / "quickstart", folder)
    results = tmp_path / "runs" / "quickstart"
    with started([str(folder / "main.py")], tmp_path) as (process, mark):
        log = results / "monta-1.log"
        wait_for(process, lambda: log.exists() and log.stat().st_size > 0, tmp_path / "stderr")
        assert interrupt(process, os.killpg, mark) == 130
    assert (tmp_path / "stderr").read_text() == "quickstart: interrupted\n"
    assert not (results / "summary.json").exists()
