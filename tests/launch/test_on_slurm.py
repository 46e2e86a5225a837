"""run.sh on a Slurm of two nodes with GPUs: a job of sbatch or salloc, containers, a requeue."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_cluster import DEFAULT_MEMORY_MB, MEMORY_MB, Cluster, missing, running_cluster
from tuning_results import ALLGATHER, ALLTOALL, logged_result

from monta_megatron.tools.launch import start
from monta_megatron.tools.launch.prepare import Run, prepare
from monta_megatron.tools.launch.start import start_command

if reason := missing():
    pytest.skip(f"no Slurm: {reason}", allow_module_level=True)

JOB_LIMIT_S = 120
GPUS_PER_NODE = 2
# As the runs of configs/runs ask for them.
ALL_OF_A_NODE = {"gpus-per-node": GPUS_PER_NODE, "exclusive": True, "mem": 0}

# One line in one piece, as ranks share the pipe, and with a mark: torch logs lines in brackets too.
MARK = "rank says: "
# A job's first start prints the results of both windows, and waits for the signal before the limit.
RANK = f"""
import json, os, signal, sys
names = ("RANK", "WORLD_SIZE", "LEVEL", "OF_SETUP", "SLURM_GPUS_ON_NODE")
place = [os.environ.get(name) for name in names]
os.write(1, f"{MARK}{{json.dumps([*place, sys.argv[1:]])}}\\n".encode())
if "WINS" in os.environ and "SLURM_RESTART_COUNT" not in os.environ:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    said = os.environ["WINS"].replace("|", "\\n") if os.environ["RANK"] == "0" else ""
    os.write(1, (said + "\\nwaits\\n").encode())
    signal.pause()
"""
# Records the options that Pyxis or Apptainer would read, and runs the rest on the host.
STAND_INS = {
    "srun": """#!/bin/bash
rest=()
while (($# > 0)); do
    case $1 in
        --container-*) echo "$1 $2" >>"$RECORD"; shift 2 ;;
        *) rest+=("$1"); shift ;;
    esac
done
exec /usr/bin/srun "${rest[@]}"
""",
    "apptainer": """#!/bin/bash
while [[ $1 != *.sif ]]; do
    echo -n "$1 " >>"$RECORD"
    shift
