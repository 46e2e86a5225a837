"""--moe-monta-kernels: what runs where, and what is refused."""

import sys
from unittest import mock

import pytest

from monta_megatron.exchange.kernel_choice import is_fused
from monta_megatron.integration.options import Options


@pytest.mark.parametrize(
    ("choice", "device", "expected"),
    [
        ("auto", "cuda", True),
        ("fused", "cuda", True),
        ("torch", "cuda", False),
        ("auto", "cpu", False),
        ("torch", "cpu", False),
    ],
)
def test_fused_kernels_are_for_gpus(choice: str, device: str, expected: bool) -> None:
    pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")
    assert is_fused(choice, device) == expected


def test_fused_kernels_are_refused_where_they_cannot_run() -> None:
    rule = "moe_monta_kernels: got fused, must be auto or torch where rows are on cpu, not on a GPU"
    with pytest.raises(ValueError, match=f"^{rule}$"):
        is_fused("fused", "cpu")


def test_without_triton_auto_says_that_it_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    with mock.patch.dict(sys.modules, {"triton": None}):
        assert not is_fused.__wrapped__("auto", "cuda")
        (line,) = caplog.messages
        assert line.startswith("PyTorch's operations run, as Triton cannot be imported: ")
        with pytest.raises(ValueError, match=r"^moe_monta_kernels: got fused, must be auto or"):
            is_fused.__wrapped__("fused", "cuda")


def test_other_kernels_are_refused() -> None:
    source = mock.Mock(spec=["moe_monta_kernels"], moe_monta_kernels="cuda")
    with pytest.raises(ValueError, match=r"kernels: got 'cuda', must be auto, torch or fused$"):
        Options.of(source)
