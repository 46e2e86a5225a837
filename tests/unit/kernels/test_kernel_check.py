"""Kernels compared with PyTorch operations at the first use of a device: what ends a run."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")

from preloaded import Preloaded

from monta_megatron.integration import checks

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Preloaded]:
    process = Preloaded("kernel_cases", limit_s=120, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    yield process
    process.close()


def nothing_differs() -> None:
    """In the interpreter's process."""
    from monta_megatron.exchange.kernels.check import first_difference

    for dtype in (torch.float32, torch.bfloat16):
        assert first_difference(torch.device("cpu"), 40, dtype) == ""


def planted_faults_are_named() -> None:
    """Likewise: a reduce that adds a last row's value twice, and one that is not there."""
    from monta_megatron.exchange.kernels import check

    original = check.reduce

    def wrong(columns, copies, into, *args, **kwargs):
        original(columns, copies, into, *args, **kwargs)
        into.rows[-1, 17] += 1

    with mock.patch.object(check, "reduce", wrong):
        line = check.first_difference(torch.device("cpu"), 40, torch.bfloat16)
    assert line.startswith("kernel reduce: rows differs at [82, 17]: "), line
    with mock.patch.object(check, "duplicate", side_effect=RuntimeError("no kernel image")):
        line = check.first_difference(torch.device("cpu"), 40, torch.bfloat16)
    assert line == "kernel duplicate does not run: RuntimeError: no kernel image"


@pytest.mark.parametrize("function", [nothing_differs, planted_faults_are_named])
def test_kernels_are_compared(interpreter: Preloaded, function: object) -> None:
    result = interpreter.run(function)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[mock.Mock]:
    """In place of the kernels: nothing differs. The cache folder is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cuda = {"get_device_name": lambda _: "GPU", "get_device_capability": lambda _: (9, 0)}
    name = "monta_megatron.exchange.kernels.check.first_difference"
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(
            checks,
            gather_objects=lambda value, group: [value],
            is_fused=lambda choice, _: choice != "torch",
            _checked_kernels=set(),
        ),
        mock.patch.object(torch.distributed, "get_process_group_ranks", lambda group: [0]),
        mock.patch(name, return_value="") as function,
    ):
        yield function


def start_run() -> None:
    """The first use of a device in a process, and the second."""
    dispatcher = SimpleNamespace(
        tp_ep_group=None,
        hidden_shape=(3, 1, 64),
        config=SimpleNamespace(params_dtype=torch.bfloat16),
        options=SimpleNamespace(kernels="auto"),
    )
    checks._checked_kernels.clear()
    for _ in range(2):
        checks.check_kernels(dispatcher, DEVICE)


def test_a_device_is_checked_once(compare: mock.Mock, tmp_path: Path) -> None:
    start_run()
    start_run()
    compare.assert_called_once_with(DEVICE, 64, torch.bfloat16)
    (path,) = (tmp_path / "monta_megatron" / "kernels").iterdir()
    assert "hidden size 64, torch.bfloat16" in path.read_text()


def test_another_device_is_checked_too(compare: mock.Mock) -> None:
    start_run()
    with mock.patch.object(torch.cuda, "get_device_name", lambda _: "another GPU"):
        start_run()
    assert compare.call_count == 2


@pytest.mark.parametrize("content", ["", '{"checked": "something else"}', "\x00"])
def test_a_damaged_cache_is_said(
    compare: mock.Mock, content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start_run()
    (path,) = (tmp_path / "monta_megatron" / "kernels").iterdir()
    path.write_text(content)
    start_run()
    start_run()
    assert compare.call_count == 2
    (line,) = caplog.messages
    assert line.startswith(f"Triton kernels are compared again, as {path} cannot be used: ")


def test_a_cache_that_cannot_be_written_is_said(
    compare: mock.Mock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "monta_megatron").write_text("a file in place of the folder")
    start_run()
    assert compare.call_count == 1
    assert any(line.startswith("Triton kernels are compared again by") for line in caplog.messages)


def test_a_difference_ends_the_run_and_is_not_stored(compare: mock.Mock) -> None:
    compare.return_value = "kernel reduce: rows differs at [1, 2]: 3, PyTorch's operations give 4"
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"on rank 0 kernel reduce: rows differs at \[1, 2\]"
        ):
            start_run()
