"""--moe-monta-kernels: what runs where, and what is refused."""

import subprocess
import sys
from unittest import mock

import pytest
import torch

from monta_megatron.exchange import kernels
from monta_megatron.exchange.kernels import agreed_kernels, is_fused, kernel_problem
from monta_megatron.integration.options import Options

NO_GCC = "Triton cannot build a kernel: no gcc"


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each of the ranks 8 to 11 says; here kernels can be built on GPUs."""
    said, on_cpus = [""] * 4, kernel_problem("cpu")
    monkeypatch.setattr(kernels, "kernel_problem", lambda on: "" if on == "cuda" else on_cpus)
    monkeypatch.setattr(kernels, "gather_objects", lambda *_: said)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [8, 9, 10, 11])
    return said


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
    problems: list[str], choice: str, device: str, expected: bool, agreed: str
) -> None:
    """On all ranks the same."""
    assert is_fused(choice, device) == expected
    assert agreed_kernels(choice, device, mock.sentinel.group) == (agreed, None)


def test_one_rank_that_cannot_build_decides_for_all(problems: list[str]) -> None:
    problems[1] = problems[3] = NO_GCC
    group = mock.sentinel.group
    line = f"PyTorch's operations run on all ranks, as on rank 9, 11 {NO_GCC}"
    assert agreed_kernels("auto", "cuda", group) == ("torch", line)
    rule = rf"got fused, must be auto or torch where {NO_GCC} \(rank 9\)$"
    with pytest.raises(ValueError, match=rule):
        agreed_kernels("fused", "cuda", group)


def test_what_is_refused() -> None:
    rule = "moe_monta_kernels: got fused, must be auto or torch where rows are on cpu, not on a GPU"
    with pytest.raises(ValueError, match=f"^{rule}$"):
        is_fused("fused", "cpu")
    source = mock.Mock(spec=["moe_monta_kernels"], moe_monta_kernels="cuda")
    with pytest.raises(ValueError, match=r"kernels: got 'cuda', must be auto, torch or fused$"):
        Options.of(source)


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
    with mock.patch.object(torch, "zeros"), mock.patch.object(tiles, "_write_one", kernel):
        assert tiles.build_problem() == f"Triton cannot build a kernel: {said}"


@pytest.mark.parametrize(("choice", "expected"), [("auto", "fused"), ("torch", "streams")])
def test_a_training_on_gpus_prices_what_it_runs(
    problems: list[str], choice: str, expected: str
) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    from test_choice import LAYOUT, config

    from monta_megatron.integration.planning import planner_for
    from monta_megatron.planner.cluster_file import load_cluster

    options = Options(kernels=choice, cluster=load_cluster("h100_8x_ndr"))
    for has_gpus, policy in ((False, "streams"), (True, expected)):
        with mock.patch.object(torch.accelerator, "is_available", lambda has=has_gpus: has):
            planner = planner_for(options, config(), LAYOUT, permuted_only=False)
        assert planner.cluster is not None and planner.cluster.policy == policy
