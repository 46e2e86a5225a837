"""Start and end times of a pass's copies and collectives.

CPU ranks read the host's clock: copies block the host, and a thread waits for each collective,
which ends long before the executor waits for it. With more ranks than cores the threads cost time:
4 ranks on 2 cores, medians of 21 passes, 216 ms with them and 195 ms without. On a GPU the times
come from events on the executor's streams, converted to the host's clock, without blocking it.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, cast

import torch
import torch.distributed as dist

from monta_megatron.exchange.monitor import Step
from monta_megatron.exchange.recording import Key, TimedStep


def now_us() -> float:
    """Microseconds of the monotonic clock, shared by all processes of a host."""
    return time.monotonic_ns() / 1e3


# More than the executor's collectives in flight.
NUM_THREADS = 32


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """The record of a pass.

    Attributes:
        steps: in the order of recording.
        ends_us: end of each collective.
    """

    steps: list[TimedStep]
    ends_us: dict[Key, float]


class HostRecorder:
    """Records the times of a CPU rank; an `exchange.monitor.Recorder`."""

    def __init__(self) -> None:
        self._waits: SimpleQueue[Callable[[], None]] = SimpleQueue()
        for _ in range(NUM_THREADS):
            # Daemons, so that an interrupted rank does not wait for collectives with its peers.
            Thread(target=self._wait_in_turn, daemon=True).start()
        self._steps: list[TimedStep] = []
        self._ends_us: dict[Key, float] = {}

    def note(self, step: Step) -> None:
        """Record a step at the current time."""
        at_us = now_us()
        self._steps.append(TimedStep(*step, host_us=at_us, device_us=at_us))

    def watch(self, works: Sequence[dist.Work], pass_name: str, operation: int) -> list[dist.Work]:
        """Let a thread wait for a collective; returns a handle that waits for that thread."""
        end: Future[None] = Future()

        def wait() -> None:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                end.set_exception(error)
            else:
                self._ends_us[pass_name, operation] = now_us()
                end.set_result(None)

        self._waits.put(wait)
        return [cast(dist.Work, _Watched(end))]

    def take(self) -> PassRecord:
        """Steps recorded since the last call."""
        taken = PassRecord(steps=self._steps, ends_us=self._ends_us)
        self._steps, self._ends_us = [], {}
        return taken

    def _wait_in_turn(self) -> None:
        while True:
            self._waits.get()()


class DeviceRecorder:
    """Records the times of a GPU; an `exchange.monitor.Recorder`."""

    def __init__(self) -> None:
        self._noted: list[tuple[Step, float, torch.cuda.Event]] = []
        self._ends: dict[Key, torch.cuda.Event] = {}
        torch.cuda.synchronize()
        self._origin = _event(torch.cuda.current_stream())
        self._origin.synchronize()
        self._origin_us = now_us()

    def note(self, step: Step) -> None:
        """Record a step at the host's time, and an event for the current stream's."""
        event = _event(torch.cuda.current_stream())
        if step.action == "ready" and step.operation.is_collective:
            # The first stream to wait for it is past it.
            self._ends.setdefault((step.pass_name, step.operation.number), event)
        self._noted.append((step, now_us(), event))

    def watch(self, works: Sequence[dist.Work], pass_name: str, operation: int) -> list[dist.Work]:
        """Return the works: an event notes the first wait for them."""
        return list(works)

    def take(self) -> PassRecord:
        """Steps recorded since the last call; waits for the device."""
        torch.cuda.synchronize()
        taken = PassRecord(
            steps=[
                TimedStep(*step, host_us=host_us, device_us=self._us(event))
                for step, host_us, event in self._noted
            ],
            ends_us={key: self._us(event) for key, event in self._ends.items()},
        )
        self._noted, self._ends = [], {}
        return taken

    def _us(self, event: torch.cuda.Event) -> float:
        return self._origin_us + 1e3 * self._origin.elapsed_time(event)


class _Watched:
    """Stands in for a collective that a thread waits for."""

    def __init__(self, end: Future[None]) -> None:
        self._end = end

    def wait(self, *timeout: Any) -> bool:
        """Return, or fail, as the collective does."""
        self._end.result()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or fail, at once."""
        return self._end.done()


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
