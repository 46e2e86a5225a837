"""The stand-ins of the CPU ranks, one by one; what they are for is test_pretrain_gpt.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="pip install megatron-core")

CHECKS = Path(__file__).with_name("cpu_ranks_checks.py")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    # For tests/support.
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_stand_ins() -> None:
    """Three ranks, so that sizes, positions and neighbours all differ."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    result = run(*torchrun, str(CHECKS), MONTA_CPU_RANKS="1")
    said = result.stdout + result.stderr[-6000:]
    assert result.returncode == 0, said
    assert result.stdout.count("passed check_") == CHECKS.read_text().count("def check_"), said
    assert result.stderr.count("CPU ranks stand in for CUDA") == 1, said


def test_off_unless_asked_for() -> None:
    result = run("-c", "import torch; print(torch.cuda.is_available())", CUDA_VISIBLE_DEVICES="")
    assert result.stdout == "False\n", result.stderr


def test_stays_off_beside_a_gpu() -> None:
    program = """
import torch
torch.cuda.is_available = lambda: True
stream, all_gather = torch.cuda.Stream, torch.distributed.all_gather
from monta_megatron.emulation import cpu_ranks
cpu_ranks.install()
assert torch.cuda.Stream is stream
assert torch.distributed.all_gather is all_gather
"""
    result = run("-c", program, RANK="0", MONTA_CPU_RANKS="0")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("CPU ranks stay off, a GPU is available") == 1
