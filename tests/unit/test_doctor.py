"""Findings of `monta doctor`: variables of NCCL and CUDA, the way in, options in force."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monta_megatron.common import launch_order
from monta_megatron.exchange import kernel_choice
from monta_megatron.integration import arguments, registration
from monta_megatron.tools.doctor import AUTOLOAD_VARIABLES, Finding, examine

OPTIONS = ("chain", "num-chunks", "check", "cluster", "overlap-experts")
NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT")


@pytest.mark.parametrize(
    ("variables", "name", "status", "words"),
    [
        ({}, NAMES[0], "ok", ["not set"]),
        ({NAMES[0]: "32"}, NAMES[0], "ok", ["32"]),
        # Of no interest to CPU ranks, for which Megatron demands it.
        ({NAMES[0]: "1"}, NAMES[0], "ok", ["1"]),
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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says that it has a GPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")


def finding(name: str, *words: str) -> Finding:
    (found,) = [each for each in examine(words).findings if each.name == name]
    return found


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_a_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = "Triton cannot build a kernel: RuntimeError: Failed to find C compiler"
    monkeypatch.setattr(kernel_choice, "kernel_problem", lambda device: problem)
    kernels = finding("Triton kernels")
    assert kernels.status == "note" and problem in kernels.found
    assert kernels.advice is not None and "gcc" in kernels.advice
    assert finding("accelerator").found == "8 x H100"
    monkeypatch.setenv(NAMES[0], "1")
    queues = finding(NAMES[0])
    assert queues.status == "note" and "shared experts" in queues.found
    assert "TP or CP > 1" in str(queues.advice) and "FSDP" in str(queues.advice)


def test_without_a_gpu_nothing_is_advised_for_one() -> None:
    names = {each.name: each for each in examine().findings}
    assert "Triton kernels" not in names
    assert names["transformer_engine"].advice is None


@pytest.mark.parametrize(
    ("variables", "advice"),
    [
        ({"MONTA_AUTOLOAD": "0"}, "unset MONTA_AUTOLOAD, or call monta_megatron.register()"),
        ({}, "install the package"),
    ],
)
def test_no_way_in(variables: dict[str, str], advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_ways_in", [])
    for name in AUTOLOAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    way_in = finding("way in")
    assert way_in.status == "note" and "--moe-monta-..." in way_in.found
    assert advice in str(way_in.advice)


def test_options_and_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_MONTA_CHECK", "0")
    monkeypatch.setenv("MOE_MONTA_NUM_CHUNKS", "2")
    words = ("--lr", "1", "--moe-monta-chain=alltoall_dedup", "--moe-monta-num-chunks", "3")
    found = {name: finding(f"--moe-monta-{name}", *words).found for name in OPTIONS}
    assert found == {
        "chain": "alltoall_dedup, by flag",
        "num-chunks": "3, by flag",
        "check": "0, by MOE_MONTA_CHECK",
        "cluster": "not set, by default",
        "overlap-experts": "False, by default",
    }


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--moe-monta-chian=auto", "unknown; did you mean --moe-monta-chain?"),
        ("--moe-monta-num-chunks=0", "moe_monta_num_chunks: got 0, must be an integer >= 1"),
        ("--moe-monta-chain", "expected one argument"),
    ],
)
def test_options_that_a_training_refuses(word: str, says: str) -> None:
    options = finding("options", word)
    assert options.status == "missing" and says in options.found


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
