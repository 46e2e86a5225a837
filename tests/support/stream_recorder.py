"""A recording stand-in for CUDA streams, on CPU tensors, and what it checks.

While a `Recorder` is entered, `torch.cuda`'s streams are its own, so the executor's `CudaStreams`
runs as it is, and every tensor operation and every collective is an access of the stream that was
current when it was issued. The rules are CUDA's and NCCL's:

    stream       its operations run in the order of issue; streams know nothing of each other
    event        holds what its stream had issued; a wait orders the waiting stream behind that
    collective   its group's own stream waits for the current one, then runs; `wait()` makes the
                 current stream wait for it, and nothing but the executor holds its tensors
    memory       belongs to the stream that was current at its allocation. Once freed it may be
                 reused as soon as that stream, and every stream named to `record_stream`, has done
                 what it was issued before the free. So what is allocated may be in use until its
                 stream has done what it was issued before the allocation

Order is kept as vector clocks: stream -> how many of its operations have surely run. Two accesses
are ordered if the later one's clock holds the earlier one.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest import mock

import torch
from step_list import StepList
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monta_megatron.exchange import executor, operations, streams
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.monitor import Monitor, Step

Clock = dict[str, int]

# Copies are over at once next to collectives, but take some time.
COLLECTIVE_DURATION = 1.0
KERNEL_DURATION = 1e-6


@dataclass(frozen=True)
class Finding:
    """Something that could go wrong on a GPU."""

    kind: Literal["race", "reuse", "sync"]
    text: str


@dataclass(frozen=True, eq=False)
class Entry:
    """What was issued to the device: a kernel, a collective, or a wait for another entry."""

    kind: Literal["kernel", "collective", "wait"]
    stream: str
    name: str
    target: "Entry | None" = None
    step: Step | None = None
    group: str = ""


@dataclass(frozen=True)
class Access:
    """One operation's touch of a buffer."""

    stream: str
    tick: int
    name: str

    def is_in(self, clock: Clock) -> bool:
        """Whether it has surely run once everything in `clock` has."""
        return clock.get(self.stream, 0) >= self.tick

    def __str__(self) -> str:
        return f"{self.name} on {self.stream}"


@dataclass(eq=False)
class Piece:
    """Bytes of a buffer that an operation has touched, and the accesses to them."""

    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)


@dataclass(eq=False)
class Buffer:
    """Memory of one allocation, its pieces, and the streams that hold it back from reuse.

    Attributes:
        pieces: by their first byte and the one behind the last; they may overlap.
    """

    memory: StorageWeakRef
    owner: "RecordedStream"
    num_bytes: int
    pieces: dict[tuple[int, int], Piece]
    recorded: "set[RecordedStream]" = field(default_factory=set)

    def overlapping(self, span: tuple[int, int]) -> list[Piece]:
        """The pieces that share bytes with a span, which is one of them from now on."""
        self.pieces.setdefault(span, Piece())
        begin, end = span
        return [
            piece for (first, last), piece in self.pieces.items() if first < end and begin < last
        ]


@dataclass(frozen=True)
class RecordedEvent:
    """What a stream had issued when the event was recorded."""

    clock: Clock
    last: Entry | None


class RecordedStream:
    """In place of `torch.cuda.Stream`."""

    def __init__(self, recorder: "Recorder", name: str, priority: int = 0) -> None:
        self.recorder = recorder
        self.name = name
        self.priority = priority
        self.clock: Clock = {}
        self.last: Entry | None = None

    def record_event(self) -> RecordedEvent:
        return RecordedEvent(dict(self.clock), self.last)

    def wait_event(self, event: RecordedEvent) -> None:
        self.recorder.find_freed()
        for name, tick in event.clock.items():
            self.clock[name] = max(self.clock.get(name, 0), tick)
        self.issue(Entry("wait", self.name, "wait", target=event.last))

    def wait_stream(self, stream: "RecordedStream") -> None:
        self.wait_event(stream.record_event())

    def issue(self, entry: Entry) -> None:
        self.recorder.queue.append(entry)
        self.last = entry


