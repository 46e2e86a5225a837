"""What a rank prints before NCCL's time limit ends its process; on a device that is not there."""

import itertools
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import golden
import pytest
import torch
import torch.distributed as dist
from fake_device import FakeDevice
from fake_world import fake_world
from stream_recorder import RecordedWork
from test_cuda_branch import ROW_INDICES, make_exchange, source_lanes

from monta_megatron.chains.program import DISPATCH
from monta_megatron.exchange import errors, roll_call
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
        clock: by which they and the limit are timed.
        written: places that the other ranks could read, in order.
    """

    def __init__(self) -> None:
        self.time_limit, self.clock = TimeLimit(), mock.Mock()
        self.clock.monotonic.return_value = 0.0
        self.has_ended: list[bool] = []
        self.written: list[str] = []
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
    """Nobody looks, and no time passes, unless in a test."""
    made = Nccl()
    with (
        fake_world(),
        mock.patch.object(RecordedWork, "get_future_result", lambda work: made.result(work)),
        mock.patch.object(errors, "device_time_limit", lambda: made.time_limit),
        mock.patch.object(errors, "timeout_of", lambda group: timedelta(seconds=LIMIT_S)),
        mock.patch.object(errors, "time", made.clock),
        mock.patch.object(errors, "is_nccl", lambda group: True),
        mock.patch.object(errors, "Thread"),
        mock.patch.object(roll_call, "write", made.written.append),
        mock.patch.object(
            errors, "call_roll", lambda place, ranks, *_: f"roll call of {len(ranks)}"
        ),
    ):
        yield made


def check(name: str, text: object) -> None:
    golden.check(Path(__file__).parent / "golden" / name, f"{text}".replace(versions(), "VERSIONS"))


def test_what_has_not_ended_is_said_once(nccl: Nccl) -> None:
    nccl.run_pass("hierarchical_alltoall")
    said = []
    for ended, shares in (
        # Between nodes chunk 2 hangs, so that chunk 3 does not start, nor what comes behind them.
        ((3, 9), (0.89, 0.91, 0.95)),
        # It goes on after all, to hang in the node.
        (NUMBERS[:-1], (0.96, 0.97)),
    ):
        nccl.has_ended = [number in ended for number in NUMBERS]
        said += [f"{share}: {nccl.time_limit.late(share * LIMIT_S)}\n" for share in shares]
    check("not_ended.txt", "".join(said))


def test_nothing_is_said_or_held_of_passes_that_end(nccl: Nccl) -> None:
    # A failed test may hold a pass of its own.
    others = set(UNDER_WAY)
    for _ in range(3):
        nccl.run_pass("alltoall")
    # The host has gone on, and no handle is left that would hold its collective's outputs.
    assert not nccl.works and set(UNDER_WAY) == others
    # One AllToAll each.
    for ended, at_s, num_pending in (
        ([False] * 3, 0, 3),
        ([True, True, False], 0, 1),
        ([True] * 3, LIMIT_S, 0),
    ):
        nccl.has_ended = ended
        assert nccl.time_limit.late(at_s) is None
        assert len(nccl.time_limit.pending) == num_pending


def test_what_the_host_waits_for_is_said(nccl: Nccl) -> None:
    assert dist.group.WORLD is not None
    what = "exchange of counts: chain alltoall"
    with errors.naming_failure(what, dist.group.WORLD, errors.FEWER_MICRO_BATCHES):
        # Somebody looks before the first pass.
        assert errors.Thread.call_count == 1
        said = [f"{share}: {nccl.time_limit.late(share * LIMIT_S)}\n" for share in (0, 0.91)]
        # Once, while it waits; nothing before half of the limit.
        assert len(nccl.written) == 1 and nccl.written[0].startswith(what)
    said.append(f"afterwards: {nccl.time_limit.late(LIMIT_S)}\n")
    assert nccl.written[1:] == [""]
    check("host_waits.txt", "".join(said))


def test_a_thread_prints_it_once(nccl: Nccl, capsys: pytest.CaptureFixture[str]) -> None:
    """It looks three times, each a time limit after the one before."""
    nccl.clock.monotonic.side_effect = itertools.count(step=LIMIT_S)
    nccl.clock.sleep.side_effect = [None, None, None, KeyboardInterrupt]
    nccl.run_pass("alltoall")
    thread = errors.Thread.call_args.kwargs
    # It does not keep the process alive.
    assert thread["daemon"]
    with pytest.raises(KeyboardInterrupt):
        thread["target"]()
    check("printed_by_a_thread.txt", capsys.readouterr().err)


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
