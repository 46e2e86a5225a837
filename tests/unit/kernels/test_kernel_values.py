"""What kernels compute: random cases in Triton's interpreter, in a process of its own.

`scripts/kernel_tests.py` runs more of them, or one alone.
"""

from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")

from preloaded import Preloaded

NUM_CASES, BATCH = 120, 20


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Preloaded]:
    process = Preloaded("kernel_cases", limit_s=280, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    yield process
    process.close()


@pytest.mark.parametrize("first", range(0, NUM_CASES, BATCH))
def test_kernels_give_what_pytorch_gives(interpreter: Preloaded, first: int) -> None:
    result = interpreter.run("kernel_cases:check", first, first + BATCH)
    assert result.returncode == 0, result.stderr


def test_kernels_touch_few_bytes_more_than_needed(interpreter: Preloaded) -> None:
    result = interpreter.run("kernel_bytes:compare")
    assert result.returncode == 0, result.stderr