done
echo "$1" >>"$RECORD"
exec "${@:2}"
""",
}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with running_cluster(GPUS_PER_NODE) as cluster:
        yield cluster


def written(folder: Path, environment: dict[str, str] | None = None, **slurm: Any) -> Run:
    """A written run of two nodes with two ranks each."""
    (folder / "rank.py").write_text(RANK)
    data = {
        "name": "on_slurm",
        "script": "rank.py",
        "layout": {"nodes": 2, "ranks_per_node": GPUS_PER_NODE, "ep": 4},
        "slurm": {"options": {"time": 30, "comment": "two words"}, **slurm},
        "setup": ["load() { export OF_SETUP=$1; }", "load 'a module'"],
        "environment": {"LEVEL": "a b", "PYTHON": sys.executable, **(environment or {})},
        "megatron": {
            "num-experts": 4,
            "moe-layer-freq": "([1]*2)",
            "save": "checkpoints",
            "load": "checkpoints",
            "exit-signal-handler": True,
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    run = prepare(str(path), [], folder / "run", dry_run=False)
    start.write(run)
    return run


def submitted(slurm: Cluster, run: Run, **environment: str) -> tuple[str, Path]:
    """Job of a run, and its log."""
    job = slurm.call(*start_command("sbatch", run), **environment).strip()
    return job, run.directory / "logs" / f"{job}.log"


def completed(slurm: Cluster, job: str, log: Path) -> dict[str, str]:
    fields = slurm.wait(job, JOB_LIMIT_S)
    assert (fields["JobState"], fields["ExitCode"]) == ("COMPLETED", "0:0"), log.read_text()
    return fields


def check_ranks(said: str, run: Run, gpus: str | None = None, pinned: str = "") -> None:
    """Every rank has its place, the environment, its GPUs, and the arguments word by word."""
    lines = [line.removeprefix(MARK) for line in said.splitlines() if line.startswith(MARK)]
    words = [word for words in run.words for word in words] + pinned.split()
    assert "([1]*2)" in words
    assert sorted(map(json.loads, lines[-4:])) == [
        [str(rank), "4", "a b", "a module", gpus, words] for rank in range(4)
    ]


@pytest.mark.timeout(JOB_LIMIT_S)
@pytest.mark.parametrize("asks", [True, False], ids=["with gpus", "without"])
def test_sbatch(slurm: Cluster, tmp_path: Path, asks: bool) -> None:
    """Also where jobs are given nothing of the environment that they are submitted from."""
    run = written(tmp_path, options=(ALL_OF_A_NODE if asks else {}) | {"time": 30})
    job, log = submitted(slurm, run, **({} if asks else {"SBATCH_EXPORT": "NONE"}))
    fields = completed(slurm, job, log)
    assert (fields["NumNodes"], fields["TimeLimit"]) == ("2", "00:30:00")
    assert (fields["JobName"], fields["Requeue"]) == ("on_slurm", "1")
    check_ranks(log.read_text(), run, gpus=str(GPUS_PER_NODE) if asks else None)
    # Of both nodes.
    resources = fields.get("AllocTRES") or fields["TRES"]
    assert f"mem={2 * (MEMORY_MB if asks else DEFAULT_MEMORY_MB)}M" in resources


@pytest.mark.timeout(JOB_LIMIT_S)
def test_salloc(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = written(tmp_path, options=ALL_OF_A_NODE | {"comment": "two words"})
    check_ranks(slurm.call(*start_command("srun", run)), run, gpus=str(GPUS_PER_NODE))
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert start_command("srun", run) == ["bash", str(run.directory / "run.sh")]


@pytest.mark.timeout(JOB_LIMIT_S)
@pytest.mark.parametrize(
    ("image", "asked"),
    [
        (
            "nvcr.io#nvidia/pytorch:26.06-py3",
            "--container-image {image}\n--container-mounts {run}:{run},/data:/data:ro,/code:/code\n"
            "--container-workdir /code\n",
        ),
        (
            "/images/a b.sif",
            # On each of the nodes.
            "exec --nv --bind {run}:{run},/data:/data:ro,/code:/code --pwd /code {image}\n" * 2,
        ),
    ],
    ids=["pyxis", "apptainer"],
)
def test_containers(slurm: Cluster, tmp_path: Path, image: str, asked: str) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    mounts = ["/data:/data:ro", "/code:/code"]
    container = {"image": image, "mounts": mounts, "workdir": "/code"}
    run = written(tmp_path, container=container)
    record = tmp_path / "record"
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job, log = submitted(slurm, run, PATH=path, RECORD=str(record))
    completed(slurm, job, log)
    check_ranks(log.read_text(), run)
    assert record.read_text() == asked.format(image=image, run=run.directory)


@pytest.mark.timeout(3 * JOB_LIMIT_S)
def test_a_requeued_job_keeps_what_was_pinned(slurm: Cluster, tmp_path: Path) -> None:
    """Other logs of windows are in tests/slurm/test_start_script.py."""
    stages = (0, 1), (2, 3)
    first_windows = [logged_result(ranks, 0, ALLGATHER) for ranks in stages]
    second_windows = [logged_result(ranks, 1000, ALLTOALL) for ranks in stages]
    run = written(tmp_path, {"WINS": "|".join(first_windows + second_windows)})
    job, log = submitted(slurm, run)
    deadline = time.monotonic() + JOB_LIMIT_S
    while not log.exists() or log.read_text().count("\nwaits\n") < 4:
        assert time.monotonic() < deadline, slurm.state(job)
        time.sleep(0.2)
    # What Slurm sends near the time limit.
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    assert completed(slurm, job, log)["Restarts"] == "1"
    check_ranks(log.read_text(), run, pinned=ALLTOALL.flags)
