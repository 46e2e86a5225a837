"""Measurements in a training: bytes by stage and resource, events of operations, iteration times.

An iteration is timed by events on a device, by the host's clock on CPU ranks.
"""

import time
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch.autograd import profiler

from monta_megatron.chains.program import Operation
from monta_megatron.common.torch_private import is_in_backward, is_profiling
from monta_megatron.exchange.collectives import PeerGroup

# An event of a device, or nanoseconds of the host's clock.
Mark: TypeAlias = torch.cuda.Event | int
Action = Literal["begin", "start", "wait", "ready", "end"]
# More exchanges than a step has; beyond it the oldest is dropped, as where layers in training mode
# run for days without an optimizer step.
MAX_EXCHANGES = 2**17


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
        layer: weak reference to the layer's dispatcher, which owns the clock through its chooser.
        tokens: the most tokens on any rank.
        host_ns: when the host had its counts, before which the device had finished all work.
        backward_ns: when the host entered its backward pass; None before that, or without one.
        is_trained: whether a backward pass follows, repeats it, or surrounds it.
        may_be_repeated: whether a recomputation may still repeat it.
    """

    layer: weakref.ref[object]
    tokens: int
    host_ns: int
    backward_ns: int | None = None
    is_trained: bool = False
    may_be_repeated: bool = True

    def train(self, _: torch.Tensor) -> None:
        """Hook of the gradient of its output."""
        self.backward_ns, self.is_trained = time.perf_counter_ns(), True


@dataclass(kw_only=True)
class Segment:
    """A part of an iteration between two marks of one clock.

    Time that begins with an exchange which no backward pass follows, up to the next exchange or its
    backward pass, does not belong to the iteration: log-probabilities for reinforcement learning,
    whichever mode the model is in, and the pause for rewards behind them.

        exchange of     policy     reference     policy's backward   end
        time            | belongs  | does not    | belongs           |

    Attributes:
        start: mark of the first exchange.
        end: mark of the end; None until then.
        exchanges: its exchanges, the last `MAX_EXCHANGES` of them.
        backward_ns: when the host entered the backward passes of exchanges, up to the end.
    """

    start: Mark
    end: Mark | None = None
    exchanges: deque[TimedExchange] = field(
        default_factory=partial(deque[TimedExchange], maxlen=MAX_EXCHANGES)
    )
    backward_ns: list[int] = field(default_factory=list)

    def us(self) -> float | None:
        """Microseconds that belong to the iteration.

        Returns:
            None while the device has not reached the end, or if exchanges may have been dropped.
        """
        assert self.end is not None, "ended"
        if len(self.exchanges) == MAX_EXCHANGES:
            return None
        starts_ns = sorted([*(exchange.host_ns for exchange in self.exchanges), *self.backward_ns])
        left_out_ns = 0
        for exchange in self.exchanges:
            if exchange.is_trained:
                continue
            behind = bisect_right(starts_ns, exchange.host_ns)
            if behind == len(starts_ns):
                # Nothing behind it belongs to the iteration.
                return (exchange.host_ns - self.exchanges[0].host_ns - left_out_ns) / 1e3
            left_out_ns += starts_ns[behind] - exchange.host_ns
        total_us = _us_between(self.start, self.end)
        return None if total_us is None else total_us - left_out_ns / 1e3


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
        exchange = TimedExchange(
            layer=weakref.ref(layer), tokens=tokens, host_ns=time.perf_counter_ns()
        )
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
            if exchange.layer() is layer and exchange.may_be_repeated:
                exchange.is_trained, exchange.may_be_repeated = True, False
                return

    def stop(self) -> None:
        """End the open segment, if any."""
        segment, self._open = self._open, None
        if segment is not None:
            segment.end = _mark(on_host=isinstance(segment.start, int))
            begun_ns = (exchange.backward_ns for exchange in segment.exchanges)
            segment.backward_ns = [ns for ns in begun_ns if ns is not None]
            if segment.end is not None:
                self._segments.append(segment)

    def take(self) -> list[Segment]:
        """Segments since the last call; `us_of` can read them once the host has synchronized."""
        segments, self._segments = self._segments, []
        return segments


def us_of(segments: Sequence[Segment]) -> float | None:
    """Total microseconds; None without segments, or where the time of one is unknown."""
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
