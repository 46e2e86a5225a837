"""`monta bench --trace`: one pass of each kind of every row, recorded on all ranks.

CPU ranks read the host's clock: copies block the host, and a thread waits for each collective,
which ends long before the executor waits for it. On a GPU the times come from events on the
executor's streams, converted to the host's clock, without blocking it; a collective ends where the
first stream that waits for it goes on.
"""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist

from monta_megatron.chains.program import Operation
from monta_megatron.common.nodes import BOOT_ID
from monta_megatron.common.text import counted
from monta_megatron.exchange.agreement import gather_objects
from monta_megatron.exchange.collectives import wait_for_all
from monta_megatron.exchange.monitor import Step
from monta_megatron.exchange.streams import gpu_name
from monta_megatron.tools.bench.candidates import Bench, BenchCandidate, no_experts, run_candidate
from monta_megatron.tools.stock_collectives import StockCollective, observed
from monta_megatron.tools.trace import Span, SpanResource, Trace

NUM_BARRIERS = 31
# The work of a stock dispatcher between its collectives: copies, and the host's work for them.
BETWEEN_COLLECTIVES = "permute"


def record(bench: Bench, meta: Mapping[str, Any], path: Path) -> None:
    """Record one run of each candidate, without experts; the first rank writes the file.

    Args:
        bench: dispatchers and their data; every dispatcher has run once.
        meta: `meta` of the benchmark's report.
        path: path of the trace.

    Raises:
        UserError: the file cannot be written; on the first rank.
    """
    offset_us, clock = compare_clocks()
    spans_here: list[Span] = []
    for candidate in bench.candidates:
        is_stock = candidate.kind == "megatron"
        recorder = Recorder(is_device=candidate.batch.hidden.is_cuda, is_stock=is_stock)
        if not is_stock:
            candidate.dispatcher.monitor.recorder = recorder
        wait_for_all()
        with observed(bench.nodes, recorder.run_collective) if is_stock else nullcontext():
            run_candidate(candidate, no_experts, begin=recorder.begin)
            recorder.end()
        spans_here += recorder.spans(_name_of(candidate), dist.get_rank(), offset_us)
    spans_by_rank = gather_objects(spans_here)
    if dist.get_rank() == 0:
        Trace(
            title=_title_of(bench),
            ranks=tuple(f"rank {rank} (node {node})" for rank, node in enumerate(bench.nodes)),
            spans=tuple(span for spans in spans_by_rank for span in spans),
            about={**meta, **clock},
        ).save(path)


def _title_of(bench: Bench) -> str:
    """One line about the machine and the layer."""
    settings, num_nodes = bench.settings, len(set(bench.nodes))
    rate = "" if bench.emulated is None else f" at {bench.emulated.inter_mbit:g} Mbit/s"
    return (
        f"recorded on {len(bench.nodes)} {gpu_name() or 'CPU'} ranks of "
        f"{counted(num_nodes, 'node')}{rate}: TP {settings.tp}, EP {settings.ep}, "
        f"ETP {settings.etp}, top-{settings.top_k} of {settings.experts} experts, "
        f"{settings.routing} routing, H {settings.hidden}, "
        f"{counted(settings.tokens, 'token')} per rank, {settings.dtype}"
    )


def _name_of(candidate: BenchCandidate) -> str:
    if candidate.kind == "megatron":
        return f"stock {candidate.choice.chain}"
    return f"{'auto: ' * (candidate.requested is None)}{candidate.choice.name}"


class Moment(NamedTuple):
    """A time on the host, and on the current stream of a device; None on CPU ranks."""

    host_us: float
    event: torch.cuda.Event | None = None


class Interval(NamedTuple):
    """A span of this rank before its times on a device are known; `group` is a collective's."""

    pass_name: str
    stage: str
    chunk: int | None
    operation: int | None
    resource: SpanResource
    group: str | None
    start: Moment
    end: Moment


def interval_of(pass_name: str, operation: Operation, start: Moment, end: Moment) -> Interval:
    """An operation of a program as it ran."""
    labels = operation.stage, operation.chunk, operation.number, operation.resource
    return Interval(pass_name, *labels, operation.group, start, end)


def now_us() -> float:
    """Microseconds of the monotonic clock, shared by all processes of a host."""
    return time.monotonic_ns() / 1e3


