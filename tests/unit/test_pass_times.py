"""Times of passes by the host's clock, worked by hand; on a device see test_cuda_branch."""

import contextlib
from collections.abc import Iterator
from typing import cast
from unittest import mock

import pytest
import torch

from monta_megatron.chains.program import NOT_TIMED_US
from monta_megatron.exchange import pass_times
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.pass_times import MOST_PASSES, PassTimes

CPU = torch.device("cpu")
STREAM = cast("torch.cuda.Stream", "of the schedule; a CPU rank has none")


class Clock:
    """The host's clock, which only the tests move."""

    def __init__(self) -> None:
        self.us = 0

    def pass_us(self, us: int) -> None:
        self.us += us

    def read_ns(self) -> int:
        return 1000 * self.us


@pytest.fixture
def clock() -> Iterator[Clock]:
    made = Clock()
    with mock.patch.object(pass_times.time, "perf_counter_ns", made.read_ns):
        yield made


def timed(with_copies: bool = True) -> PassTimes:
    made = PassTimes(with_copies)
    made.is_on = True
    return made


def run(times: PassTimes, clock: Clock, *us: int) -> None:
    for each in us:
        clock.pass_us(1)
        with times.of_pass(CPU, "dispatch", Monitor()):
            clock.pass_us(each)


def overlapped(times: PassTimes, clock: Clock, exchange_us: int, wait_us: int) -> None:
    """A pass, and the wait of what computes beside it."""
    run(times, clock, exchange_us)
    start = times.start_wait(STREAM)
    clock.pass_us(wait_us)
    if start is not None:
        times.end_wait(STREAM, start)


def copy(times: PassTimes, clock: Clock, us: int) -> None:
    with times.of_copies(CPU):
        clock.pass_us(us)


def test_an_iteration_is_collected_in_the_next(clock: Clock) -> None:
    times = timed()
    run(times, clock, 10, 20, 30)
    assert times.collect().tolist() == []
    times.end_iteration()
    run(times, clock, 40)
    assert times.collect().tolist() == [10, 20, 30]
    assert times.collect().tolist() == []
    times.end_iteration()
    assert times.collect().tolist() == [40]


def test_copies_count_for_the_backward_too(clock: Clock) -> None:
    """Permute, dispatch, combine, unpermute, two backward passes, whose copies are not timed."""
    times = timed()
    copy(times, clock, 3)
    run(times, clock, 10, 10)
    copy(times, clock, 4)
    run(times, clock, 10, 10)
    # Of the next layer's forward: what is recomputed has no backward of its own.
    with torch.no_grad():
        copy(times, clock, 5)
    times.end_iteration()
    assert times.collect().tolist() == [16, 10, 18, 15]


def test_copies_are_left_out_where_all_chains_need_them(clock: Clock) -> None:
    times = timed(with_copies=False)
    copy(times, clock, 3)
    run(times, clock, 10)
    times.end_iteration()
    assert times.collect().tolist() == [10]


def test_nothing_is_timed_while_it_is_off(clock: Clock) -> None:
    times = timed()
    run(times, clock, 10)
    times.is_on = False
    run(times, clock, 20)
    copy(times, clock, 5)
    times.end_iteration()
    assert times.collect().tolist() == [10]
    monitor = Monitor()
    with monitor.timed_pass(CPU, "dispatch"), monitor.timed_copies(CPU):
        pass


def test_what_a_layer_evaluates_is_not_timed(clock: Clock) -> None:
    times, layer = timed(), torch.nn.Module()
    monitor = Monitor(pass_times=times, layer=lambda: layer)
    for training, us in ((True, 10), (False, 20), (True, 30)):
        layer.train(training)
        with monitor.timed_copies(CPU):
            clock.pass_us(1)
        with monitor.timed_pass(CPU, "dispatch"):
            clock.pass_us(us)
    times.end_iteration()
    assert times.collect().tolist() == [12, 32]


def test_an_iteration_without_passes(clock: Clock) -> None:
    times = timed()
    copy(times, clock, 5)
    times.end_iteration()
    assert times.collect().tolist() == []
    run(times, clock, 10)
    times.end_iteration()
    assert times.collect().tolist() == [10]


