"""--moe-monta-kernels: what runs where, and what is refused."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

from monta_megatron.exchange import kernels
from monta_megatron.exchange.kernels import agreed_kernels, is_fused, kernel_problem
from monta_megatron.integration.options import Options


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels can be built."""
    monkeypatch.setattr(kernels, "kernel_problem", _problem_of_type)


def _problem_of_type(device: str) -> str:
    return "" if device == "cuda" else kernel_problem(device)


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each of the ranks 8 to 11 says."""
    problems = ["", "", "", ""]
    monkeypatch.setattr(kernels, "gather_objects", lambda *_: problems)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [8, 9, 10, 11])
    return problems


@pytest.mark.parametrize(
    ("choice", "device", "expected", "agreed"),
    [
        ("auto", "cuda", True, "fused"),
        ("fused", "cuda", True, "fused"),
        ("torch", "cuda", False, "torch"),
        ("auto", "cpu", False, "auto"),
        ("torch", "cpu", False, "torch"),
    ],
)
def test_fused_kernels_are_for_gpus(
    gpus: None, four_ranks: list[str], choice: str, device: str, expected: bool, agreed: str
) -> None:
    """On all ranks the same."""
    assert is_fused(choice, device) == expected
    assert agreed_kernels(choice, device, mock.sentinel.group) == (agreed, None)


def test_fused_kernels_are_refused_where_they_cannot_run() -> None:
    rule = "moe_monta_kernels: got fused, must be auto or torch where rows are on cpu, not on a GPU"
    with pytest.raises(ValueError, match=f"^{rule}$"):
        is_fused("fused", "cpu")


def test_without_triton_pytorch_runs() -> None:
    with mock.patch.dict(sys.modules, {"triton": None}):
        assert kernel_problem.__wrapped__("cuda").startswith("Triton cannot be imported: ")


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        # What Triton says where there is no C compiler, and where Python's headers are missing.
        (
            RuntimeError("Failed to find C compiler. Please specify via CC.\nand more"),
            "RuntimeError: Failed to find C compiler. Please specify via CC.",
        ),
        (
            subprocess.CalledProcessError(1, ["gcc", "main.c"]),
            "CalledProcessError: Command '['gcc', 'main.c']' returned non-zero exit status 1.",
        ),
        (AssertionError(), "AssertionError: "),
    ],
)
def test_a_triton_that_cannot_build_is_named(raised: Exception, said: str) -> None:
    """Slim containers import it all the same."""
    pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")
    from monta_megatron.exchange.kernels import tiles

    kernel = mock.MagicMock()
    kernel.__getitem__.return_value.side_effect = raised
    with (
        mock.patch.object(torch, "zeros"),
        mock.patch.object(tiles, "_write_one", kernel),
    ):
        assert tiles.build_problem() == f"Triton cannot build a kernel: {said}"


def test_one_rank_that_cannot_build_decides_for_all(gpus: None, four_ranks: list[str]) -> None:
    four_ranks[1] = four_ranks[3] = "Triton cannot build a kernel: no gcc"
    group = mock.sentinel.group
    assert agreed_kernels("auto", "cuda", group) == (
        "torch",
        "PyTorch's operations run on all ranks, as on rank 9, 11 Triton cannot build a kernel: "
        "no gcc",
    )
    rule = (
        r"got fused, must be auto or torch where Triton cannot build a kernel: no gcc \(rank 9\)$"
    )
    with pytest.raises(ValueError, match=rule):
        agreed_kernels("fused", "cuda", group)


def test_other_kernels_are_refused() -> None:
    source = mock.Mock(spec=["moe_monta_kernels"], moe_monta_kernels="cuda")
    with pytest.raises(ValueError, match=r"kernels: got 'cuda', must be auto, torch or fused$"):
        Options.of(source)


@pytest.mark.parametrize(("choice", "expected"), [("auto", "fused"), ("torch", "streams")])
def test_a_training_on_gpus_prices_what_it_runs(gpus: None, choice: str, expected: str) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    from test_choice import LAYOUT, config

    from monta_megatron.integration.planning import planner_for
    from monta_megatron.planner.cluster_file import load_cluster

    options = Options(kernels=choice, cluster=load_cluster("h100_8x_ndr"))
    on_cpus = planner_for(options, config(), LAYOUT, permuted_only=False)
    with mock.patch.object(torch.accelerator, "is_available", lambda: True):
        on_gpus = planner_for(options, config(), LAYOUT, permuted_only=False)
    assert on_cpus.cluster is not None and on_gpus.cluster is not None
    assert on_cpus.cluster.policy == "streams"
    assert on_gpus.cluster.policy == expected
