"""Times of an iteration's passes.

On a device a pass lies between two events of the caller's stream, which are read an iteration
later, when they have long happened. On CPU ranks the host, which waits for every collective, looks
at its clock.

Some copies are no part of a pass, but one chain needs them and another one does not, such as
Megatron's permutation around chains of permuted tokens. They are timed in the forward and added to
the pass that follows, as often as they are made: in the backward pass they take about as long.

Notation: P = passes of an iteration.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from monta_megatron.chains.program import NOT_TIMED_US

# Passes of an iteration that are timed at most: all ranks tell each other so many times.
MOST_PASSES = 1024

# An event of a device, or nanoseconds of the host's clock.
Mark: TypeAlias = torch.cuda.Event | int
_NOT_TIMED = nullcontext()


class Interval(NamedTuple):
    """A timed interval, and how often it counts."""

    start: Mark
    end: Mark
    times: int = 1


class PassTimes:
    """Times the passes of all layers that share an exchange, iteration by iteration.

    The same on all ranks of the exchange, whose passes are the same:

        pass_times.is_on = True         # before the first pass of an iteration
        ...                             # its passes
        pass_times.end_iteration()      # after its last
        ...                             # the host comes to something that it has to wait for
        us = pass_times.collect()

    Args:
        with_copies: whether chains compete that need other copies beside their passes. CUDA graphs
            may capture such copies where no chains do, and then nothing is timed there.

    Attributes:
        is_on: whether what runs from here on is timed.
    """

    def __init__(self, with_copies: bool) -> None:
        self.is_on = False
        self._with_copies = with_copies
        # The intervals that count as the time of each pass.
        self._passes: list[list[Interval]] = []
        self._copies: list[Interval] = []
        self._ended: list[list[Interval]] = []
        self._spare_events: list[torch.cuda.Event] = []

    def of_pass(self, device: torch.device) -> AbstractContextManager[None]:
        """Context around a pass on this device."""
        return self._pass(device) if self._is_timed else _NOT_TIMED

    def of_copies(self, device: torch.device) -> AbstractContextManager[None]:
        """Context around copies of the forward that are made beside a pass."""
        return self._copy(device) if self._is_timed and self._with_copies else _NOT_TIMED

    def end_iteration(self) -> None:
        """Begin the next iteration; times that were not collected are forgotten."""
        self._ended, self._passes = self._passes, []
        # Those after the last pass.
        if self._ended:
            self._ended[-1].extend(self._copies)
        self._copies = []

    def collect(self) -> NDArray[np.int64]:
        """[P] us of the passes of the iteration that has ended, in the order they ran in; once.

        `NOT_TIMED_US` for a pass that the device has not come to. At the earliest when the host has
        waited for something that the device did afterwards, such as the next iteration's counts.
        """
        passes, self._ended = self._ended, []
        return np.array([self._us(intervals) for intervals in passes], dtype=np.int64)

    @property
    def _is_timed(self) -> bool:
        return self.is_on and len(self._passes) < MOST_PASSES

    @contextmanager
    def _pass(self, device: torch.device) -> Iterator[None]:
        start = self._mark(device)
        yield
        self._passes.append([*self._copies, Interval(start, self._mark(device))])
        self._copies = []

    @contextmanager
    def _copy(self, device: torch.device) -> Iterator[None]:
        start = self._mark(device)
        yield
        times = 2 if torch.is_grad_enabled() else 1
        self._copies.append(Interval(start, self._mark(device), times))

    def _mark(self, device: torch.device) -> Mark:
        if device.type != "cuda":
            return time.perf_counter_ns()
        events = self._spare_events
        event = events.pop() if events else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return event

    def _us(self, intervals: list[Interval]) -> int:
        us = 0.0
        for start, end, times in intervals:
            between_us = _us_between(start, end)
            if between_us is None:
                return NOT_TIMED_US
            us += times * between_us
            if not (isinstance(start, int) or isinstance(end, int)):
                self._spare_events += [start, end]
        return round(us)


def _us_between(start: Mark, end: Mark) -> float | None:
    """None where the device has not come to the end."""
    if isinstance(start, int) or isinstance(end, int):
        assert isinstance(start, int) and isinstance(end, int), "one clock"
        return (end - start) / 1e3
    return start.elapsed_time(end) * 1e3 if end.query() else None
