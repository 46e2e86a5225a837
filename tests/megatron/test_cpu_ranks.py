"""The stand-ins of the CPU ranks, one by one; what they are for is test_pretrain_gpt.py."""

import os
import sys
from pathlib import Path

import pytest
from run_python import run_python

pytest.importorskip("megatron.core", reason="pip install megatron-core")

CHECKS = Path(__file__).with_name("cpu_ranks_checks.py")
# For tests/support.
PATH = os.pathsep.join(filter(None, sys.path))


def test_stand_ins() -> None:
    """Three ranks, so that sizes, positions and neighbours all differ."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    environment = {"PYTHONPATH": PATH, "MONTA_CPU_RANKS": "1", "OMP_NUM_THREADS": "1"}
    result = run_python(*torchrun, CHECKS, limit_s=240, **environment)
    said = result.stdout + result.stderr[-6000:]
    assert result.returncode == 0, said
    assert result.stdout.count("passed check_") == CHECKS.read_text().count("def check_"), said
    assert result.stderr.count("CPU ranks stand in for CUDA") == 1, said


def test_off_unless_asked_for() -> None:
    result = run_python(
        "-c", "import torch; print(torch.cuda.is_available())", CUDA_VISIBLE_DEVICES=""
    )
    assert result.stdout == "False\n", result.stderr


def test_transformer_engine_is_hidden_from_megatron(tmp_path: Path) -> None:
    """A package of its name, and its part, which would fail when imported."""
    part = tmp_path / "transformer_engine" / "pytorch"
    part.mkdir(parents=True)
    for folder in (part, part.parent):
        (folder / "__init__.py").write_text("raise RuntimeError('needs a GPU')")
    program = """
import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.transformer.moe import moe_utils, router
try:
    import transformer_engine.pytorch
except ImportError as error:
    print(HAVE_TE, moe_utils.te_general_gemm, error.name)
"""
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{PATH}", "MONTA_CPU_RANKS": "1"}
    result = run_python("-c", program, RANK="0", **environment)
    assert result.stdout == "False None transformer_engine.pytorch\n", result.stderr
    said = [line for line in result.stderr.splitlines() if "Transformer Engine" in line]
    assert len(said) == 1 and said[0].startswith("monta-megatron: Transformer Engine, which")


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
    result = run_python("-c", program, RANK="0", MONTA_CPU_RANKS="0")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("CPU ranks stay off, a GPU is available") == 1
