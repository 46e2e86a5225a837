"""`monta bench --trace`: one pass of each kind of every row, recorded on all ranks.

CPU ranks read the host's clock: copies block the host, and a thread waits for each collective,
which ends long before the executor waits for it. On a GPU the times come from events on the
executor's streams, converted to the host's clock, without blocking it; a collective ends where the
first stream that waits for it goes on.
"""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist

from monta_megatron.chains.program import Operation
from monta_megatron.common.ranks import BOOT_ID
from monta_megatron.common.text import counted
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.exchange.monitor import Step
from monta_megatron.exchange.streams import gpu_name
from monta_megatron.integration.options import AUTO
from monta_megatron.tools.bench.candidates import NO_EXPERTS, Bench, BenchCandidate, run_candidate
from monta_megatron.tools.joined_ranks import wait_for_all
from monta_megatron.tools.stock_collectives import StockCollective, observed
from monta_megatron.tools.trace import STOCK, Span, Timeline, Trace, Track, pipeline_name

NUM_BARRIERS = 31
# The work of a stock dispatcher between its collectives: copies, and the host's work for them.
BETWEEN_COLLECTIVES = "permute"
# The name of a pass, and an operation of its program.
Key = tuple[str, int]


def record(bench: Bench, meta: Mapping[str, Any], path: Path) -> None:
    """Record one run of each candidate; the first rank writes the file.

    Experts return their rows; experts inside the pipeline are left out, as they leave no passes
    apart.

    Args:
        bench: the dispatchers and their data; all of them have run.
        meta: of the benchmark's report.
        path: of the trace.

    Raises:
        ValueError: the file cannot be written; on the first rank.
    """
    here = f"rank {dist.get_rank()} (node {bench.nodes[dist.get_rank()]})"
    clock = compare_clocks()
    timelines = []
    for candidate in bench.candidates:
        if candidate.overlaps:
            continue
        is_device = candidate.batch.hidden.is_cuda
        recorder: StockRecorder | ProgramRecorder
        if candidate.kind == "megatron":
            recorder = StockRecorder(is_device)
            recording = observed(bench.nodes, recorder.run_collective)
        else:
            recorder = ProgramRecorder(is_device)
            recording = recorder.attached(candidate.dispatcher)
        wait_for_all()
        with recording:
            run_candidate(candidate, NO_EXPERTS, begin=recorder.begin)
            recorder.end()
        passes, spans = recorder.taken()
        tracks = gather_objects(Track(here, passes, spans).shifted(-clock.offset_us))
        timelines.append(Timeline(_name_of(candidate), tuple(tracks)))
    if dist.get_rank() == 0:
        about = {**meta, "clock": clock.name, "clock_error_us": clock.error_us}
        Trace(title=_title_of(bench), timelines=tuple(timelines), about=about).save(path)


def _title_of(bench: Bench) -> str:
    """Machine and layer in a line."""
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
        return STOCK if candidate.requested == "alltoall" else f"stock {candidate.requested}"
    return f"{'auto: ' * (candidate.requested == AUTO)}{pipeline_name(*candidate.key)}"


class Moment(NamedTuple):
    """A time on the host, and on the current stream of a device; None on CPU ranks."""

    host_us: float
    event: torch.cuda.Event | None


class TimedStep(NamedTuple):
    """A step of the executor with its times on host and device, equal on CPU ranks."""

    action: str
    pass_name: str
    operation: Operation
    host_us: float
    device_us: float


def now_us() -> float:
    """Microseconds of the monotonic clock, shared by all processes of a host."""
    return time.monotonic_ns() / 1e3


class Recorder:
    """Records when the passes of a dispatcher begin and end on this rank.

    Args:
        is_device: whether the rank is a GPU.
    """

    def __init__(self, is_device: bool) -> None:
        self._is_device = is_device
        self._passes: dict[str, tuple[Moment, Moment]] = {}
        self._begun: tuple[str, Moment] | None = None
        if is_device:
            torch.cuda.synchronize()
        origin = self.now()
        if origin.event is not None:
            origin.event.synchronize()
        self._origin = Moment(now_us(), origin.event)

    def now(self) -> Moment:
        """The current time."""
        event = None
        if self._is_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return Moment(now_us(), event)

    def begin(self, pass_name: str) -> None:
        """End the current pass, if any, and begin another, unless it has begun."""
        if self._begun is None or self._begun[0] != pass_name:
            self.end()
            self._begun = pass_name, self.now()

    def end(self) -> None:
        """End the current pass, if any."""
        if self._begun is not None:
            self._passes[self._begun[0]] = self._begun[1], self.now()
        self._begun = None

    def spans(self) -> Iterator[Span]:
        """Everything that was recorded inside of the passes."""
        raise NotImplementedError

    def taken(self) -> tuple[dict[str, tuple[float, float]], tuple[Span, ...]]:
        """Passes and spans; waits for the device."""
        if self._is_device:
            torch.cuda.synchronize()
        passes = {
            name: (start.host_us, max(end.host_us, self._us(end)))
            for name, (start, end) in self._passes.items()
        }
        return passes, tuple(self.spans())

    def _us(self, moment: Moment) -> float:
        """A time on the device, by the host's clock."""
        if moment.event is None or self._origin.event is None:
            return moment.host_us
        return self._origin.host_us + 1e3 * self._origin.event.elapsed_time(moment.event)


