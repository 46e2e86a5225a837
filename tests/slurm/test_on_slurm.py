"""run.sh on a Slurm of two nodes with GPUs: a job of sbatch or salloc, and containers."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_cluster import DEFAULT_MEMORY_MB, GPUS_PER_NODE, JOB_LIMIT_S, MEMORY_MB, Cluster

from monta_megatron.tools.launch import start
from monta_megatron.tools.launch.prepare import Run, prepare
from monta_megatron.tools.launch.start import start_command

pytestmark = pytest.mark.timeout(JOB_LIMIT_S)

# As the runs of configs/runs ask for them.
ALL_OF_A_NODE = {"gpus-per-node": GPUS_PER_NODE, "exclusive": True, "mem": 0}
# One line in one piece, as ranks share the pipe.
RANK = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LEVEL", "OF_SETUP", "SLURM_GPUS_ON_NODE")
place = [os.environ.get(name) for name in names]
os.write(1, f"{json.dumps([*place, sys.argv[1:]])}\\n".encode())
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
words=()
while [[ $1 != *.sif ]]; do
    words+=("$1")
    shift
done
# The nodes write at the same time: each its whole line at once.
echo "${words[@]} $1" >>"$RECORD"
exec "${@:2}"
""",
}


def written(folder: Path, **slurm: Any) -> Run:
    """A written run of two nodes with two ranks each."""
    (folder / "rank.py").write_text(RANK)
    data = {
        "name": "on_slurm",
        "script": "rank.py",
        "layout": {"nodes": 2, "ranks_per_node": GPUS_PER_NODE, "ep": 4},
        "slurm": {"options": {"time": 30, "comment": "two words"}, **slurm},
        "setup": ["load() { export OF_SETUP=$1; }", "load 'a module'"],
        "environment": {"LEVEL": "a b", "PYTHON": sys.executable},
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


def completed(slurm: Cluster, run: Run, **environment: str) -> tuple[dict[str, str], str]:
    """The fields of a run's job, and its log."""
    job = slurm.call(*start_command("sbatch", run), **environment).strip()
    log = run.directory / "logs" / f"{job}.log"
    return slurm.complete(job, log), log.read_text()


def check_ranks(said: str, run: Run, gpus: str | None = None) -> None:
    """Every rank has its place, the environment, its GPUs, and the arguments word by word."""
    words = [word for words in run.words for word in words]
    assert "([1]*2)" in words
    assert sorted(json.loads(line) for line in said.splitlines() if line.startswith('["')) == [
        [str(rank), "4", "a b", "a module", gpus, words] for rank in range(4)
    ]


@pytest.mark.parametrize(
    "asks",
    [ALL_OF_A_NODE, {"gres": f"gpu:{GPUS_PER_NODE}", "exclusive": True, "mem": 0}, {}],
    ids=["gpus-per-node", "gres", "no GPUs"],
)
def test_sbatch(slurm: Cluster, tmp_path: Path, asks: dict[str, Any]) -> None:
    """Also where jobs are given nothing of the environment that they are submitted from."""
    run = written(tmp_path, options=asks | {"time": 30})
    fields, log = completed(slurm, run, **({} if asks else {"SBATCH_EXPORT": "NONE"}))
    assert (fields["NumNodes"], fields["TimeLimit"]) == ("2", "00:30:00")
    assert (fields["JobName"], fields["Requeue"]) == ("on_slurm", "1")
    check_ranks(log, run, gpus=str(GPUS_PER_NODE) if asks else None)
    # Of both nodes.
    resources = fields.get("AllocTRES") or fields["TRES"]
    assert f"mem={2 * (MEMORY_MB if asks else DEFAULT_MEMORY_MB)}M" in resources


def test_salloc(slurm: Cluster, tmp_path: Path) -> None:
    run = written(tmp_path, options=ALL_OF_A_NODE | {"comment": "two words"})
    *options, _, _, _, _ = start.sbatch_options(run)
    log = slurm.call("salloc", *options, *start_command("srun", run))
    check_ranks(log, run, gpus=str(GPUS_PER_NODE))


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
    run = written(tmp_path, container={"image": image, "mounts": mounts, "workdir": "/code"})
    record = tmp_path / "record"
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    _, log = completed(slurm, run, PATH=path, RECORD=str(record))
    check_ranks(log, run)
    assert record.read_text() == asked.format(image=image, run=run.directory)
