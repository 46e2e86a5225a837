"""Times of an iteration's passes and, in watched iterations, of their collectives.

On a device a pass lies between two events of the caller's stream, which are read an iteration
later, when they have long happened. On CPU ranks the host, which waits for every collective, looks
at its clock.

Some copies are no part of a pass, but one chain needs them and another one does not, such as
Megatron's permutation around chains of permuted tokens. They are timed in the forward and added to
the pass that follows, as often as they are made: in the backward pass they take about as long.

In a watched iteration collectives are timed by resource, and their bytes counted. On a device a
collective lies between events on the stream that issues it and on the first stream that waits for
it. On CPU ranks threads wait for the collectives, as in a recording.

Where computation overlaps the passes, their exposed part is timed too: as the waits of the stream
that computes (`start_wait`), or as what the passes take longer than shared experts do beside them
(`of_shared_experts`).

Notation: P = passes of an iteration.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from monta_megatron.chains.program import FORWARD_BACKWARD, LINKS, NOT_TIMED_US
from monta_megatron.exchange.step_times import HostRecorder

if TYPE_CHECKING:
    from monta_megatron.exchange.monitor import Monitor, Step


# Passes of an iteration that are timed at most: all ranks tell each other so many times. In one
# that is watched, sums are told, of all passes.
MOST_PASSES = 1024

# An event of a device, or nanoseconds of the host's clock.
Mark: TypeAlias = "torch.cuda.Event | int"
_NOT_TIMED = nullcontext()


# The matrices of a layer are multiplied twice as often in its backward pass.
BACKWARD_OVER_FORWARD = 2


class Interval(NamedTuple):
    """A timed interval, and how often it counts."""

    start: Mark
    end: Mark
    times: int = 1


class TimedPass(NamedTuple):
    """A pass, and the intervals that count as its time."""

    name: str
    intervals: list[Interval]


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
        watched: what else is measured of it, where the iteration is watched.
        exposed_us: exposed part of the passes that were collected last; `NOT_TIMED_US` where no
            computation overlaps them.
        last: whose pass was issued last in this process.
    """

    last: ClassVar["PassTimes | None"] = None

    def __init__(self, with_copies: bool) -> None:
        self.is_on = False
        self.exposed_us = NOT_TIMED_US
        self.watched: WatchedPasses | None = None
        self._ended_watched: WatchedPasses | None = None
        self._with_copies = with_copies
        self._passes: list[TimedPass] = []
        self._copies: list[Interval] = []
        self._ended: list[TimedPass] = []
        # Whether the last pass ran on a device.
        self._is_device = False
        # Of the iteration under way, and of the one that has ended.
        self._waits: list[Interval] = []
        self._ended_waits: list[Interval] = []
        self._shared_experts: dict[str, list[Interval]] = {}
        self._ended_shared_experts: dict[str, list[Interval]] = {}
        self._spare_events: list[torch.cuda.Event] = []

    def of_pass(
        self, device: torch.device, pass_name: str, monitor: "Monitor"
    ) -> AbstractContextManager[None]:
        """Context around a pass on this device, of a layer with this monitor."""
        if not self._is_timed:
            return _NOT_TIMED
        if self.watched is None:
            return self._pass(device, pass_name)
        inside = self.watched.of_pass(device, pass_name, monitor)
        return self._watched_pass(device, pass_name, inside)

    def of_copies(self, device: torch.device) -> AbstractContextManager[None]:
        """Context around copies of the forward that are made beside a pass."""
        return self._copy(device) if self._is_timed and self._with_copies else _NOT_TIMED

    def start_wait(self, stream: torch.cuda.Stream) -> "Mark | None":
        """Mark the start of a wait of the stream that computes; None where no wait is timed.

        Args:
            stream: that stream; on CPU ranks the host waits.
        """
        return self._mark(stream if self._is_device else None) if self._is_timed else None

    def end_wait(self, stream: torch.cuda.Stream, start: "Mark") -> None:
        """Mark the end of a wait."""
        end = self._mark(stream if self._is_device else None)
        self._waits.append(Interval(start, end))

    @contextmanager
    def of_shared_experts(self, stream: torch.cuda.Stream | None, pass_name: str) -> Iterator[None]:
        """Context around the forward of shared experts beside a pass.

        Args:
            stream: their stream; None on CPU ranks, where nothing runs beside a pass.
            pass_name: of the pass.
        """
        if stream is None or not self._is_timed:
            yield
            return
        start = self._mark(stream)
        yield
        interval = Interval(start, self._mark(stream))
        self._shared_experts.setdefault(pass_name, []).append(interval)

    def watch(self) -> None:
        """Measure the iteration under way for `WatchedPasses`, before its first pass."""

        self.watched = WatchedPasses()

    def end_iteration(self) -> None:
        """Begin the next iteration; times that were not collected are forgotten."""
        self._ended, self._passes = self._passes, []
        self._ended_watched, self.watched = self.watched, None
        # Those after the last pass.
        if self._ended:
            self._ended[-1].intervals.extend(self._copies)
        self._copies = []
        self._ended_waits, self._waits = self._waits, []
        self._ended_shared_experts, self._shared_experts = self._shared_experts, {}

    def collect(self) -> NDArray[np.int64]:
        """[P] us of the passes of the iteration that has ended, in the order they ran in; once.

        `NOT_TIMED_US` for a pass that the device has not come to. At the earliest when the host has
        waited for something that the device did afterwards, such as the next iteration's counts.
        Of an iteration that was watched, the `WatchedPasses.sums` instead.
        """
        passes, self._ended = self._ended, []
        watched, self._ended_watched = self._ended_watched, None
        us = [self._us(each.intervals) for each in passes]
        self.exposed_us = self._exposed_us([each.name for each in passes], us)
        if watched is not None:
            us = watched.sums(us, _us_between)
        return np.array(us, dtype=np.int64)

    @property
    def _is_timed(self) -> bool:
        return self.is_on and (self.watched is not None or len(self._passes) < MOST_PASSES)

    def _exposed_us(self, names: Sequence[str], pass_us: Sequence[int]) -> int:
        """Exposed part of passes; see `exposed_us`."""
        waits, self._ended_waits = self._ended_waits, []
        shared_experts, self._ended_shared_experts = self._ended_shared_experts, {}
        if waits:
            return sum(max(self._us([wait]), 0) for wait in waits)
        if not shared_experts:
            return NOT_TIMED_US
        hidden_us: dict[str, float] = {}
        for name, intervals in shared_experts.items():
            hidden_us[name] = sum(max(self._us([each]), 0) for each in intervals) / len(intervals)
            hidden_us[f"{name}_backward"] = BACKWARD_OVER_FORWARD * hidden_us[name]
        pairs = zip(names, pass_us, strict=True)
        return round(sum(max(us - hidden_us.get(name, 0.0), 0.0) for name, us in pairs))

    @contextmanager
    def _pass(self, device: torch.device, name: str) -> Iterator[None]:
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        start = self._mark(stream)
        yield
        interval = Interval(start, self._mark(stream))
        self._passes.append(TimedPass(name, [*self._copies, interval]))
        self._copies = []
        self._is_device = stream is not None
        PassTimes.last = self

    @contextmanager
    def _watched_pass(
        self, device: torch.device, name: str, inside: AbstractContextManager[None]
    ) -> Iterator[None]:
        with self._pass(device, name), inside:
            yield

    @contextmanager
    def _copy(self, device: torch.device) -> Iterator[None]:
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        start = self._mark(stream)
        yield
        times = 2 if torch.is_grad_enabled() else 1
        self._copies.append(Interval(start, self._mark(stream), times))

    def _mark(self, stream: torch.cuda.Stream | None) -> Mark:
        if stream is None:
            return time.perf_counter_ns()
        events = self._spare_events
        event = events.pop() if events else torch.cuda.Event(enable_timing=True)
        event.record(stream)
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