class RecordedWork:
    """In place of `torch.distributed.Work`.

    It keeps no tensor alive, as NCCL's own does: the executor must not rely on that.
    """

    def __init__(self, recorder: "Recorder", end: RecordedEvent) -> None:
        self._recorder = recorder
        self._end = end

    def wait(self) -> None:
        self._recorder.current.wait_event(self._end)

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
        side_streams: that the executor has made.
        live_bytes: of all memory that was touched and not freed yet.
        peak_bytes: the most of it since `forget_peak`.
    """

    def __init__(
        self, make_streams: Callable[[torch.device], streams.Streams] = streams.CudaStreams
    ) -> None:
        super().__init__()
        self._steps = StepList()
        self.monitor = Monitor(recorder=self._steps)
        self.queue: list[Entry] = []
        self.findings: list[Finding] = []
        self.live_bytes = self.peak_bytes = 0
        self.current = RecordedStream(self, "caller", priority=-1)
        self._make_streams = make_streams
        self._buffers: dict[int, Buffer] = {}
        self._group_streams: dict[str, RecordedStream] = {}
        self.side_streams: list[RecordedStream] = []
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
            mock.patch.multiple(
                operations,
                start_all_to_all=self._start_all_to_all,
                start_all_gather=self._start_all_gather,
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
            self._run(self.current, Entry("kernel", self.current.name, name), read, written + new)
        return result

    def kernel(self, name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Record the launch of a kernel that is no operation of torch."""
        self.find_freed()
        self._run(self.current, Entry("kernel", self.current.name, name), read, written)

    def find_freed(self) -> None:
        """Check the memory that was freed since the last call.

        Called before anything changes the clocks, so they still are what they were at the free.
        """
        for key in [key for key, buffer in self._buffers.items() if buffer.memory.expired()]:
            buffer = self._buffers.pop(key)
            self.live_bytes -= buffer.num_bytes
            self._free(buffer)

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

    def _free(self, buffer: Buffer) -> None:
        reuse: Clock = {}
        for stream in (buffer.owner, *buffer.recorded):
            for name, tick in stream.clock.items():
                reuse[name] = max(reuse.get(name, 0), tick)
        for piece in buffer.pieces.values():
            for access in (piece.write, *piece.reads.values()):
                if access is not None and not access.is_in(reuse):
                    text = f"memory of {buffer.owner.name} may be reused before {access} has run"
                    self.findings.append(Finding("reuse", text))

    def _buffer_of(self, tensor: torch.Tensor) -> Buffer:
        storage = tensor.untyped_storage()
        # Its weak reference keeps the key from being used again.
        if storage._cdata not in self._buffers:
            tick = self.current.clock.get(self.current.name, 0)
            buffer = Buffer(
                StorageWeakRef(storage),
                self.current,
                storage.nbytes(),
                {(0, storage.nbytes()): Piece(Access(self.current.name, tick, "allocation"))},
            )
            self._buffers[storage._cdata] = buffer
            self.live_bytes += buffer.num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return self._buffers[storage._cdata]

    def _run(
        self,
        stream: RecordedStream,
        entry: Entry,
        read: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> None:
        tick = stream.clock.get(stream.name, 0) + 1
        stream.clock[stream.name] = tick
        access = Access(stream.name, tick, entry.name)
        for buffer, span in self._touched(read):
            earlier = [piece.write for piece in buffer.overlapping(span)]
            self._check_order(stream, buffer, access, earlier)
            buffer.pieces[span].reads[stream.name] = access
        for buffer, span in self._touched(written):
            pieces = buffer.overlapping(span)
            earlier = [one for piece in pieces for one in (piece.write, *piece.reads.values())]
            self._check_order(stream, buffer, access, earlier)
            buffer.pieces[span] = Piece(access)
        stream.issue(entry)

    def _touched(self, tensors: list[torch.Tensor]) -> set[tuple[Buffer, tuple[int, int]]]:
        return {
            (self._buffer_of(tensor), span_bytes(tensor)) for tensor in tensors if tensor.numel()
        }

    def _check_order(
        self, stream: RecordedStream, buffer: Buffer, access: Access, before: list[Access | None]
    ) -> None:
        for earlier in before:
            if earlier is not None and not earlier.is_in(stream.clock):
                text = f"{access} does not wait for {earlier} (memory of {buffer.owner.name})"
                self.findings.append(Finding("race", text))

    def _make_side_stream(self, device: torch.device, priority: int) -> RecordedStream:
        name = f"stage {len(self.side_streams)}"
        self.side_streams.append(RecordedStream(self, name, priority))
        return self.side_streams[-1]

    @contextmanager
    def _on(self, stream: RecordedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _set(self, stream: RecordedStream) -> None:
        self.current = stream

    def _start_all_to_all(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        receive: list[int],
        send: list[int],
        group: PeerGroup,
    ) -> RecordedWork:
        # Every rank has the same tokens: on the way to the experts each peer sends what this
        # rank sends to itself. On the way back there are no ids, so the values do not matter.
        own = input_.split(send)[group.rank]
        if set(receive) != {own.shape[0]}:
            own = None
        return self.collective(output, input_, own, group)

    def _start_all_gather(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        receive: list[int],
        send: list[int],
        group: PeerGroup,
    ) -> RecordedWork:
        return self.collective(output, input_, input_, group)

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
        if group.name not in self._group_streams:
            self._group_streams[group.name] = RecordedStream(self, f"group {group.name}")
        stream = self._group_streams[group.name]
        stream.wait_stream(self.current)
        step = self._steps[-1]
        entry = Entry("collective", stream.name, step.operation.stage, step=step, group=group.name)
        self._run(stream, entry, [input_], [output])
        return RecordedWork(self, stream.record_event())

    def muted(self) -> AbstractContextManager[Any]:
        return mock.patch.object(self, "_is_muted", True)


def span_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's first byte lies in its memory, and the one behind its last."""
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


def times_in_one_queue(queue: list[Entry]) -> dict[Entry, tuple[float, float]]:
    """When each entry starts and ends if all streams share one launch queue, in order.

    That is CUDA_DEVICE_MAX_CONNECTIONS=1: an entry that has to wait, for its stream or as a wait,
    blocks everything behind it. What has started runs on beside the others; recording an event
    takes no place in the queue.
    """
    times: dict[Entry, tuple[float, float]] = {}
    last_on: dict[str, Entry] = {}
    head = 0.0
    for entry in queue:
        before = (last_on.get(entry.stream), entry.target)
        start = max([head, *(times[one][1] for one in before if one is not None)])
        durations = {"kernel": KERNEL_DURATION, "collective": COLLECTIVE_DURATION, "wait": 0.0}
        times[entry] = (start, start + durations[entry.kind])
        last_on[entry.stream] = entry
        head = start
    return times
