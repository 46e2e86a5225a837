"""What `monta doctor` says of the variables that decide how communicators share a GPU."""

import pytest

from monta_megatron.tools.doctor import Finding, examine

NAMES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "MOE_MONTA_MAX_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
)


@pytest.mark.parametrize(
    ("variables", "name", "status", "words"),
    [
        ({}, "CUDA_DEVICE_MAX_CONNECTIONS", "ok", ["not set"]),
        ({NAMES[0]: "32"}, "CUDA_DEVICE_MAX_CONNECTIONS", "ok", ["32"]),
        ({NAMES[0]: "1"}, NAMES[0], "note", ["shared experts", "TP or CP > 1", "FSDP", "32"]),
        ({}, "communicators", "ok", ["4 SMs for a rail and 16 for a node", "-node-ctas"]),
        ({NAMES[1]: "3"}, "communicators", "ok", ["at most 3 SMs for a rail and 3 for a node"]),
        ({NAMES[2]: "16"}, "communicators", "note", ["at most 16 SMs", "NCCL_MAX_CTAS"]),
        ({}, "NCCL_LAUNCH_ORDER_IMPLICIT", "note", ["not set", "2.26", "deadlock"]),
        ({NAMES[3]: "1"}, "NCCL_LAUNCH_ORDER_IMPLICIT", "ok", ["1"]),
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
