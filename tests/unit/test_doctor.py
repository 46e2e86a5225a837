"""Findings of `monta doctor`: variables of NCCL and CUDA, the way in."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden
import pytest
import torch

from monta_megatron.exchange import kernels, launch_order
from monta_megatron.integration import arguments, registration
from monta_megatron.tools.doctor import AUTOLOAD_VARIABLES, QUEUES, examine

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


def test_launch_order(monkeypatch: Any, capsys: Any) -> None:
    """Set where NCCL orders and still overlaps, said either way; the user's value is kept."""
    monkeypatch.setenv(ORDER, "0")
    # CPU ranks.
    launch_order.set_launch_order()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    for nccl, cuda, says in (
        ((2, 25, 1), (12, 9), "NCCL 2.25.1 does not know it"),
        ((2, 27, 5), (12, 2), "CUDA 12.2 would run communicators one after the other"),
        ((2, 27, 5), (12, 9), "monta sets 1: NCCL 2.27.5, CUDA 12.9"),
    ):
        monkeypatch.delenv(ORDER)
        monkeypatch.setattr(launch_order, "versions", lambda found=(nccl, cuda): found)
        assert says in finding(ORDER)
        config = SimpleNamespace(num_moe_experts=8, moe_token_dispatcher_type="monta")
        arguments.check_config(config)
        assert ORDER not in os.environ
        arguments._checking_monta(lambda _: None)(config)
        assert os.environ.setdefault(ORDER, "not set") == ("1" if "sets" in says else "not set")
        monkeypatch.setenv(ORDER, "1")
        assert launch_order.communicators_overlap.__wrapped__() == ("sets" in says)
    monkeypatch.setenv(ORDER, "0")
    launch_order.set_launch_order()
    out = capsys.readouterr().out
    assert out.count(f"monta: {ORDER}=1 set") == 1
    for held in ("not set, NCCL 2.25.1", "not set, CUDA 12.2", "0, NCCL 2.27.5"):
        says = f"monta: collectives of different groups do not overlap: {ORDER} is {held}"
        assert out.count(says) == 1