def test_a_bounded_number_of_passes_is_timed(clock: Clock) -> None:
    times = timed()
    run(times, clock, *[1] * (MOST_PASSES + 5))
    times.end_iteration()
    assert len(times.collect()) == MOST_PASSES


def test_a_pass_that_fails_is_no_pass(clock: Clock) -> None:
    times = timed()
    with pytest.raises(RuntimeError), times.of_pass(CPU, "dispatch", Monitor()):
        raise RuntimeError("a peer has died")
    times.end_iteration()
    assert times.collect().tolist() == []


def test_the_exposed_part_is_what_computation_waits(clock: Clock) -> None:
    times = timed()
    run(times, clock, 10)
    times.end_iteration()
    times.collect()
    assert times.exposed_us == NOT_TIMED_US
    overlapped(times, clock, 100, 30)
    overlapped(times, clock, 200, 0)
    times.end_iteration()
    times.is_on = False
    overlapped(times, clock, 50, 50)
    assert times.collect().tolist() == [100, 200] and times.exposed_us == 30
    times.end_iteration()
    assert times.collect().tolist() == [] and times.exposed_us == NOT_TIMED_US


def test_shared_experts_hide_twice_as_much_in_the_backward_pass(clock: Clock) -> None:
    """Two layers: (30 + 50) / 2 = 40 us beside dispatch, 10 beside combine, 80 and 20 backward."""
    times = timed()
    with mock.patch.object(PassTimes, "_mark", lambda *_: clock.read_ns()):
        for us in (30, 50):
            for name, hidden_us in (("dispatch", us), ("combine", 10)):
                with times.of_pass(CPU, name, Monitor()):
                    clock.pass_us(60)
                with times.of_shared_experts(STREAM, name):
                    clock.pass_us(hidden_us)
        for _ in range(2):
            for name, us in (("combine_backward", 65), ("dispatch_backward", 70)):
                with times.of_pass(CPU, name, Monitor()):
                    clock.pass_us(us)
        times.end_iteration()
        assert times.collect().tolist() == [60] * 4 + [65, 70] * 2
        # 60 - 40, 60 - 10, 65 - 20, and nothing of 70.
        assert times.exposed_us == 2 * (20 + 50 + 45)


def test_nothing_runs_beside_a_pass_on_cpu_ranks(clock: Clock) -> None:
    times = timed()
    run(times, clock, 10)
    with times.of_shared_experts(None, "dispatch"):
        clock.pass_us(5)
    times.end_iteration()
    assert times.collect().tolist() == [10] and times.exposed_us == NOT_TIMED_US


class Event:
    """The event that the nodes of a micro-batch share; a wait for it takes `wait_us`."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.wait_us = clock, 0

    def wait(self, stream: object) -> None:
        self.clock.pass_us(self.wait_us)

    def record(self, stream: object) -> None:
        pass


@pytest.mark.old_end
def test_waits_of_megatrons_schedule_are_timed(clock: Clock) -> None:
    """Of the nodes that compute, on Megatron's own nodes; those that communicate hide theirs."""
    from megatron.core.pipeline_parallel import utils

    from monta_megatron.integration.metrics import time_waits

    times, event = timed(), Event(clock)
    # Whichever of them this release has.
    name = "stream_acquire_context"
    owner = utils if hasattr(utils, name) else utils.ScheduleNode
    unchanged = getattr(owner, name)

    def run_node(stream: object, wait_us: int, *exchange_us: int) -> None:
        event.wait_us = wait_us
        node = utils.ScheduleNode(
            lambda rows: (run(times, clock, *exchange_us), clock.pass_us(7), rows)[-1],
            stream,
            event,
        )
        node.forward(torch.zeros(1))

    with (
        mock.patch.object(owner, name, unchanged),
        mock.patch.object(utils, "_COMM_STREAM", "communicates"),
        mock.patch.object(torch.cuda, "stream", lambda _: contextlib.nullcontext()),
        # 0.16 asks for it always, and a torch without CUDA has none.
        mock.patch.object(torch.cuda, "nvtx"),
        mock.patch.object(PassTimes, "last", None),
    ):
        time_waits.__wrapped__()
        run_node("computes", 11)
        run_node("communicates", 13, 100)
        run_node("computes", 40)
        run_node("communicates", 13, 200)
        run_node("computes", 0)
    times.end_iteration()
    assert times.collect().tolist() == [100, 200] and times.exposed_us == 40
