"""What `monta doctor` says of the variables that decide how communicators share a GPU."""

import pytest

from monta_megatron.tools.doctor import Finding, examine

NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT")


@pytest.mark.parametrize(
    ("variables", "name", "status", "words"),
    [
        ({}, NAMES[0], "ok", ["not set"]),
        ({NAMES[0]: "32"}, NAMES[0], "ok", ["32"]),
        ({NAMES[0]: "1"}, NAMES[0], "note", ["shared experts", "TP or CP > 1", "FSDP", "32"]),
        ({}, NAMES[1], "note", ["not set", "2.26", "deadlock"]),
        ({NAMES[1]: "1"}, NAMES[1], "ok", ["1"]),
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
