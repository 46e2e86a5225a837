"""Times of passes by the host's clock, worked by hand; on a device see test_cuda_branch."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from monta_megatron.exchange import pass_times
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.pass_times import MOST_PASSES, PassTimes

CPU = torch.device("cpu")


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
        with times.of_pass(CPU):
            clock.pass_us(each)


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
    with monitor.timed_pass(CPU), monitor.timed_copies(CPU):
        pass


def test_what_a_layer_evaluates_is_not_timed(clock: Clock) -> None:
    times, layer = timed(), torch.nn.Module()
    monitor = Monitor(pass_times=times, layer=lambda: layer)
    for training, us in ((True, 10), (False, 20), (True, 30)):
        layer.train(training)
        with monitor.timed_copies(CPU):
            clock.pass_us(1)
        with monitor.timed_pass(CPU):
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
    with pytest.raises(RuntimeError), times.of_pass(CPU):
        raise RuntimeError("a peer has died")
    times.end_iteration()
    assert times.collect().tolist() == []
