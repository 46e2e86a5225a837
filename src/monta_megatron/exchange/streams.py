"""Streams, events and the lifetime of buffers: who waits for whom.

The host waits once per micro-batch, for its counts (`integration.dispatcher`), and enqueues
everything else. On a device a pass waits in four ways:

    fork         the side streams wait for all that the caller's stream has been given
    start        a group's stream waits for the side stream from which a collective is started
    `waits`      before an operation, its side stream waits for an event behind a copy, or for a
                 collective: those whose results it reads, or that read the slot that it overwrites
    join         the caller's stream waits for all side streams

Stages that trail the first one by the same number of steps share a side stream. With two
collectives there are three: the collectives of chunks i + 1 and i and the copies of chunk i - 1 run
at once. A wait is issued with the operation that needs it, not before: with
CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one hardware queue, the launch queue, and a wait
holds up everything that is issued after it.

Two passes in flight, with the experts in the pipeline (`exchange.pipeline`), each an exchange
of one chunk; S0, S1, S2 are the side streams, which all passes use:

    host                  caller's stream    S0, S1, S2
    start dispatch 0      allocates; event   wait for it; S0: up to the first collective
    start dispatch 1      allocates; event   wait for it; S0: up to the first collective
    end dispatch 0        waits for S0-S2    S1, S2: the rest of dispatch 0, behind its collectives
    experts of chunk 0    run                (collectives of dispatch 1 run beside them)
    start combine 0       allocates; event   S1, S2: first the rest of dispatch 1, else it would be
                                             behind the experts; then wait for the event; S0: up to
                                             the first collective
    end dispatch 1        waits for S0-S2    (so also for the beginning of combine 0)

Dispatch 2 starts after the experts of chunk 0, as its buffers may be memory that they released. The
network waits for them only if they take longer than the passes beside them.

A pass allocates its buffers on the caller's stream before the fork, and holds them until the join,
so memory freed on that stream may be used at once. Memory that passes share outlives the join: each
pass calls `record_stream` with its caller's stream (`keep`).

Side streams are distinct from each other and from the caller's. Groups draw theirs from the same
torch pools, one per priority, and cannot be asked which: only a group of another priority
(`is_high_priority_stream`) is sure to have another stream. On a shared stream some operations wait
unnecessarily; the order stays correct. Where communicators do not overlap
(`exchange.launch_order`), each collective, of any pass, also waits for the one issued before it:
groups cannot wait for each other in a circle. Querying torch's current stream costs several times
as much as setting it, so it is tracked here.

CPU ranks have no streams: a collective runs in a thread of its process group, and the host waits
for it before the first use of its result. The executor makes the same calls; the program differs.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, ClassVar

import torch

from monta_megatron.chains.program import Operation, Policy
from monta_megatron.exchange import errors
from monta_megatron.exchange.launch_order import communicators_overlap

if TYPE_CHECKING:
    from monta_megatron.exchange.executor import Execution

# Streams of a torch pool: one pool per device and priority (c10/cuda/CUDAStream.cpp).
STREAMS_IN_POOL = 32
# Of a pass with two collectives.
MAX_SIDE_STREAMS = 3

# Waits for an operation: blocks the current stream on a GPU, the host on CPU ranks.
Ready = Callable[[], object]


class Streams:
    """Streams, events and buffer lifetimes of a device; this class serves CPU ranks.

    Attributes:
        policy: execution policy of programs.
    """

    policy: Policy = "host"

    def fork(self, num_streams: int) -> None:
        """Make `num_streams` side streams wait for all work issued on the caller's stream."""

    def join(self) -> None:
        """Make the caller's stream wait for everything issued on the side streams."""

    def abandon(self, works: Mapping[int, list[torch.distributed.Work]]) -> None:
        """Let memory of a pass that will not end be freed behind its last use.

        Args:
            works: of all collectives, by number.
        """

    def enter(self, stream: int) -> None:
        """Issue the following operations on a side stream."""

    def leave(self) -> None:
        """Issue the following operations on the caller's stream."""

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        """Mark the end of an operation just issued; returns a function that waits for it."""

        def wait() -> None:
            for work in works:
                work.wait()
            # Works hold their tensors.
            works.clear()

        return wait

    def before_collective(self) -> None:
        """Keep the order of collectives where their groups do not."""

    def after_collective(
        self, execution: "Execution", operation: Operation, works: list[torch.distributed.Work]
    ) -> None:
        """Watch the time limit of a collective for which the host does not wait."""

    def keep(self, memory: torch.Tensor) -> None:
        """Keep memory allocated by another pass from reuse before this pass ends."""


