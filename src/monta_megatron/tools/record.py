"""`monta bench --trace`: one pass of each kind of every row, recorded on all ranks.

CPU ranks read the host's clock: copies block the host, and a thread waits for each collective,
which ends long before the executor waits for it. On a GPU the times come from events on the
executor's streams, converted to the host's clock, without blocking it; a collective ends where the
first stream that waits for it goes on.
"""

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings

from monta_megatron.chains.program import (
    COMBINE,
    COMBINE_BACKWARD,
    DISPATCH,
    DISPATCH_BACKWARD,
    Operation,
)
from monta_megatron.common.nodes import BOOT_ID
from monta_megatron.common.units import counted
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.exchange.monitor import Step
from monta_megatron.exchange.streams import gpu_name
from monta_megatron.tools.bench.candidates import Bench, BenchCandidate
from monta_megatron.tools.joined_ranks import wait_for_all
from monta_megatron.tools.trace import STOCK, Span, Timeline, Trace, Track, pipeline_name

NUM_BARRIERS = 31
# The work of a stock dispatcher between its collectives: copies, and the host's work for them.
BETWEEN_COLLECTIVES = "permute"
# Functions that Megatron calls: what they are, where, under which names.
STOCK_COLLECTIVES: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("alltoall", dist, ("all_to_all_single",)),
    ("allgather", dist, ("all_gather", "all_gather_into_tensor")),
    ("allgather", mappings, ("dist_all_gather_func",)),
    ("reduce_scatter", dist, ("reduce_scatter", "reduce_scatter_tensor")),
    ("reduce_scatter", mappings, ("dist_reduce_scatter_func",)),
)
# The name of a pass, and an operation of its program.
Key = tuple[str, int]


def record(bench: Bench, meta: Mapping[str, Any], path: Path) -> None:
    """Record one run of each candidate, after one that warms it up; the first rank writes the file.

    Experts return their rows; experts inside the pipeline are left out, as they leave no passes
    apart.

    Args:
        bench: the dispatchers and their data.
        meta: of the benchmark's report.
        path: of the trace.

    Raises:
        ValueError: the file cannot be written; on the first rank.
    """
    here = f"rank {dist.get_rank()} (node {bench.nodes[dist.get_rank()]})"
    clock = Clock()
    timelines = []
    for candidate in bench.candidates:
        if candidate.overlaps:
            continue
        kind = StockRecorder if candidate.kind == "megatron" else ProgramRecorder
        for _ in range(2):
            recorder = kind(candidate.batch.hidden.is_cuda)
            wait_for_all()
            with recorder.attached(candidate.dispatcher):
                _run(candidate, recorder)
        passes, spans = recorder.taken(bench.nodes)
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
    return f"{'auto: ' * candidate.is_auto}{pipeline_name(*candidate.key)}"


def _run(candidate: BenchCandidate, recorder: "Recorder") -> None:
    """A forward and backward pass; the gradient of the probabilities is 1."""
    dispatcher, batch = candidate.dispatcher, candidate.batch
    hidden = batch.hidden.detach().requires_grad_()
    probs = batch.probs.detach().requires_grad_()

    recorder.begin(DISPATCH.name)
    rows, row_probs = dispatcher.dispatch_preprocess(hidden, batch.routing_map, probs)
    rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
    rows, _, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
    for tensor in (rows, row_probs):
        # Called as soon as its gradient is complete, before that of the dispatch begins.
        tensor.register_hook(lambda gradient: recorder.begin(DISPATCH_BACKWARD.name))
    recorder.begin(COMBINE.name)
    sums = dispatcher.combine_preprocess(rows)
    output = dispatcher.combine_postprocess(dispatcher.token_combine(sums))
    recorder.begin(COMBINE_BACKWARD.name)
    torch.autograd.backward(
        [output, row_probs], [batch.output_gradient, torch.ones_like(row_probs)]
    )
    recorder.end()


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

    @contextmanager
    def attached(self, dispatcher: Any) -> Iterator[None]:
        """Record what a dispatcher does."""
        raise NotImplementedError

    def spans(self, nodes: Sequence[int]) -> Iterator[Span]:
        """Everything that was recorded inside of the passes."""
        raise NotImplementedError

    def taken(
        self, nodes: Sequence[int]
    ) -> tuple[dict[str, tuple[float, float]], tuple[Span, ...]]:
        """Passes and spans; waits for the device."""
        if self._is_device:
            torch.cuda.synchronize()
        passes = {
            name: (start.host_us, max(end.host_us, self._us(end)))
            for name, (start, end) in self._passes.items()
        }
        return passes, tuple(self.spans(nodes))

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
        end: Future[None] = Future()

        def wait() -> None:
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                end.set_exception(error)
            else:
                self._ends[pass_name, operation] = self.now()
                end.set_result(None)

        # A daemon, so that an interrupted rank does not wait for collectives with its peers.
        Thread(target=wait, daemon=True).start()
        return [cast(dist.Work, _Watched(end))]

    def spans(self, nodes: Sequence[int]) -> Iterator[Span]:
        steps = [TimedStep(*step, at.host_us, self._us(at)) for step, at in self._steps]
        ends_us = {key: self._us(at) for key, at in self._ends.items()}
        return spans_of(steps, ends_us, self._is_device)


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


