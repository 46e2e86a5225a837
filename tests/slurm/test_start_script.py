"""start.sh in a plain shell, what it refuses, and the flags that a requeued job gets."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import golden
import pytest
import rank_programs
from free_ports import free_ports

from monta_megatron.core import Choice
from monta_megatron.planner.tuning import TuningWindow
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


ONE = Choice(chain="allgather", num_chunks=1)
TWO = Choice(chain="alltoall_allgather", num_chunks=2)


def wins(ranks: str, step: int, choice: Choice) -> str:
    """The line with the result of a tuning window."""
    window = TuningWindow(candidates={ONE: 1.0, TWO: 1.0}, first=step, num_steps=24)
    window.measured_us, window.best = {choice: 9000}, choice
    return f"monta: auto, exchange of ranks {ranks}: {window.result}"


FIRST_WINDOWS = [wins("0, 1", 0, ONE), wins("2, 3", 0, ONE)]


@pytest.mark.parametrize(
    ("log", "pinned"),
    [
        ([*FIRST_WINDOWS, wins("0, 1", 1000, TWO), wins("2, 3", 1001, TWO)], TWO.flags),
        # Stages differ; one has no second window; none has.
        ([*FIRST_WINDOWS, wins("0, 1", 1000, TWO), wins("2, 3", 1001, ONE)], ""),
        ([*FIRST_WINDOWS, wins("0, 1", 1000, TWO)], ""),
        (FIRST_WINDOWS, ""),
        (["iteration 1"], ""),
    ],
)
def test_flags_that_second_windows_pin(log: list[str], pinned: str, tmp_path: Path) -> None:
    function = re.search(r"^pinned_flags\(\) \{.*?^\}", START.read_text(), re.MULTILINE | re.DOTALL)
    assert function is not None
    (tmp_path / "log").write_text("\n".join(log))
    words = ["bash", "-c", f"{function[0]}\npinned_flags log"]
    assert subprocess.check_output(words, cwd=tmp_path, text=True).strip() == pinned
