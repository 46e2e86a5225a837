"""What is measured in a watched iteration: collectives by resource, and bytes, pass by pass.

Imported where an iteration is watched. On a device the times lie between events: a collective's
start on the stream that issues it, and its end on the first stream that waits for it. They are read
an iteration later, with those of the passes (`pass_times`). On CPU ranks threads wait for the
collectives, as in a recording.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from monta_megatron.chains.program import FORWARD_BACKWARD, LINKS
from monta_megatron.exchange.step_times import HostRecorder

if TYPE_CHECKING:
    from monta_megatron.exchange.monitor import Monitor, Step
    from monta_megatron.exchange.pass_times import Mark


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
        """What this rank tells the others: us and number by pass, us and bytes by link.

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
