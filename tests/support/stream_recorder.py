"""A recording stand-in for CUDA streams, on CPU tensors, and what it checks.

While a `Recorder` is entered, `torch.cuda`'s streams are its own, so the executor's `CudaStreams`
runs as it is, and every tensor operation and every collective is an access of the stream that was
current when it was issued. The rules are CUDA's and NCCL's:

    stream       its operations run in the order of issue; streams know nothing of each other
    event        holds what its stream had issued; a wait orders the waiting stream behind that
    collective   its group's own stream waits for the current one, then runs; `wait()` makes the
                 current stream wait for it, and nothing but the executor holds its tensors. With
                 NCCL's launch order it starts only when the one that the host issued before it, of
                 any group, has started (`times_in_one_queue`)
    memory       belongs to the stream that was current at its allocation. Once freed it may be
                 reused as soon as that stream, and every stream named to `record_stream`, has done
                 what it was issued before the free. So what is allocated may be in use until its
                 stream has done what it was issued before the allocation

Order is kept as vector clocks: stream -> how many of its operations have surely run. Two accesses
are ordered if the later one's clock holds the earlier one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monta_megatron.exchange import executor, operations, streams
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.monitor import Monitor, Step

Clock = dict[str, int]
# First byte of some memory, and the one behind its last.
Span = tuple[int, int]

# Copies are over at once next to collectives, but take some time.
DURATIONS = {"kernel": 1e-6, "collective": 1.0, "wait": 0.0}


class Finding(NamedTuple):
    """Something that could go wrong on a GPU."""

    kind: Literal["race", "reuse", "sync"]
    text: str


@dataclass(frozen=True, eq=False)
class Entry:
    """What was issued to the device: a kernel, a collective, or a wait for another entry.

    Attributes:
        tick: of a kernel or a collective, its number on its stream. An allocation has that of the
            kernel before it.
    """

    kind: Literal["kernel", "collective", "wait", "allocation"]
    stream: str
    name: str
    target: "Entry | None" = None
    step: Step | None = None
    group: str = ""
    tick: int = 0

    def is_in(self, clock: Clock) -> bool:
        """Whether it has surely run once everything in `clock` has."""
        return clock.get(self.stream, 0) >= self.tick

    def __str__(self) -> str:
        return f"{self.name} on {self.stream}"


@dataclass(eq=False)
class Buffer:
    """Memory of one allocation, the latest accesses to it, and the streams that hold it back.

    Attributes:
        written: by bytes, which may overlap.
        read: by bytes and stream.
    """

    memory: StorageWeakRef
    owner: "RecordedStream"
    num_bytes: int
    written: dict[Span, Entry]
    read: dict[tuple[Span, str], Entry] = field(default_factory=dict)
    recorded: "set[RecordedStream]" = field(default_factory=set)

    def accesses(self, span: Span, with_reads: bool) -> list[Entry]:
        """Those that share bytes with a span."""
        begin, end = span
        found = [(place, entry) for place, entry in self.written.items()]
        if with_reads:
            found += [(place, entry) for (place, _), entry in self.read.items()]
        return [entry for (first, last), entry in found if first < end and begin < last]


class RecordedEvent(NamedTuple):
    """What a stream had issued when the event was recorded."""

    clock: Clock
    last: Entry | None


class RecordedStream:
    """In place of `torch.cuda.Stream`."""

    def __init__(self, recorder: "Recorder", name: str, priority: int = 0) -> None:
        self.recorder = recorder
        self.name = name
        self.priority = priority
        # A handle of the driver's.
        self.cuda_stream = id(self)
        self.clock: Clock = {}
        self.last: Entry | None = None

    def record_event(self) -> RecordedEvent:
        return RecordedEvent(dict(self.clock), self.last)

    def wait_event(self, event: RecordedEvent) -> None:
        self.recorder.find_freed()
        _advance(self.clock, event.clock)
        self.issue(Entry("wait", self.name, "wait", target=event.last))

    def wait_stream(self, stream: "RecordedStream") -> None:
        self.wait_event(stream.record_event())

    def issue(self, entry: Entry) -> None:
        self.recorder.queue.append(entry)
        self.last = entry


@dataclass(eq=False)
class RecordedWork:
    """In place of `torch.distributed.Work`.

    It keeps no tensor alive, as NCCL's own does: the executor must not rely on that.
    """

    recorder: "Recorder"
    end: RecordedEvent

    def wait(self) -> None:
        self.recorder.current.wait_event(self.end)

    def is_completed(self) -> bool:
        return False

    def get_future_result(self) -> Any:
        raise RuntimeError("Work::getFutureResult not implemented.")  # torch's words


class Recorder(TorchDispatchMode):
    """Records all that is issued while it is entered.

    Attributes:
        monitor: hand it to the exchange: it names the stage and chunk of every collective.
        queue: everything issued to the device, in the order of issue.
        findings: what the checker found, in the order of issue.
        in_turn: whether each collective starts once those issued before have ended.
        side_streams: that the executor has made.
        num_switches: calls that set the current stream; a context is two.
        live_bytes: of all memory that was touched and not freed yet.
        peak_bytes: the most of it since `forget_peak`.
    """

    def __init__(
        self,
        make_streams: Callable[[torch.device], streams.Streams] = streams.CudaStreams,
        is_order_kept: bool = True,
    ) -> None:
        super().__init__()
        self._is_order_kept, self.in_turn = is_order_kept, list[bool]()
        self.monitor = Monitor(recorder=self)
        self.queue: list[Entry] = []
        self.findings: list[Finding] = []
        self.side_streams: list[RecordedStream] = []
        self.num_switches = self.live_bytes = self.peak_bytes = 0
        self.current = RecordedStream(self, "caller", priority=-1)
        self._make_streams = make_streams
        self._buffers: dict[int, Buffer] = {}
        self._group_streams: dict[str, RecordedStream] = {}
        self._is_muted = False
        self._patches = ExitStack()

    def __enter__(self) -> "Recorder":
        streams._drawn.cache_clear()
        for patch in (
            mock.patch.multiple(
                torch.cuda,
                Stream=self._make_side_stream,
                stream=self._on,
                set_stream=self._set,
                current_stream=lambda device=None: self.current,
            ),
            mock.patch.object(
                torch.Tensor,
                "record_stream",
                lambda tensor, stream: self._buffer_of(tensor).recorded.add(stream),
            ),
            mock.patch.object(executor, "streams_for", self._make_streams),
            mock.patch.object(streams, "communicators_overlap", lambda: self._is_order_kept),
            mock.patch.object(streams.CudaStreams, "_latest", None),
            mock.patch.multiple(
                operations, start_all_to_all=self._start, start_all_gather=self._start
            ),
        ):
            self._patches.enter_context(patch)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()
        streams._drawn.cache_clear()
        self.find_freed()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A range in a profile is no work of the device, nor is the question where a tensor is.
        if self._is_muted or func.namespace in ("profiler", "prim"):
            return func(*args, **kwargs)
        self.find_freed()
        name = str(func.overloadpacket).removeprefix("aten.")
        if name in ("_local_scalar_dense", "nonzero", "masked_select"):
            self.findings.append(Finding("sync", f"{name} on {self.current.name} stops the host"))
        result = func(*args, **kwargs)
        if any(
            alias.alias_info and not alias.alias_info.is_write for alias in func._schema.returns
        ):
            return result  # a view
        written, read = _written_and_read(func, args, kwargs)
        new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for tensor in new:
            self._buffer_of(tensor)
        # In deterministic mode torch fills memory that nothing has been written to.
        if "empty" not in name or torch.are_deterministic_algorithms_enabled():
            self.kernel(name, read, written + new)
        return result

    def note(self, step: Step) -> None:
        """See `exchange.monitor.Recorder`."""
        self._step = step

    def watch(self, works: Any, pass_name: str, operation: int) -> Any:
        """See `exchange.monitor.Recorder`; no times are taken."""
        return works

    def kernel(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Record the launch of a kernel."""
        self.find_freed()
        self._run(self.current, read, written, kind="kernel", name=name)

    def find_freed(self) -> None:
        """Check the memory that was freed since the last call.

        Called before anything changes the clocks, so they still are what they were at the free.
        """
        for key in [key for key, buffer in self._buffers.items() if buffer.memory.expired()]:
            buffer, reuse = self._buffers.pop(key), Clock()
            self.live_bytes -= buffer.num_bytes
            for stream in (buffer.owner, *buffer.recorded):
                _advance(reuse, stream.clock)
            for entry in (*buffer.written.values(), *buffer.read.values()):
                if not entry.is_in(reuse):
                    text = f"memory of {buffer.owner.name} may be reused before {entry} has run"
                    self.findings.append(Finding("reuse", text))

    def forget_peak(self, inputs: list[torch.Tensor]) -> int:
        """Begin anew with what is live now, `inputs` included: their bytes."""
        for tensor in inputs:
            self._buffer_of(tensor)
        self.find_freed()
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def collectives(self) -> list[Entry]:
        """The collectives in the order of issue."""
        return [entry for entry in self.queue if entry.kind == "collective"]

    def owners_of_live_memory(self) -> set[str]:
        """The streams that own memory which was not freed yet."""
        return {buffer.owner.name for buffer in self._buffers.values()}

    def _buffer_of(self, tensor: torch.Tensor) -> Buffer:
        storage, owner = tensor.untyped_storage(), self.current
        # Its weak reference keeps the key from being used again.
        if storage._cdata not in self._buffers:
            num_bytes, tick = storage.nbytes(), owner.clock.get(owner.name, 0)
            made = Entry("allocation", owner.name, "allocation", tick=tick)
            buffer = Buffer(StorageWeakRef(storage), owner, num_bytes, {(0, num_bytes): made})
            self._buffers[storage._cdata] = buffer
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return self._buffers[storage._cdata]

    def _run(
        self,
        stream: RecordedStream,
        read: Iterable[torch.Tensor],
        written: Iterable[torch.Tensor],
        **fields: Any,
    ) -> None:
        """Issue what reads and writes memory; the fields are those of its entry."""
        tick = stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        entry = Entry(stream=stream.name, tick=tick, **fields)
        for tensor in read:
            self._access(stream, tensor, entry, is_write=False)
        for tensor in written:
            self._access(stream, tensor, entry, is_write=True)
        stream.issue(entry)

    def _access(
        self, stream: RecordedStream, tensor: torch.Tensor, entry: Entry, is_write: bool
    ) -> None:
        if tensor.numel() == 0:
            return
        buffer, span = self._buffer_of(tensor), span_bytes(tensor)
        for earlier in buffer.accesses(span, with_reads=is_write):
            if not earlier.is_in(stream.clock):
                text = f"{entry} does not wait for {earlier} (memory of {buffer.owner.name})"
                self.findings.append(Finding("race", text))
        if is_write:
            buffer.written[span] = entry
        else:
            buffer.read[span, stream.name] = entry

    def _make_side_stream(self, device: torch.device, priority: int) -> RecordedStream:
        name = f"stage {len(self.side_streams)}"
        self.side_streams.append(RecordedStream(self, name, priority))
        return self.side_streams[-1]

    @contextmanager
    def _on(self, stream: RecordedStream) -> Iterator[None]:
        before = self.current
        self._set(stream)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, stream: RecordedStream) -> None:
        self.current = stream
        self.num_switches += 1

    def _start(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        receive: list[int],
        send: list[int],
        group: PeerGroup,
    ) -> RecordedWork:
        """A collective of ranks that all have the same tokens.

        On the way to the experts each peer sends what this rank sends to itself, or gathers. On the
        way back there are no ids, so the values do not matter.
        """
        is_gather = len(input_) != sum(send)
        own = input_ if is_gather else input_.split(send)[group.rank]
        return self.collective(output, input_, own if {*receive} == {len(own)} else None, group)

    def collective(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        share: torch.Tensor | None,
        group: PeerGroup,
    ) -> RecordedWork:
        """Record a collective in which every rank sends `share`; None if values do not matter."""
        # NCCL takes no others.
        assert input_.is_contiguous() and output.is_contiguous(), "a message with gaps"
        with self.muted():
            if share is None:
                output.zero_()
            else:
                output.copy_(torch.cat([share] * group.size))
        self.in_turn += [all(each.is_in(self.current.clock) for each in self.collectives())]
        made = RecordedStream(self, f"group {group.name}")
        stream = self._group_streams.setdefault(group.name, made)
        stream.wait_stream(self.current)
        step = self._step
        fields = {"name": step.operation.stage, "step": step, "group": group.name}
        self._run(stream, [input_], [output], kind="collective", **fields)
        return RecordedWork(self, stream.record_event())

    def muted(self) -> AbstractContextManager[Any]:
        return mock.patch.object(self, "_is_muted", True)


