"""The runner of Megatron-LM's own tests, on a suite of two ranks that is made up here."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "megatron_suite.py"
SUITE = """
import os, time
import pytest
import torch
import torch.distributed as dist

@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("nccl")

def test_sum():
    ones = torch.ones(1, device="cuda")
    dist.all_reduce(ones)
    assert ones.item() == 2

def test_type():
    assert "alltoall".startswith("all"), "another type"

@pytest.mark.skip(reason="whatever")
def test_skipped():
    pass

def test_one_rank():
    assert os.environ["RANK"] == "0", "on one rank"

def test_hangs():
    while os.environ["RANK"] == "1":
        time.sleep(1)

@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_after_it(dispatcher):
    pass
"""


def run_suite(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--checkout", folder, "--ranks", "2", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.timeout(300)
def test_what_stock_passes_has_to_pass(tmp_path: Path) -> None:
    """A round of 6 tests, of which the fifth never ends, and one of the two behind it."""
    suite = tmp_path / "tests" / "unit_tests" / "transformer" / "moe"
    suite.mkdir(parents=True)
    for package in (suite, suite.parent, suite.parent.parent, suite.parent.parent.parent):
        (package / "__init__.py").touch()
    (suite / "test_made_up.py").write_text(SUITE)
    log = tmp_path / "log"
    limits = ("--tests-per-round", "6", "--limit-s", "10", "--log", str(log))
    result = run_suite(tmp_path, *limits)
    lines = result.stdout.splitlines()
    assert lines[1].split()[:4] == ["test_made_up.py", "7", "4", "3"], result
    assert lines[2] == "with stock: 2 failed, 4 passed, 1 skipped"
    assert lines[3] == "with monta: 3 of the 4 that pass with stock"
    assert lines[4].endswith("test_made_up.py::test_type: rank 0: AssertionError: another type")
    assert (len(lines), result.returncode) == (5, 1)
    assert len(list((log / "alltoall").glob("round*"))) == 2


def test_a_folder_without_the_suite_is_refused(tmp_path: Path) -> None:
    result = run_suite(tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith(
        f"{tmp_path} has no tests in tests/unit_tests/transformer/moe, must be a checkout of "
        "Megatron-LM"
    )
