"""start.sh in a plain shell and in a requeued job, and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import golden
import pytest
import rank_programs
from free_ports import free_ports
from tuning_results import ALLGATHER, ALLTOALL, logged_windows

from monta_megatron.core import Choice
from monta_megatron.integration.options import Options
from monta_megatron.tools.launch.run_config import from_words
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


# A requeued job; bash takes functions from its environment. srun prints words and our variables.
JOB = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"},
    **{"SLURM_RESTART_COUNT": "1", "MOE_MONTA_TUNE_STEPS": "48"},
    "BASH_FUNC_scontrol%%": """() {
        case $2 in
            job) echo "   StdOut=$LOG" ;;
            hostnames) echo localhost ;;
        esac
    }""",
    "BASH_FUNC_srun%%": """() {
        while [[ $1 != train.py ]]; do shift; done
        echo "$@" ${!MOE_MONTA_*}
    }""",
}


@pytest.mark.parametrize(
    ("given", "seconds", "winner"),
    [
        ("", 2 * [ALLTOALL], ALLTOALL),
        ("--moe-monta-chain auto --moe-monta-tune-steps 48 ", 2 * [ALLTOALL], ALLTOALL),
        ("--moe-monta-overlap-experts --moe-monta-tune-steps=48 ", 2 * [ALLTOALL], ALLTOALL),
        ("--moe-monta-overlap-experts --moe-monta-num-chunks=4 ", 2 * [ALLGATHER], ALLGATHER),
        ("--moe-monta-overlap-experts ", [ALLTOALL, ALLGATHER], None),
        ("", [ALLTOALL], None),
        ("", [], None),
    ],
)
def test_flags_of_a_requeued_job(
    tmp_path: Path, given: str, seconds: list[Choice], winner: Choice | None
) -> None:
    """Pinned if the second windows of all stages, as a training logs them, have one winner."""
    log = tmp_path / "7.log"
    log.write_text("\n".join([*logged_windows(seconds), ""]))
    requeued = start(f"--ranks-per-node 2 -- train.py {given}--lr 1", **JOB, LOG=str(log))
    words, said = requeued.communicate(timeout=LIMIT_S)
    if winner is None:
        told = f"no flags are pinned: no second tuning windows with one winner in {log}"
        assert words == f"train.py {given}--lr 1 MOE_MONTA_TUNE_STEPS\n"
    else:
        told = f"pinned by the second tuning windows: {winner.flags}"
        assert words == f"train.py --lr 1 {winner.flags}\n"
        values = {name.replace("-", "_"): v for name, v in from_words(words.split()[1:]).items()}
        values["moe_monta_num_chunks"] = int(values["moe_monta_num_chunks"])
        assert Options.of(SimpleNamespace(**values)).overlap_experts == winner.splits_experts
    assert said == f"start.sh: {told}\n"
