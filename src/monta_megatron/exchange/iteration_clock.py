"""Time of an iteration in segments: from events on a device, from the host's clock on CPU ranks."""

import time
from typing import NamedTuple, TypeAlias

import torch

# An event of a device, or nanoseconds of the host's clock.
Mark: TypeAlias = torch.cuda.Event | int


class Segment(NamedTuple):
    """An interval between two marks of one clock."""

    start: Mark
    end: Mark


class IterationClock:
    """Measures the segments of an iteration without waiting for the device.

    clock.start(device); clock.stop(); ...; segments = clock.take()
    """

    def __init__(self) -> None:
        self._start: Mark | None = None
        self._segments: list[Segment] = []

    def start(self, device: torch.device) -> None:
        """Begin a segment, unless one is open."""
        if self._start is None:
            self._start = _mark(on_host=device.type != "cuda")

    def stop(self) -> None:
        """End the open segment, if any."""
        if self._start is not None:
            end = _mark(on_host=isinstance(self._start, int))
            self._segments += [] if end is None else [Segment(self._start, end)]
            self._start = None

    def take(self) -> list[Segment]:
        """Segments since the last call; `us_of` can read them once the host has synchronized."""
        segments, self._segments = self._segments, []
        return segments


def us_of(segments: list[Segment]) -> float | None:
    """Total microseconds; None without segments or while the device is still in one."""
    total_us = 0.0
    for start, end in segments:
        if isinstance(start, int) or isinstance(end, int):
            assert isinstance(start, int) and isinstance(end, int), "one clock"
            total_us += (end - start) / 1e3
        elif end.query():
            total_us += start.elapsed_time(end) * 1e3
        else:
            return None
    return total_us if segments else None


def _mark(on_host: bool) -> Mark | None:
    """A mark; None during CUDA graph capture, where the event would be part of the graph."""
    if on_host:
        return time.perf_counter_ns()
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
