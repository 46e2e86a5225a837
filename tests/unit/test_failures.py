"""What an exchange says when it fails."""

from pathlib import Path
from unittest import mock

import golden
import pytest
import torch
import torch.distributed as dist
from stream_recorder import Recorder
from test_stream_safety import Layer

from monta_megatron.exchange import errors, operations
from monta_megatron.exchange.errors import ExchangeError, versions
from monta_megatron.exchange.executor import dispatch
from monta_megatron.exchange.streams import CudaStreams, Ready


def check(name: str, error: ExchangeError) -> None:
    path = Path(__file__).parent / "golden" / f"{name}.txt"
    golden.check(path, f"{error}\n".replace(versions(), "VERSIONS"))


def test_a_collective_that_does_not_start_is_named() -> None:
    """The AllToAll of the second of three chunks; `tests/dist` has one that does not end."""
    layer = Layer("alltoall_allgather", "ep2_etp2")
    works = [mock.Mock(), RuntimeError("connection closed by peer")]
    with (
        mock.patch.object(operations, "start_all_to_all", side_effect=works),
        mock.patch.object(operations, "start_all_gather"),
        mock.patch.object(dist, "get_process_group_ranks", lambda group: [4, 5]),
        mock.patch.object(
            errors, "call_roll", lambda place, ranks, *_: f"roll call of {len(ranks)}"
        ),
        pytest.raises(ExchangeError) as error,
    ):
        dispatch(layer.exchange, *layer.inputs())
    check("fails_to_start", error.value)


class FailingEvent(CudaStreams):
    """The device has failed by the time that a stream waits for a copy."""

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        def wait() -> None:
            raise RuntimeError("device-side assert triggered")

        return super().ready(works) if works else wait


def test_a_failed_copy_is_named() -> None:
    """A copy has no group."""
    layer = Layer("alltoall_dedup", "ep4", 5, Recorder(FailingEvent))
    with layer.recorder, pytest.raises(ExchangeError) as error:
        layer.run()
    check("fails_to_copy", error.value)


def test_nccl_has_a_version_where_it_is_the_backend() -> None:
    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 27, 5)),
    ):
        with_nccl = versions()
    assert with_nccl == f"{versions()}, NCCL 2.27.5"
    assert with_nccl.startswith("monta-megatron ") and f"torch {torch.__version__}" in with_nccl