class Recorder:
    """Records one run of a dispatcher on this rank; an `exchange.monitor.Recorder` of ours.

    A copy runs from when its input is ready to its end, a collective from its start until it
    finishes, independent of the wait for it. What stock does runs one after the other.

    Args:
        is_device: whether the rank is a GPU, whose operations the host launches.
        is_stock: whether the dispatcher is Megatron's.
    """

    def __init__(self, *, is_device: bool, is_stock: bool = False) -> None:
        self._is_device, self._is_stock = is_device, is_stock
        self._intervals: list[Interval] = []
        # (pass, number) -> a collective that runs, and its start.
        self._running: dict[tuple[str, int], tuple[Operation, Moment]] = {}
        self._pass_name: str | None = None
        if is_device:
            torch.cuda.synchronize()
        origin = self._now()
        if origin.event is not None:
            origin.event.synchronize()
        self._origin = self._begun = self._launched = self._ready = Moment(now_us(), origin.event)

    def begin(self, pass_name: str) -> None:
        """End the current pass, if any, and begin another, unless it has begun."""
        if self._pass_name != pass_name:
            self.end()
            self._pass_name = pass_name
            self._ready = self._now()
            self._begun = Moment(self._ready.host_us)

    def end(self) -> None:
        """End the current pass, if any."""
        if self._pass_name is not None:
            if self._is_stock:
                self._add_stock(BETWEEN_COLLECTIVES, "memory")
            self._add("", "pass", self._begun, self._now())
        self._pass_name = None

    def run_collective(self, collective: StockCollective, run: Callable[[], Any]) -> Any:
        """Run a collective of stock; record it, and the copies before it."""
        self._add_stock(BETWEEN_COLLECTIVES, "memory")
        result = run()
        self._add_stock(collective.name, collective.resource)
        return result

    def _add_stock(self, stage: str, resource: SpanResource) -> None:
        """Record work of stock, from the end of what it did before until now."""
        start, self._ready = self._ready, self._now()
        self._add(stage, resource, start, self._ready)

    def _add(self, stage: str, resource: SpanResource, start: Moment, end: Moment) -> None:
        name = self._pass_name
        assert name is not None, f"{stage} outside of a pass"
        self._intervals.append(Interval(name, stage, None, None, resource, None, start, end))

    def note(self, step: Step) -> None:
        """Record a step of the executor at the current time."""
        at, (action, pass_name, operation) = self._now(), step
        if action == "begin":
            self._launched = self._ready = at
        elif action == "start":
            self._running[pass_name, operation.number] = operation, at
        elif action == "ready":
            self._ready = at
            if self._is_device:
                # The first stream to wait for a collective is past it.
                self._end_collective(pass_name, operation.number, at)
        elif action == "end":
            run = interval_of(pass_name, operation, self._ready, at)
            if not operation.is_collective:
                self._intervals.append(run)
            if self._is_device:
                start, end = Moment(self._launched.host_us), Moment(at.host_us)
                launch = run._replace(resource="host", group=None, start=start, end=end)
                self._intervals.append(launch)

    def watch(self, works: Sequence[dist.Work], pass_name: str, operation: int) -> list[dist.Work]:
        """On CPU ranks let a thread wait for a collective; returns a handle that waits for it."""
        if self._is_device:
            return list(works)

        def note_end() -> None:
            self._end_collective(pass_name, operation, self._now())

        return [cast(dist.Work, WatchedWork(works, note_end))]

    def _end_collective(self, pass_name: str, number: int, end: Moment) -> None:
        """Record a collective, unless its end has been noted."""
        if (pass_name, number) in self._running:
            operation, start = self._running.pop((pass_name, number))
            self._intervals.append(interval_of(pass_name, operation, start, end))

    def spans(self, row: str, rank: int, offset_us: float = 0.0) -> Iterator[Span]:
        """Everything that was recorded, by the first rank's clock; waits for the device.

        Args:
            row, rank: row and rank of the spans.
            offset_us: this rank's clock minus the first rank's.
        """
        if self._is_device:
            torch.cuda.synchronize()
        # Group -> when it is free: a communicator of NCCL runs its collectives in order.
        free_us: dict[str, float] = {}
        for interval in sorted(self._intervals, key=lambda interval: self._us(interval.start)):
            start_us, end_us = self._us(interval.start), self._us(interval.end)
            if self._is_device and interval.group is not None:
                start_us = max(start_us, free_us.get(interval.group, start_us))
                free_us[interval.group] = end_us
            yield Span(row, rank, *interval[:5], start_us - offset_us, end_us - offset_us)

    def _now(self) -> Moment:
        event = None
        if self._is_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Moment(now_us(), event)

    def _us(self, moment: Moment) -> float:
        """A time on the device, by the host's clock."""
        if moment.event is None or self._origin.event is None:
            return moment.host_us
        return self._origin.host_us + 1e3 * self._origin.event.elapsed_time(moment.event)


class WatchedWork(Thread):
    """Stands in for a collective, and waits for it on a thread of its own."""

    def __init__(self, works: Sequence[dist.Work], note_end: Callable[[], None]) -> None:
        # A daemon, so that an interrupted rank does not wait for collectives with its peers.
        super().__init__(daemon=True)
        self._works, self._note_end = works, note_end
        self._error: RuntimeError | None = None
        self.start()

    def run(self) -> None:
        try:
            for work in self._works:
                work.wait()
            self._note_end()
        except RuntimeError as error:
            self._error = error

    def wait(self, *timeout: Any) -> bool:
        """Return, or fail, as the collective does."""
        self.join()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return, or fail, at once."""
        return not self.is_alive()


def compare_clocks() -> tuple[float, dict[str, Any]]:
    """Compare the clocks of the hosts; called by all ranks of the launch.

    Ranks read their clocks right after barriers, which they leave at nearly the same time: the
    median of the differences is the offset. Barriers are on the host, by Gloo.

    Returns:
        This rank's clock minus the first rank's, in us. Fields for the file: the method, and half
        the interquartile range of the differences, the largest over all ranks.
    """
    if len(set(gather_objects(_host()))) == 1:
        return 0.0, {"clock": "the monotonic clock of one host", "clock_error_us": 0.0}
    here_us = torch.zeros(NUM_BARRIERS, dtype=torch.float64)
    for index in range(NUM_BARRIERS):
        wait_for_all()
        here_us[index] = now_us()
    first_us = here_us.clone()
    dist.broadcast(first_us, src=0)
    low_us, middle_us, high_us = np.percentile((here_us - first_us).numpy(), (25, 50, 75))
    error_us = torch.tensor((high_us - low_us) / 2, dtype=torch.float64)
    dist.all_reduce(error_us, op=dist.ReduceOp.MAX)
    name = f"monotonic clocks compared after {NUM_BARRIERS} barriers"
    return float(middle_us), {"clock": name, "clock_error_us": float(error_us)}


def _host() -> str:
    """Key of the clock; host names differ between emulated nodes of one host."""
    return BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()