class ProgramRecorder(Recorder):
    """Records the operations of our chains; an `exchange.monitor.Recorder`."""

    def __init__(self, is_device: bool) -> None:
        super().__init__(is_device)
        self._steps: list[tuple[Step, Moment]] = []
        self._ends: dict[Key, Moment] = {}

    @contextmanager
    def attached(self, dispatcher: Any) -> Iterator[None]:
        """Record what a dispatcher does."""
        dispatcher.monitor.recorder = self
        try:
            yield
        finally:
            dispatcher.monitor.recorder = None

    def note(self, step: Step) -> None:
        """Record a step of the executor at the current time."""
        at = self.now()
        if step.action == "ready" and step.operation.is_collective and self._is_device:
            # The first stream to wait for it is past it.
            self._ends.setdefault((step.pass_name, step.operation.number), at)
        self._steps.append((step, at))

    def watch(self, works: Sequence[dist.Work], pass_name: str, operation: int) -> list[dist.Work]:
        """On CPU ranks let a thread wait for a collective; returns a handle that waits for it."""
        if self._is_device:
            return list(works)

        def note_end() -> None:
            self._ends[pass_name, operation] = self.now()

        return [cast(dist.Work, _WatchedWork(works, note_end))]

    def spans(self) -> Iterator[Span]:
        steps = [TimedStep(*step, at.host_us, self._us(at)) for step, at in self._steps]
        ends_us = {key: self._us(at) for key, at in self._ends.items()}
        return spans_of(steps, ends_us, self._is_device)


class _WatchedWork(Thread):
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


def spans_of(
    steps: Sequence[TimedStep], ends_us: Mapping[Key, float], is_device: bool
) -> Iterator[Span]:
    """Spans of one rank from the recorded steps of its executor.

    A copy runs from when its input is ready to its end, a collective from its start until it
    finishes, independent of the wait for it.

    Args:
        steps: in the order of recording.
        ends_us: end of each collective.
        is_device: whether the host launches what a device runs.
    """
    # Group -> when it is free: a communicator of NCCL runs its collectives in order.
    free_us: dict[str | None, float] = {}
    launch_us = start_us = 0.0
    for step in steps:
        operation = step.operation
        if step.action == "begin":
            launch_us = step.host_us
        if step.action in ("begin", "ready", "start"):
            start_us = step.device_us
        if step.action != "end":
            continue
        end_us = step.device_us
        if operation.is_collective:
            end_us = ends_us[step.pass_name, operation.number]
            if is_device:
                start_us = max(start_us, free_us.get(operation.group, start_us))
                free_us[operation.group] = end_us
        run = Span(
            pass_name=step.pass_name,
            stage=operation.stage,
            chunk=operation.chunk,
            operation=operation.number,
            resource=operation.resource,
            start_us=start_us,
            end_us=end_us,
        )
        yield run
        if is_device:
            yield run._replace(resource="host", start_us=launch_us, end_us=step.host_us)


class StockRecorder(Recorder):
    """Records the collectives of Megatron's dispatchers, which run one after the other."""

    def __init__(self, is_device: bool) -> None:
        super().__init__(is_device)
        # By pass, each with its start and end.
        self._collectives: dict[str, list[tuple[StockCollective, Moment, Moment]]] = {}

    def run_collective(self, collective: StockCollective, run: Callable[[], Any]) -> Any:
        """Run a collective, and record when."""
        assert self._begun is not None, f"{collective.name} outside of a pass"
        start = self.now()
        result = run()
        of_pass = self._collectives.setdefault(self._begun[0], [])
        of_pass.append((collective, start, self.now()))
        return result

    def spans(self) -> Iterator[Span]:
        for pass_name, (begin, end) in self._passes.items():
            free_us = self._us(begin)
            copies = Span(pass_name, BETWEEN_COLLECTIVES, None, None, "memory", free_us, free_us)
            for collective, *times in self._collectives.get(pass_name, []):
                start_us, end_us = map(self._us, times)
                yield copies._replace(start_us=free_us, end_us=start_us)
                yield copies._replace(
                    stage=collective.name,
                    resource=collective.resource,
                    start_us=start_us,
                    end_us=end_us,
                )
                free_us = end_us
            yield copies._replace(start_us=free_us, end_us=self._us(end))


class Clock(NamedTuple):
    """This rank's clock, compared with the first rank's.

    Attributes:
        name: how it was compared.
        offset_us: this rank's clock minus the first rank's.
        error_us: half the interquartile range of the differences; the largest of any rank.
    """

    name: str
    offset_us: float = 0.0
    error_us: float = 0.0


def compare_clocks() -> Clock:
    """Compare the clocks of the hosts; called by all ranks of the launch.

    Ranks read their clocks right after barriers, which they leave at nearly the same time: the
    median of the differences is the offset. Barriers are on the host, by Gloo.
    """
    if len(set(gather_objects(_host()))) == 1:
        return Clock("the monotonic clock of one host")
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
    return Clock(name, float(middle_us), float(error_us))


def _host() -> str:
    """Key of the clock; host names differ between emulated nodes of one host."""
    return BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()
