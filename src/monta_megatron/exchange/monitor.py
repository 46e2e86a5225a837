"""Measurements in a training: bytes by stage and resource, events of operations, iteration times.

An iteration is timed by events on a device, by the host's clock on CPU ranks.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch.autograd import profiler

from monta_megatron.chains.program import Operation
from monta_megatron.common.torch_private import is_in_backward, is_profiling
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


@dataclass(kw_only=True, eq=False)
class TimedExchange:
    """The forward pass of one exchange, as an iteration's clock sees it.

    Attributes:
        layer: the layer's dispatcher.
        tokens: the most tokens on any rank.
        host_ns: when the host had its counts, before which the device had finished all work.
        is_trained: whether a backward pass follows, repeats it, or surrounds it.
        may_be_repeated: whether a recomputation may still repeat it.
    """

    layer: object
    tokens: int
    host_ns: int
    is_trained: bool = False
    may_be_repeated: bool = True

    def train(self, _: torch.Tensor) -> None:
        """Hook of the gradient of its output."""
        self.is_trained = True


@dataclass(kw_only=True)
class Segment:
    """A part of an iteration between two marks of one clock.

    Time that begins with an exchange which no backward pass follows, up to the next exchange, does
    not belong to the iteration: log-probabilities for reinforcement learning, whichever mode the
    model is in, and the pause for rewards behind them.

    Attributes:
        start: mark of the first exchange.
        end: mark of the end; None until then.
        exchanges: all of its exchanges.
    """

    start: Mark
    end: Mark | None = None
    exchanges: list[TimedExchange] = field(default_factory=list)

    def us(self) -> float | None:
        """Microseconds that belong to the iteration; None while the device has not reached it."""
        assert self.end is not None, "ended"
        between_ns = [
            (exchange.is_trained, after.host_ns - exchange.host_ns)
            for exchange, after in pairwise(self.exchanges)
        ]
        if not self.exchanges[-1].is_trained:
            return sum(ns for is_trained, ns in between_ns if is_trained) / 1e3
        left_out_us = sum(ns for is_trained, ns in between_ns if not is_trained) / 1e3
        total_us = _us_between(self.start, self.end)
        return None if total_us is None else total_us - left_out_us


class IterationClock:
    """Measures the segments of an iteration without waiting for the device.

    clock.start(device); clock.add(...); ...; clock.stop(); ...; segments = clock.take()
    """

    def __init__(self) -> None:
        self._open: Segment | None = None
        self._segments: list[Segment] = []

    def start(self, device: torch.device) -> None:
        """Begin a segment, unless one is open; an exchange follows."""
        if self._open is None:
            start = _mark(on_host=device.type != "cuda")
            self._open = None if start is None else Segment(start=start)

    def add(self, layer: object, tokens: int) -> TimedExchange | None:
        """Add an exchange whose counts the host has just read; None outside of a segment."""
        if self._open is None:
            return None
        exchange = TimedExchange(layer=layer, tokens=tokens, host_ns=time.perf_counter_ns())
        if is_in_backward():
            exchange.is_trained, exchange.may_be_repeated = True, False
            self._mark_repeated(layer)
        self._open.exchanges.append(exchange)
        return exchange

    def _mark_repeated(self, layer: object) -> None:
        """Mark the layer's last forward pass that no recomputation has repeated yet.

        Reentrant checkpoints run the forward pass of a training without gradients, just as
        log-probabilities are computed. Those come before it, so the last passes are repeated.
        """
        assert self._open is not None, "it runs"
        for exchange in reversed(self._open.exchanges):
            if exchange.layer is layer and exchange.may_be_repeated:
                exchange.is_trained, exchange.may_be_repeated = True, False
                return

    def stop(self) -> None:
        """End the open segment, if any."""
        segment, self._open = self._open, None
        if segment is not None:
            segment.end = _mark(on_host=isinstance(segment.start, int))
            if segment.end is not None:
                self._segments.append(segment)

    def take(self) -> list[Segment]:
        """Segments since the last call; `us_of` can read them once the host has synchronized."""
        segments, self._segments = self._segments, []
        return segments


def us_of(segments: Sequence[Segment]) -> float | None:
    """Total microseconds; None without segments or while the device is still in one."""
    times_us = [segment.us() for segment in segments]
    known_us = [us for us in times_us if us is not None]
    return sum(known_us) if known_us and len(known_us) == len(times_us) else None


def _us_between(start: Mark, end: Mark) -> float | None:
    if isinstance(start, int) or isinstance(end, int):
        assert isinstance(start, int) and isinstance(end, int), "one clock"
        return (end - start) / 1e3
    return start.elapsed_time(end) * 1e3 if end.query() else None


def _mark(on_host: bool) -> Mark | None:
    """A mark; None during CUDA graph capture, where the event would be part of the graph."""
    if on_host:
        return time.perf_counter_ns()
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