class Collective(NamedTuple):
    """A collective that has ended, or will."""

    resource: str
    start: "Mark"
    end: "Mark"


class DeviceCollectives:
    """Events around the collectives of a pass; an `exchange.monitor.Recorder`."""

    def __init__(self) -> None:
        self._starts: dict[int, torch.cuda.Event] = {}
        self._ended: list[Collective] = []

    def note(self, step: "Step") -> None:
        """Record an event where a collective starts, and where a stream has waited for it."""
        number = step.operation.number
        if step.action == "start":
            self._starts[number] = _event()
        elif step.action == "ready" and number in self._starts:
            start = self._starts.pop(number)
            self._ended.append(Collective(step.operation.resource, start, _event()))

    def watch(self, works: Sequence[dist.Work], pass_name: str, operation: int) -> list[dist.Work]:
        """Nothing: the streams wait for it themselves."""
        return list(works)

    def take(self) -> list[Collective]:
        """The collectives of a pass that has been issued."""
        ended, self._ended = self._ended, []
        self._starts.clear()
        return ended


class HostCollectives(HostRecorder):
    """Likewise on CPU ranks."""

    def collectives(self) -> list[Collective]:
        """The collectives of a pass that has ended."""
        taken = self.take()
        return [
            Collective(
                step.operation.resource,
                round(1e3 * step.host_us),
                round(1e3 * taken.ends_us[step.key]),
            )
            for step in taken.steps
            if step.action == "start" and step.key in taken.ends_us
        ]


class WatchedPasses:
    """The passes of one watched iteration."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._collectives: list[Collective] = []
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def of_pass(self, device: torch.device, pass_name: str, monitor: "Monitor") -> Iterator[None]:
        """Context around a pass; a recorder that is at work goes on, and no collective is timed."""
        before = monitor.bytes_by_resource()
        if monitor.recorder is not None:
            yield
        elif device.type == "cuda":
            on_device = monitor.recorder = DeviceCollectives()
            with _recorder_of(monitor):
                yield
            self._collectives += on_device.take()
        else:
            on_host = monitor.recorder = _host_collectives()
            with _recorder_of(monitor):
                yield
            self._collectives += on_host.collectives()
        for link, num_bytes in monitor.bytes_by_resource().items():
            self._bytes[link] += num_bytes - before[link]
        self._names.append(pass_name)

    def sums(
        self, pass_us: Sequence[int], us_between: Callable[["Mark", "Mark"], float | None]
    ) -> list[int]:
        """Figures for the other ranks: us and number by pass, us and bytes by link.

        Args:
            pass_us: of the passes, in order.
            us_between: the time between two marks; None where the device has not come to them.
        """
        us, times, link_us = Counter[str](), Counter[str](), Counter[str]()
        for name, of_pass in zip(self._names, pass_us, strict=True):
            us[name] += max(of_pass, 0)
            times[name] += 1
        for resource, start, end in self._collectives:
            link_us[resource] += round(us_between(start, end) or 0)
        names = [pass_.name for pass_ in FORWARD_BACKWARD]
        by_link = [*(link_us[link] for link in LINKS), *(self._bytes[link] for link in LINKS)]
        return [*(us[name] for name in names), *(times[name] for name in names), *by_link]


@contextmanager
def _recorder_of(monitor: "Monitor") -> Iterator[None]:
    try:
        yield
    finally:
        monitor.recorder = None


@cache
def _host_collectives() -> HostCollectives:
    """One for all: it has threads."""
    return HostCollectives()


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream())
    return event
