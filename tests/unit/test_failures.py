"""What an exchange says when it fails."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from stream_recorder import Recorder
from test_stream_safety import Layer

import monta_megatron
from monta_megatron.exchange import operations
from monta_megatron.exchange.errors import ExchangeError, versions
from monta_megatron.exchange.executor import dispatch
from monta_megatron.exchange.streams import CudaStreams, Ready


@pytest.mark.parametrize("where", ["start", "wait"])
def test_a_failed_collective_is_named(where: str) -> None:
    """The AllToAll of the second of three chunks fails, when it is started or waited for."""
    layer = Layer("alltoall_allgather", "ep2_etp2")
    closed = RuntimeError("connection closed by peer")
    failing = closed if where == "start" else mock.Mock(**{"wait.side_effect": closed})
    with (
        mock.patch.object(
            operations, "start_all_to_all", side_effect=[mock.Mock(), failing, mock.Mock()]
        ),
        mock.patch.object(operations, "start_all_gather"),
        pytest.raises(ExchangeError) as error,
    ):
        dispatch(layer.exchange, *layer.inputs())
    # Of pack, alltoall, pack, alltoall, allgather, order, pack, ...: chunk 2 was not started, or
    # its AllToAll is waited for before its AllGather, the ninth.
    number, kind, chunk = (3, "pack", 2) if where == "start" else (8, "alltoall", 3)
    last = f"operation {number} of 12, {kind}, stage {kind}, chunk {chunk} of 3"
    last += ", group ep (rank 0 of 2)" * (kind == "alltoall")
    assert str(error.value) == (
        "dispatch: chain alltoall_allgather, stage alltoall, chunk 2 of 3, group ep (rank 0 of 2) "
        f"failed: connection closed by peer\nlast started: {last}; last ended: {last}; {versions()}"
    )


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
    first, second = str(error.value).splitlines()
    assert first.startswith("dispatch: chain alltoall_dedup, stage copy per ")
    assert first.endswith(" of 5 failed: device-side assert triggered")
    assert second.startswith("last started: operation ")


def test_nccl_has_a_version_where_it_is_the_backend() -> None:
    ours = f"monta-megatron {monta_megatron.__version__}, "
    assert versions().startswith(ours) and versions().endswith(f"torch {torch.__version__}")
    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_backend_config", return_value="cpu:gloo,cuda:nccl"),
        mock.patch.object(torch.cuda.nccl, "version", return_value=(2, 27, 5)),
    ):
        assert versions().endswith(f"torch {torch.__version__}, NCCL 2.27.5")