class StockRecorder(Recorder):
    """Records the collectives of Megatron's dispatchers, which run one after the other."""

    def __init__(self, is_device: bool) -> None:
        super().__init__(is_device)
        # Pass, name, ranks, start and end.
        self._collectives: list[tuple[str, str, list[int], Moment, Moment]] = []
        self._is_inside = False

    @contextmanager
    def attached(self, dispatcher: Any) -> Iterator[None]:
        with ExitStack() as originals:
            for name, module, functions in STOCK_COLLECTIVES:
                for function in functions:
                    original = getattr(module, function)
                    originals.callback(setattr, module, function, original)
                    setattr(module, function, self._recorded(name, original))
            yield

    def _recorded(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            # One may call another.
            if self._begun is None or self._is_inside:
                return collective(*args, **settings)
            self._is_inside, start = True, self.now()
            try:
                result = collective(*args, **settings)
            finally:
                self._is_inside = False
            ranks = dist.get_process_group_ranks(settings.get("group"))
            self._collectives.append((self._begun[0], name, ranks, start, self.now()))
            return result

        return call

    def spans(self, nodes: Sequence[int]) -> Iterator[Span]:
        for pass_name, (begin, end) in self._passes.items():
            free_us = self._us(begin)
            copies = Span(pass_name, BETWEEN_COLLECTIVES, None, None, "memory", free_us, free_us)
            for of_pass, name, ranks, *times in self._collectives:
                if of_pass == pass_name:
                    start_us, end_us = map(self._us, times)
                    yield copies._replace(start_us=free_us, end_us=start_us)
                    crosses = len({nodes[rank] for rank in ranks}) > 1
                    yield copies._replace(
                        stage=name,
                        resource="inter" if crosses else "intra",
                        start_us=start_us,
                        end_us=end_us,
                    )
                    free_us = end_us
            yield copies._replace(start_us=free_us, end_us=self._us(end))


class Clock:
    """Offset of this rank's clock from the first rank's; created by all ranks of the launch.

    On several hosts, ranks read their clocks right after barriers, which they leave at nearly the
    same time: the median of the differences is the offset. Barriers are on the host, by Gloo.

    Attributes:
        name: how the offset was determined.
        offset_us: this rank's clock minus the first rank's.
        error_us: half the interquartile range of the differences; the largest of any rank.
    """

    def __init__(self) -> None:
        self.name, self.offset_us, self.error_us = "the monotonic clock of one host", 0.0, 0.0
        if len(set(gather_objects(_host()))) == 1:
            return
        here_us = torch.zeros(NUM_BARRIERS, dtype=torch.float64)
        for index in range(NUM_BARRIERS):
            wait_for_all()
            here_us[index] = now_us()
        first_us = here_us.clone()
        dist.broadcast(first_us, src=0)
        low_us, middle_us, high_us = np.percentile((here_us - first_us).numpy(), (25, 50, 75))
        error_us = torch.tensor((high_us - low_us) / 2, dtype=torch.float64)
        dist.all_reduce(error_us, op=dist.ReduceOp.MAX)
        self.name = f"monotonic clocks compared after {NUM_BARRIERS} barriers"
        self.offset_us, self.error_us = float(middle_us), float(error_us)


def _host() -> str:
    """Key of the clock; host names differ between emulated nodes of one host."""
    return BOOT_ID.read_text() if BOOT_ID.exists() else socket.gethostname()
