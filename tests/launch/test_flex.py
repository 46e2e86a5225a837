"""Why `monta compare` leaves out Megatron's `flex`: what each backend needs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monta_megatron.tools.compare.comparison import why_no_flex
from monta_megatron.tools.launch.arguments import from_words

HYBRID = "--moe-flex-dispatcher-backend hybridep"
NCCL = "--moe-flex-dispatcher-backend ncclep"
CAPACITY = "--moe-expert-rank-capacity-factor 4"


def why(words: str) -> str | None:
    return why_no_flex(from_words(words.split()), {})


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU, a DeepEP without Hybrid-EP, and a Transformer Engine with NCCL EP."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "deep_ep.py").write_text("Buffer = object\n")
    engine = tmp_path / "transformer_engine" / "pytorch"
    engine.mkdir(parents=True)
    for file in (engine.parent / "__init__.py", engine / "__init__.py", engine / "ep.py"):
        file.touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("", None),
        (f"{HYBRID} --moe-enable-deepep", None),
        (HYBRID, "its backend hybridep needs HybridEPBuffer of deep_ep"),
        (NCCL, "--moe-expert-rank-capacity-factor is not given, which its backend ncclep needs"),
        (f"{NCCL} {CAPACITY}", None),
        # For Megatron's parser to refuse.
        ("--moe-flex-dispatcher-backend other", None),
    ],
)
def test_what_a_backend_needs(words: str, reason: str | None) -> None:
    answer = why(words)
    assert answer is None if reason is None else reason in str(answer)


@pytest.mark.parametrize(
    ("words", "package"),
    [("", "deep_ep"), (HYBRID, "deep_ep"), (f"{NCCL} {CAPACITY}", "transformer_engine")],
)
def test_what_is_not_installed(
    words: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert f"{package} is not installed" in str(why(words))


def test_cpu_ranks_have_no_flex() -> None:
    assert "CPU ranks" in str(why_no_flex({}, {"MONTA_CPU_RANKS": "1"}))
