"""What `monta doctor` says of the variables that decide how communicators share a GPU."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from monta_megatron.common import launch_order
from monta_megatron.integration import arguments
from monta_megatron.tools.doctor import Finding, examine

NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT")


@pytest.mark.parametrize(
    ("variables", "name", "status", "words"),
    [
        ({}, NAMES[0], "ok", ["not set"]),
        ({NAMES[0]: "32"}, NAMES[0], "ok", ["32"]),
        ({NAMES[0]: "1"}, NAMES[0], "note", ["shared experts", "TP or CP > 1", "FSDP", "32"]),
        ({NAMES[1]: "0"}, NAMES[1], "note", ["0, set by the user", "no GPU", "deadlock"]),
        ({NAMES[1]: "1"}, NAMES[1], "ok", ["1, set by the user"]),
    ],
)
def test_how_communicators_share_a_gpu(
    variables: dict[str, str],
    name: str,
    status: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in NAMES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    by_name: dict[str, Finding] = {finding.name: finding for finding in examine().findings}
    finding = by_name[name]
    assert finding.status == status
    text = f"{finding.found} {finding.advice}"
    assert [word for word in words if word not in text] == []


def test_a_gpu_without_a_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from monta_megatron.exchange import kernel_choice

    names = {finding.name for finding in examine().findings}
    assert "Triton kernels" not in names, "of no interest without a GPU"
    problem = "Triton cannot build a kernel: RuntimeError: Failed to find C compiler"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(kernel_choice, "kernel_problem", lambda device: problem)
    (finding,) = [each for each in examine().findings if each.name == "Triton kernels"]
    assert finding.status == "note" and problem in finding.found
    assert finding.advice is not None and "gcc" in finding.advice


def test_torch_says_how_it_starts_collectives() -> None:
    (finding,) = [each for each in examine().findings if each.name == "torch's AllToAllOptions"]
    assert "asyncOp" in finding.found


def test_launch_order(monkeypatch: Any, capsys: Any) -> None:
    """Set where NCCL orders and still overlaps, said either way; the user's value is kept."""
    monkeypatch.setenv(NAMES[1], "0")
    assert launch_order.set_launch_order() is None
    for nccl, cuda, says in (
        ((2, 25, 1), (12, 9), "NCCL 2.25.1 does not know it"),
        ((2, 27, 5), (12, 2), "CUDA 12.2 would run communicators one after the other"),
        ((2, 27, 5), (12, 9), "monta sets 1: NCCL 2.27.5, CUDA 12.9"),
    ):
        monkeypatch.delenv(NAMES[1])
        monkeypatch.setattr(launch_order, "versions", lambda found=(nccl, cuda): found)
        assert says in " ".join(finding.found for finding in examine().findings)
        arguments.check_config(SimpleNamespace(num_moe_experts=8))
        assert os.environ.setdefault(NAMES[1], "not set") == ("1" if "sets" in says else "not set")
    out = capsys.readouterr().out
    assert out.count(f"monta: {NAMES[1]}=1 set") == 1
    for version in ("NCCL 2.25.1", "CUDA 12.2"):
        assert out.count(f"monta: {NAMES[1]} is not set: {version}") == 1