def _advance(clock: Clock, other: Clock) -> None:
    """Let a clock hold all that another one holds."""
    for name, tick in other.items():
        clock[name] = max(clock.get(name, 0), tick)


def span_bytes(tensor: torch.Tensor) -> Span:
    """Where a tensor's bytes lie in its memory."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    steps = (
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return begin, begin + (sum(steps) + 1) * tensor.itemsize


def _written_and_read(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors among an operation's arguments."""
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        into = written if is_written else read
        into += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written, read


def times_in_one_queue(
    queue: list[Entry],
    of_stream: bool = False,
    in_launch_order: bool = False,
    durations: Mapping[str, float] = DURATIONS,
) -> dict[Entry, tuple[float, float]]:
    """When each entry starts and ends if all streams, or each, share one launch queue, in order.

    That is CUDA_DEVICE_MAX_CONNECTIONS=1: an entry that has to wait, for its stream or as a wait,
    blocks everything behind it. What has started runs on beside the others; recording an event
    takes no place in the queue.

    Args:
        queue: see `Recorder`.
        of_stream: whether each stream has a queue of its own.
        in_launch_order: whether a collective starts only when the one that the host issued before
            it, of any group, has started: NCCL_LAUNCH_ORDER_IMPLICIT=1.
        durations: by group of a collective, or by kind of an entry.
    """
    times: dict[Entry, tuple[float, float]] = {}
    last_on: dict[str, Entry] = {}
    head = last_started = 0.0
    for entry in queue:
        before = (last_on.get(entry.stream), entry.target)
        head = max(
            [0.0 if of_stream else head, *(times[one][1] for one in before if one is not None)]
        )
        if entry.kind == "collective" and in_launch_order:
            head = last_started = max(head, last_started)
        times[entry] = (head, head + durations.get(entry.group, durations[entry.kind]))
        last_on[entry.stream] = entry
    return times
