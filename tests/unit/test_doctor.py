"""Findings of `monta doctor`: variables of NCCL and CUDA, the way in, options in force."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monta_megatron.exchange import kernels, launch_order
from monta_megatron.integration import arguments, registration
from monta_megatron.tools.doctor import AUTOLOAD_VARIABLES, Finding, examine

OPTIONS = ("chain", "num-chunks", "check", "cluster", "overlap-experts")
NAMES = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT")


def finding(name: str, *words: str) -> Finding:
    (found,) = [each for each in examine(words).findings if each.name == name]
    return found


QUEUES, ORDER = NAMES


@pytest.mark.parametrize(
    ("words", "variables", "name", "status", "says"),
    [
        # How communicators share a GPU; of no interest to CPU ranks, for which Megatron demands it.
        ([], {}, QUEUES, "ok", ["not set"]),
        ([], {QUEUES: "32"}, QUEUES, "ok", ["32"]),
        ([], {QUEUES: "1"}, QUEUES, "ok", ["1"]),
        ([], {ORDER: "0"}, ORDER, "note", ["0, set by the user", "no GPU", "deadlock"]),
        ([], {ORDER: "1"}, ORDER, "ok", ["1, set by the user"]),
        # No way in.
        (
            [],
            {"MONTA_AUTOLOAD": "0"},
            "way in",
            "note",
            ["--moe-monta-...", "unset MONTA_AUTOLOAD"],
        ),
        ([], {}, "way in", "note", ["--moe-monta-...", "install the package"]),
        # Options that a training refuses.
        (
            ["--moe-monta-chian=auto"],
            {},
            "options",
            "missing",
            ["unknown; did you mean --moe-monta-chain?"],
        ),
        (
            ["--moe-monta-num-chunks=0"],
            {},
            "options",
            "missing",
            ["moe_monta_num_chunks: got 0, must be an integer >= 1"],
        ),
        (["--moe-monta-chain"], {}, "options", "missing", ["must be a name"]),
    ],
)
def test_findings(
    words: list[str],
    variables: dict[str, str],
    name: str,
    status: str,
    says: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "_ways_in", [])
    for variable in (*NAMES, *AUTOLOAD_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    found = finding(name, *words)
    assert found.status == status
    assert [each for each in says if each not in f"{found.found} {found.advice}"] == []


def test_a_gpu_without_a_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that says that it has a GPU."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    problem = "Triton cannot build a kernel: RuntimeError: Failed to find C compiler"
    monkeypatch.setattr(kernels, "kernel_problem", lambda device: problem)
    found = finding("Triton kernels")
    assert found.status == "note" and problem in found.found
    assert found.advice is not None and "gcc" in found.advice
    assert finding("accelerator").found == "8 x H100"
    monkeypatch.setenv(QUEUES, "1")
    queues = finding(QUEUES)
    assert queues.status == "note" and "shared experts" in queues.found
    assert "where Megatron does not demand 1" in str(queues.advice)


def test_without_a_gpu_nothing_is_advised_for_one() -> None:
    names = {each.name: each for each in examine().findings}
    assert "Triton kernels" not in names
    assert names["transformer_engine"].advice is None


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
        config = SimpleNamespace(num_moe_experts=8, moe_token_dispatcher_type="monta")
        arguments.check_config(config)
        assert NAMES[1] not in os.environ
        arguments._checking_monta(lambda _: None)(config)
        assert os.environ.setdefault(NAMES[1], "not set") == ("1" if "sets" in says else "not set")
    out = capsys.readouterr().out
    assert out.count(f"monta: {NAMES[1]}=1 set") == 1
    for version in ("NCCL 2.25.1", "CUDA 12.2"):
        assert out.count(f"monta: {NAMES[1]} is not set: {version}") == 1
