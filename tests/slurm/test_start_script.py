"""start.sh in a plain shell, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_ports

from monta_megatron.tools.launch.start import START

RANKS = str(Path(__file__).with_name("slurm_ranks.py"))
LIMIT_S = 60

# Outside of any Slurm job.
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "MASTER_", "NODE_"))},
    "PYTHON": sys.executable,
    "OMP_NUM_THREADS": "1",
}


def start(arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["bash", str(START), *arguments.split()],
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_shells_of_two_nodes() -> None:
    """The same command on each, here on one machine."""
    (port,) = free_ports(1)
    variables = {"NNODES": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    command = f"--ranks-per-node 2 -- {RANKS} place"
    nodes = [start(command, NODE_RANK=str(rank), **variables) for rank in range(2)]
    outputs = [node.communicate(timeout=LIMIT_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    places = sorted(json.loads(line) for output, _ in outputs for line in output.splitlines())
    # Rank, world size, local rank, local world size.
    assert places == [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]]


def test_on_one_node_the_status_is_of_the_rank_that_failed() -> None:
    failing = start(f"--ranks-per-node 2 -- {RANKS} fail")
    _, errors = failing.communicate(timeout=LIMIT_S)
    assert failing.returncode == 3
    assert errors.splitlines()[-1] == "torchrun: rank 1 ended first, with exit status 3"
    assert "Traceback" not in errors and "closing signal" not in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-- train.py", "--ranks-per-node: got '', must be an integer >= 1"),
        ("--ranks-per-node", "--ranks-per-node: got '', must be an integer >= 1"),
        ("--ranks-per-node 0 -- train.py", "--ranks-per-node: got '0', must be an integer >= 1"),
        ("--ranks-per-node 2 --nodes two -- train.py", "--nodes: got 'two', must be an integer"),
        ("--ranks-per-node 2 --", "no script after --"),
        ("--ranks-per-node 2 train.py", "got 'train.py', must be"),
        ("--ranks-per-node 2 --nodes 2 -- train.py", "NODE_RANK, MASTER_ADDR: not set, must be"),
    ],
)
def test_bad_arguments_are_one_line(arguments: str, message: str) -> None:
    refused = start(arguments)
    _, errors = refused.communicate(timeout=LIMIT_S)
    assert refused.returncode == 2
    assert len(errors.splitlines()) == 1
    assert message in errors
