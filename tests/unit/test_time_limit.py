"""What a rank prints before NCCL's time limit ends its process; on a device that is not there."""

import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_device import FakeDevice
from fake_world import fake_world
from stream_recorder import RecordedWork
from test_cuda_branch import ROW_INDICES, make_exchange, source_lanes

from monta_megatron.chains.program import DISPATCH
from monta_megatron.exchange import errors, streams
from monta_megatron.exchange.errors import UNDER_WAY, TimeLimit, versions
from monta_megatron.exchange.executor import run

LIMIT_S = 600.0
# Of hierarchical_alltoall's dispatch in three chunks; R between nodes, N in the node:
#   R of chunk 1: 3   R of chunk 2: 6   N of chunk 1: 9   copies of chunk 1 at the experts: 16 to 18
#   R of chunk 3: 12  N of chunk 2: 15  N of chunk 3: 21
NUMBERS = [3, 6, 9, 12, 15, 21]


class Nccl:
    """Collectives that end when a test says so, and what looks after them.

    Attributes:
        has_ended: whether each has, in the order of issue.
        works: the handles that something holds.
    """

    def __init__(self) -> None:
        self.time_limit = TimeLimit()
        self.has_ended: list[bool] = []
        self.works: weakref.WeakSet[RecordedWork] = weakref.WeakSet()

    def result(self, work: RecordedWork) -> Any:
        """As a future of NCCL's it holds no work."""
        number = len(self.has_ended)
        self.has_ended.append(False)
        self.works.add(work)
        return mock.Mock(done=lambda: self.has_ended[number])

    def run_pass(self, chain: str) -> None:
        """Dispatch, whose host does not wait."""
        device = FakeDevice(listed=[ROW_INDICES])
        exchange, routed = make_exchange(chain, 16, 1, device)
        with device:
            run(exchange, DISPATCH, source_lanes(exchange, routed, torch.bfloat16))


@pytest.fixture
def nccl() -> Iterator[Nccl]:
    made = Nccl()
    with (
        fake_world(),
        mock.patch.object(RecordedWork, "get_future_result", lambda work: made.result(work)),
        mock.patch.object(streams, "device_time_limit", lambda: made.time_limit),
        mock.patch.object(errors, "timeout_of", lambda group: timedelta(seconds=LIMIT_S)),
    ):
        yield made
        made.has_ended = [True] * len(made.has_ended)


@pytest.fixture
def no_thread() -> Iterator[None]:
    with mock.patch.object(errors, "Thread"):
        yield


@pytest.mark.usefixtures("no_thread")
def test_what_has_not_ended_is_said_once(nccl: Nccl) -> None:
    nccl.run_pass("hierarchical_alltoall")
    since_s = nccl.time_limit.pending[1].since_s
    # Between nodes chunk 2 hangs, so that chunk 3 does not start, nor what comes behind them.
    nccl.has_ended = [number in (3, 9) for number in NUMBERS]
    assert nccl.time_limit.late(since_s + 0.89 * LIMIT_S) is None
    text = nccl.time_limit.late(since_s + 0.91 * LIMIT_S)
    last = "operation 18 of 27, put, stage order, chunk 1 of 3"
    assert text == (
        "dispatch: chain hierarchical_alltoall, stage alltoall between nodes, chunk 2 of 3, group "
        "rail (rank 1 of 2) has not ended after 546 s, and its time limit is 600 s\n"
        f"last started: {last}; last ended: {last}; {versions()}"
    )
    assert nccl.time_limit.late(since_s + 0.95 * LIMIT_S) is None
    # It goes on after all, to hang in the node.
    nccl.has_ended = [number < 21 for number in NUMBERS]
    text = nccl.time_limit.late(since_s + 0.96 * LIMIT_S)
    assert text is not None
    place = "stage alltoall in node, chunk 3 of 3, group node (rank 5 of 8)"
    assert text.startswith(f"dispatch: chain hierarchical_alltoall, {place} has not ended after ")
    assert text.endswith(
        f"\nlast started: operation 21 of 27, alltoall, {place}; last ended: operation 20 of 27, "
        f"duplicate, stage copy per rank, chunk 3 of 3; {versions()}"
    )


@pytest.mark.usefixtures("no_thread")
def test_nothing_is_said_or_held_of_passes_that_end(nccl: Nccl) -> None:
    # A failed test may hold a pass of its own.
    others = set(UNDER_WAY)
    for _ in range(3):
        nccl.run_pass("alltoall")
    # The host has gone on, and no handle is left that would hold its collective's outputs.
    assert not nccl.works and set(UNDER_WAY) == others
    # One AllToAll each.
    assert len(nccl.time_limit.pending) == 3
    nccl.has_ended = [True] * 2 + [False]
    assert nccl.time_limit.late(time.monotonic()) is None
    assert len(nccl.time_limit.pending) == 1
    nccl.has_ended = [True] * 3
    assert nccl.time_limit.late(time.monotonic() + LIMIT_S) is None
    assert not nccl.time_limit.pending


@pytest.mark.usefixtures("no_thread")
def test_what_the_host_waits_for_is_said(nccl: Nccl) -> None:
    assert dist.group.WORLD is not None
    with errors.naming_failure("exchange of counts: chain alltoall", dist.group.WORLD):
        assert nccl.time_limit.late(time.monotonic()) is None
        text = nccl.time_limit.late(time.monotonic() + 0.91 * LIMIT_S)
    assert text is not None
    assert text.startswith("exchange of counts: chain alltoall, group tp_ep (rank 13 of ")
    assert text.endswith(f"time limit is 600 s\nno pass is under way; {versions()}")
    assert nccl.time_limit.late(time.monotonic() + LIMIT_S) is None


def test_a_thread_prints_it(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "timeout_of", lambda group: timedelta(seconds=0.2))
    monkeypatch.setattr(errors, "LOOK_S", 0.01)
    nccl.run_pass("alltoall")
    thread = nccl.time_limit._thread
    # It does not keep the process alive.
    assert thread is not None and thread.daemon
    printed = ""
    give_up_s = time.monotonic() + 20
    while not printed.endswith("\n") and time.monotonic() < give_up_s:
        time.sleep(0.05)
        printed += capfd.readouterr().err
    time.sleep(0.1)
    first, second = (printed + capfd.readouterr().err).splitlines()
    assert first.startswith(
        "monta, rank 13: dispatch: chain alltoall, stage alltoall, chunk 1 of 1"
    )
    assert second.startswith("monta, rank 13: last started: operation ")


@pytest.mark.parametrize("variable", ["TORCH_NCCL_BLOCKING_WAIT", None])
def test_nobody_looks_where_the_host_waits(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    """With other backends, or where the variable says so."""
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    else:
        error = RuntimeError("Work::getFutureResult not implemented.")
        monkeypatch.setattr(RecordedWork, "get_future_result", mock.Mock(side_effect=error))
    nccl.time_limit = TimeLimit()
    nccl.run_pass("alltoall")
    assert nccl.time_limit._thread is None and not nccl.time_limit.pending