class CudaStreams(Streams):
    """Side streams, ordered by events; nothing here blocks the host."""

    policy: Policy = "streams"
    # End of the latest collective of any pass; None where NCCL keeps their order.
    _latest: ClassVar[torch.cuda.Event | None] = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._current = self._caller = torch.cuda.current_stream(device)
        self._streams: list[torch.cuda.Stream] = []

    def fork(self, num_streams: int) -> None:
        self._streams = _side_streams(self._device, self._caller, num_streams)
        event = self._caller.record_event()
        for stream in self._streams:
            stream.wait_event(event)

    def join(self) -> None:
        for stream in self._streams:
            self._caller.wait_stream(stream)

    def abandon(self, works: Mapping[int, list[torch.distributed.Work]]) -> None:
        # A work makes the current stream wait, which may be any: a finalizer calls this.
        with torch.cuda.stream(self._caller):
            for work in chain.from_iterable(works.values()):
                # Waiting for a collective that failed raises, and it uses no memory any more.
                with suppress(RuntimeError):
                    work.wait()
        self.join()

    def enter(self, stream: int) -> None:
        self._set(self._streams[stream])

    def leave(self) -> None:
        self._set(self._caller)

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        if not works:
            event = self._current.record_event()
            # Bound late: the stream that is current at the wait is the one that waits.
            return lambda: self._current.wait_event(event)

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def before_collective(self) -> None:
        if CudaStreams._latest is not None:
            self._current.wait_event(CudaStreams._latest)

    def after_collective(
        self, execution: "Execution", operation: Operation, works: list[torch.distributed.Work]
    ) -> None:
        errors.device_time_limit().add(execution, operation, works)
        if not communicators_overlap():
            # An event, as works hold their tensors; on a stream of no stage, whose copies go on.
            order = _side_streams(self._device, self._caller, len(self._streams) + 1)[-1]
            with torch.cuda.stream(order):
                for work in works:
                    work.wait()
                CudaStreams._latest = order.record_event()

    def keep(self, memory: torch.Tensor) -> None:
        memory.record_stream(self._caller)

    def _set(self, stream: torch.cuda.Stream) -> None:
        if stream is not self._current:
            torch.cuda.set_stream(stream)
            self._current = stream


@cache
def _drawn(device: torch.device, priority: int) -> list[torch.cuda.Stream]:
    """Streams drawn from one of torch's pools, shared by all passes of all layers."""
    return []


def _side_streams(
    device: torch.device, caller: torch.cuda.Stream, number: int
) -> list[torch.cuda.Stream]:
    """`number` streams, distinct from each other and from the caller's."""
    # With the caller's priority: the 1F1B schedule may give its communication a higher one.
    drawn = _drawn(device, caller.priority)
    # torch hands out a pool's streams round robin, so one round yields all of them.
    for _ in range(STREAMS_IN_POOL + 1):
        usable = [stream for stream in drawn if stream != caller]
        if len(usable) >= number:
            return usable[:number]
        stream = torch.cuda.Stream(device, priority=caller.priority)
        if stream not in drawn:
            drawn.append(stream)
    raise AssertionError(f"of {STREAMS_IN_POOL} streams {len(usable)} are usable, not {number}")


def side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """The side streams of passes that the current stream calls."""
    return _side_streams(device, torch.cuda.current_stream(device), MAX_SIDE_STREAMS)


def streams_for(device: torch.device) -> Streams:
    """Streams for a pass on the device of its rows."""
    return CudaStreams(device) if device.type == "cuda" else Streams()


def device_type() -> str:
    """The type of the ranks' devices: "cuda", or "cpu" where CPU ranks stand in for GPUs."""
    # On CPU ranks `torch.cuda.is_available` is true.
    return "cuda" if torch.accelerator.is_available() else "cpu"


def gpu_name() -> str | None:
    """This rank's GPU as its driver names it; None on CPU ranks."""
    return torch.cuda.get_device_name() if device_type() == "cuda" else None
