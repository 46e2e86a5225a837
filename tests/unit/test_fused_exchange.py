"""Whole exchanges by Triton kernels give the bits of PyTorch's operations, on every chain.

In Triton's interpreter, in a process of its own.
"""

from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")

import test_stream_safety
from preloaded import Preloaded

# ETP 1, and an AllGather over ETP 2 for the chains that have one.
CASES = [(name, layout) for name, layout in test_stream_safety.CASES if name != "alltoall"]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Preloaded]:
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    process = Preloaded("fused_exchanges", limit_s=120, **environment)
    yield process
    process.close()


def test_a_calibration_times_what_a_training_launches(interpreter: Preloaded) -> None:
    result = interpreter.run("fused_exchanges:calibrate")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("chain_name", "layout_name"), CASES)
def test_fused_exchanges_give_the_same_bits(
    interpreter: Preloaded, chain_name: str, layout_name: str
) -> None:
    result = interpreter.run("fused_exchanges:compare", chain_name, layout_name)
    assert result.returncode == 0, result.stderr


def test_a_second_model_with_more_experts_has_launches_of_its_own(interpreter: Preloaded) -> None:
    result = interpreter.run("fused_exchanges:compare_two_models", "hierarchical_alltoall")
    assert result.returncode == 0, result.stderr
