"""start.sh in a plain shell and in a requeued job, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import golden
import pytest
import rank_programs
from free_ports import free_ports
from tuning_results import ALLGATHER, ALLTOALL, logged_result

from monta_megatron.core import Choice
from monta_megatron.tools.launch.start import START

LIMIT_S = 60

# Outside of any Slurm job.
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_", "NODE_"))},
    "PYTHON": sys.executable,
    "OMP_NUM_THREADS": "1",
}
# Rank, world size, local rank, local world size.
PLACES = [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]]


def start(arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["bash", str(START), *arguments.replace("RANKS", rank_programs.__file__).split()],
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_shells_of_two_nodes() -> None:
    """The same command on each, here on one machine."""
    (port,) = free_ports(1)
    variables = {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = "--ranks-per-node 2 -- RANKS place"
    nodes = [start(command, NODE_RANK=str(rank), **variables) for rank in range(2)]
    outputs = [node.communicate(timeout=LIMIT_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    places = (json.loads(line) for output, _ in outputs for line in output.splitlines())
    assert sorted(places) == PLACES


def test_on_one_node_the_status_is_of_the_rank_that_failed() -> None:
    failing = start("--ranks-per-node 2 -- RANKS fail 1 3")
    _, errors = failing.communicate(timeout=LIMIT_S)
    assert failing.returncode == 3
    assert errors.splitlines()[-1] == "torchrun: rank 1 ended first, with exit status 3"
    assert "Traceback" not in errors and "closing signal" not in errors


def test_bad_arguments() -> None:
    def answer(arguments: str) -> str:
        refused = start(arguments)
        output, errors = refused.communicate(timeout=LIMIT_S)
        assert (refused.returncode, output) == (2, "")
        return errors.removesuffix("\n")

    golden.check_cases(Path(__file__).with_name("bad_arguments.txt"), answer)


# What the batch script of a job calls; srun prints the words of the training script.
STAND_INS = {
    "scontrol": """#!/bin/bash
case $2 in
    job) echo "   StdOut=$LOG" ;;
    hostnames) echo localhost ;;
esac
""",
    "srun": """#!/bin/bash
while [[ $1 != train.py ]]; do shift; done
echo "$@"
""",
}
# Windows of two pipeline stages: ranks, first step, winner.
FIRST = [((0, 1), 0, ALLGATHER), ((2, 3), 0, ALLGATHER)]


@pytest.mark.parametrize(
    ("windows", "pinned"),
    [
        ([*FIRST, ((0, 1), 1000, ALLTOALL), ((2, 3), 1001, ALLTOALL)], ALLTOALL.flags),
        ([*FIRST, ((0, 1), 1000, ALLTOALL), ((2, 3), 1001, ALLGATHER)], ""),
        ([*FIRST, ((0, 1), 1000, ALLTOALL)], ""),
        (FIRST, ""),
    ],
    ids=["one winner", "stages differ", "a stage has none", "no second window"],
)
def test_flags_of_a_requeued_job(
    tmp_path: Path, windows: list[tuple[tuple[int, int], int, Choice]], pinned: str
) -> None:
    """From the lines that a training logs."""
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "7.log"
    log.write_text("".join(f"{logged_result(*window)}\n" for window in windows))
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    path = f"{tmp_path}:{os.environ['PATH']}"
    command = "--ranks-per-node 2 -- train.py --lr 1"
    requeued = start(command, PATH=path, LOG=str(log), SLURM_RESTART_COUNT="1", **job)
    words, said = requeued.communicate(timeout=LIMIT_S)
    assert words == f"train.py --lr 1 {pinned}".rstrip() + "\n"
    told = f"pinned by the second tuning windows: {pinned}"
    if not pinned:
        told = f"no flags are pinned: no second tuning windows with one winner in {log}"
    assert said == f"start.sh: {told}\n"
