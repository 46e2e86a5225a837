"""Measurements in a training: bytes by stage and resource, events of operations, iteration times.

An iteration is timed by events on a device, by the host's clock on CPU ranks.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch.autograd import profiler

from monta_megatron.chains.program import Operation
from monta_megatron.common.torch_private import is_profiling
from monta_megatron.exchange.collectives import PeerGroup

# An event of a device, or nanoseconds of the host's clock.
Mark: TypeAlias = torch.cuda.Event | int
Action = Literal["begin", "start", "wait", "ready", "end"]


class Step(NamedTuple):
    """An event of an operation in a pass.

    An operation begins and ends; in between it may wait until others are ready and start a
    collective. Events `wait` and `ready` name the operation waited for.

    Attributes:
        action: kind of the event.
        pass_name: name of the pass.
        operation: an operation of its program.
    """

    action: Action
    pass_name: str
    operation: Operation


class Recorder(Protocol):
    """Records the steps of a pass, for a trace or a test."""

    def note(self, step: Step) -> None:
        """Record an event at the current time."""

    def watch(
        self, works: Sequence[torch.distributed.Work], pass_name: str, operation: int
    ) -> list[torch.distributed.Work]:
        """Watch a collective just started; returns its replacement for waits."""


@dataclass(kw_only=True)
class Monitor:
    """Filled by the executor as it issues collectives.

    Attributes:
        recorder: records events; None if not recording.
        bytes_sent: (stage, resource) -> payload bytes from this rank to others, counted from
            message formats: "inter" between nodes, "intra" inside one.
    """

    recorder: Recorder | None = None
    bytes_sent: Counter[tuple[str, str]] = field(default_factory=Counter)

    def sent(self, stage: str, group: PeerGroup, num_rows: list[int], row_bytes: int) -> None:
        """Count a message of `num_rows[p]` rows to each peer p."""
        for resource, peers in group.peers.items():
            rows = sum([num_rows[peer] for peer in peers])
            self.bytes_sent[stage, resource] += rows * row_bytes

    def bytes_by_resource(self) -> dict[str, int]:
        """Bytes sent so far by resource, over all stages."""
        totals = {"inter": 0, "intra": 0}
        for (_, resource), num_bytes in self.bytes_sent.items():
            totals[resource] += num_bytes
        return totals

    def names_operations(self) -> bool:
        """Whether `range` has an effect: a recorder or profiler is active."""
        return self.recorder is not None or is_profiling()

    @contextmanager
    def range(self, pass_name: str, chain: str, operation: Operation) -> Iterator[None]:
        """Name an operation in profiles (NVTX with `emit_nvtx`) and time it."""
        name = f"monta {pass_name}: {chain}, {operation.stage}, chunk {operation.chunk}"
        with profiler.record_function(name):
            if self.recorder is not None:
                self.recorder.note(Step("begin", pass_name, operation))
            yield
            if self.recorder is not None:
                self.recorder.note(Step("end", pass_name, operation))


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
