"""Findings of `monta doctor`: variables of NCCL and CUDA, the way in."""

from pathlib import Path

import golden
import pytest
import torch

from monta_megatron.exchange import kernels, launch_order
from monta_megatron.integration import registration
from monta_megatron.tools.doctor import AUTOLOAD_VARIABLES, QUEUES, _optional, examine

GOLDEN = Path(__file__).parent / "golden"
ORDER = launch_order.VARIABLE


def finding(name: str) -> str:
    """Status, what was found and the advice of one finding."""
    (found,) = [each for each in examine().findings if each.name == name]
    return f"{found.status}: {'; '.join(filter(None, (found.found, found.advice)))}"


def test_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case is the name of a finding, then variables."""
    monkeypatch.setattr(registration, "_ways_in", [])
    for variable in (QUEUES, ORDER, *AUTOLOAD_VARIABLES):
        monkeypatch.delenv(variable, raising=False)

    def answer(case: str) -> str:
        name, _, given = case.partition(":")
        with monkeypatch.context() as patch:
            for variable in given.split():
                patch.setenv(*variable.split("="))
            return finding(name)

    golden.check_cases(GOLDEN / "doctor.txt", answer)
    # Nothing is advised for a GPU that is not there.
    names = {each.name: each for each in examine().findings}
    assert "Triton kernels" not in names and names["transformer_engine"].advice is None


def test_what_is_not_installed_is_ok_only_where_it_is_not_needed() -> None:
    found = _optional("absent_module", None)
    assert (found.status, found.found) == ("ok", "not installed, and not needed without a GPU")
    assert _optional("absent_module", "pip install it").status == "note"


def test_findings_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that says that it has GPUs, but no compiler."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    problem = "Triton cannot build a kernel: RuntimeError: Failed to find C compiler"
    monkeypatch.setattr(kernels, "kernel_problem", lambda device: problem)
    monkeypatch.setenv(QUEUES, "1")
    lines = {name: finding(name) for name in ("accelerator", "Triton kernels", QUEUES)}
    golden.check_lines(GOLDEN / "doctor_on_a_gpu.txt", lines)


def test_launch_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.delenv(ORDER, raising=False)
    for nccl, cuda, says in (
        ((2, 25, 1), (12, 9), "leaves it so: NCCL 2.25.1 does not know it"),
        ((2, 27, 5), (12, 2), "leaves it so: CUDA 12.2 would run communicators one after the"),
        ((2, 27, 5), (12, 9), "monta sets 1: NCCL 2.27.5, CUDA 12.9"),
    ):
        monkeypatch.setattr(launch_order, "versions", lambda found=(nccl, cuda): found)
        assert says in finding(ORDER)
