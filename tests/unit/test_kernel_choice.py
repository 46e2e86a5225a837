"""--moe-monta-kernels: what runs where, and what is refused."""

import sys
from unittest import mock

import pytest
import torch

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


@pytest.mark.parametrize(("choice", "expected"), [("auto", "fused"), ("torch", "streams")])
def test_a_training_on_gpus_prices_what_it_runs(choice: str, expected: str) -> None:
    """Ranks that differ in it would choose otherwise: it is part of what they agree on."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")
    from test_choice import LAYOUT, config

    from monta_megatron.integration.chain_policy import policy_for
    from monta_megatron.planner.chain_policy import PlannedPolicy
    from monta_megatron.planner.cluster_file import load_cluster

    options = Options(kernels=choice, cluster=load_cluster("h100_8x_ndr"))
    on_cpus = policy_for(options, config(), LAYOUT, permuted_only=False)
    with mock.patch.object(torch.accelerator, "is_available", lambda: True):
        on_gpus = policy_for(options, config(), LAYOUT, permuted_only=False)
    assert isinstance(on_cpus, PlannedPolicy) and isinstance(on_gpus, PlannedPolicy)
    assert on_cpus.cluster.policy == "streams"
    assert on_gpus.cluster.policy == expected
    assert (on_gpus.rule() == on_cpus.rule()) == (choice == "torch")
