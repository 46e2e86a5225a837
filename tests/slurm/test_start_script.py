"""start.sh in a plain shell, what it refuses, and the flags of a requeued job."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace

import golden
import pytest
import rank_programs
from free_ports import free_ports

from monta_megatron.core import Choice
from monta_megatron.integration.options import Options
from monta_megatron.integration.results import FOLDER_VARIABLE, WindowResult, write_result
from monta_megatron.planner.tuning import STEPS_TO_SECOND
from monta_megatron.tools.launch.pinned import pinned_flags, with_flags
from monta_megatron.tools.launch.run_config import from_words
from monta_megatron.tools.launch.start import START

LIMIT_S = 60

ALLTOALL, ALLGATHER = (Choice(chain=name, num_chunks=1) for name in ("alltoall", "allgather"))

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
    variables = {"NNODES": "2", "MASTER_ADDR": gethostname(), "MASTER_PORT": str(port)}
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


@pytest.mark.parametrize("address", ["localhost", "localhost.localdomain", "127.0.1.1", "::1"])
def test_an_address_that_each_of_several_nodes_takes_for_itself_is_refused(address: str) -> None:
    place = {"NODE_RANK": "0", "MASTER_ADDR": address}
    refused = start("--ranks-per-node 2 --nodes 2 -- train.py", **place)
    output, errors = refused.communicate(timeout=LIMIT_S)
    assert (refused.returncode, output) == (2, "")
    assert errors == (
        f"start.sh: MASTER_ADDR: got '{address}', must be an address by which the 2 nodes reach "
        "the first one; in a job of Slurm it may be left out\n"
    )


def result(ranks: tuple[int, ...], window: int, winner: Choice | None) -> WindowResult:
    step = (window - 1) * STEPS_TO_SECOND
    flags = None if winner is None else winner.flags
    return WindowResult(ranks=ranks, layers=sum(ranks), window=window, step=step, flags=flags)


# Of two pipeline stages.
FIRST, LAST = (0, 1), (2, 3)
FIRST_WINDOWS = [result(FIRST, 1, ALLGATHER), result(LAST, 1, None)]
AGREED = [result(FIRST, 2, ALLTOALL), result(LAST, 2, ALLTOALL)]


@pytest.mark.parametrize(
    ("seconds", "flags"),
    [
        (AGREED, ALLTOALL.flags),
        ([result(FIRST, 2, ALLTOALL), result(LAST, 2, ALLGATHER)], None),
        ([result(FIRST, 2, ALLTOALL)], None),
        ([result(FIRST, 2, ALLTOALL), result(LAST, 2, None)], None),
        ([result(FIRST, 2, None), result(LAST, 2, None)], None),
        ([], None),
    ],
    ids=["agreed", "differ", "one missing", "one without times", "no times", "none"],
)
def test_flags_are_pinned_where_all_second_windows_agree(
    seconds: list[WindowResult], flags: str | None
) -> None:
    assert pinned_flags([*FIRST_WINDOWS, *seconds]) == flags


def test_layers_of_two_shapes_have_windows_of_their_own() -> None:
    other = replace(FIRST_WINDOWS[0], layers=7)
    assert pinned_flags([*FIRST_WINDOWS, *AGREED, other]) is None
    assert pinned_flags([*FIRST_WINDOWS, *AGREED, other, replace(AGREED[0], layers=7)])


@pytest.mark.parametrize(
    "given",
    [
        "",
        "--moe-monta-chain auto --moe-monta-tune-steps 48 ",
        "--moe-monta-overlap-experts --moe-monta-tune-steps=48 --moe-monta-num-chunks=4 ",
    ],
)
@pytest.mark.parametrize("splits_experts", [False, True])
def test_pinned_flags_replace_those_that_were_given(given: str, splits_experts: bool) -> None:
    winner = Choice(chain="hierarchical_alltoall", num_chunks=2, splits_experts=splits_experts)
    words = with_flags(f"train.py {given}--lr 1".split(), winner.flags)
    assert words == ["train.py", "--lr", "1", *winner.flags.split()]
    values = {name.replace("-", "_"): value for name, value in from_words(words[1:]).items()}
    values["moe_monta_num_chunks"] = int(values["moe_monta_num_chunks"])
    assert Options.of(SimpleNamespace(**values)).overlap_experts == splits_experts


# Prints its arguments and the variables that are defaults of options.
COMMAND = ["bash", "-c", 'echo "$@" ${!MOE_MONTA_*}', "bash", "--moe-monta-num-chunks", "4"]


def started(folder: Path, restarts: int, task: int = 0, status: int = 0) -> tuple[str, str]:
    """What COMMAND prints, and what is said, in a task of a job with so many restarts."""
    done = subprocess.run(
        [sys.executable, "-m", "monta_megatron.tools.launch.pinned", *COMMAND],
        env={
            **ENVIRONMENT,
            FOLDER_VARIABLE: str(folder),
            "SLURM_RESTART_COUNT": str(restarts),
            "SLURM_PROCID": str(task),
            "MOE_MONTA_TUNE_STEPS": "48",
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


def test_a_requeued_job_starts_with_the_pinned_flags(tmp_path: Path) -> None:
    for each in (*FIRST_WINDOWS, *AGREED):
        assert write_result(each, {FOLDER_VARIABLE: str(tmp_path)}) is None
    (tmp_path / "notes.txt").touch()
    pinned = f"start.sh: pinned by the second tuning windows: {ALLTOALL.flags}\n"
    assert started(tmp_path, restarts=1) == (f"{ALLTOALL.flags}\n", pinned)
    # One task says it for all. The trials of a pinned job are off, so it stays pinned.
    assert started(tmp_path, restarts=2, task=1) == (f"{ALLTOALL.flags}\n", "")

    # The first start of a later job does not have them.
    unchanged = "--moe-monta-num-chunks 4 MOE_MONTA_TUNE_STEPS\n"
    assert started(tmp_path, restarts=0) == (unchanged, "")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    told = f"no second tuning windows with one winner in {tmp_path}"
    assert started(tmp_path, restarts=1) == (unchanged, f"start.sh: no flags are pinned: {told}\n")


def test_a_broken_result_pins_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rank_0_layers_00000000_window_1.json"
    path.write_text("{")
    printed, said = started(tmp_path, restarts=1)
    assert printed == "--moe-monta-num-chunks 4 MOE_MONTA_TUNE_STEPS\n"
    assert said.startswith(f"start.sh: no flags are pinned: {path}: is no JSON in line 1: ")


def test_results_that_cannot_be_removed_end_the_first_start(tmp_path: Path) -> None:
    path = tmp_path / "rank_0_layers_00000000_window_1.json"
    path.mkdir()
    printed, said = started(tmp_path, restarts=0, status=2)
    assert printed == "" and said.startswith(f"start.sh: {path}: cannot be removed: ")
    assert said.count("\n") == 1 and f"set {FOLDER_VARIABLE} to another folder" in said
