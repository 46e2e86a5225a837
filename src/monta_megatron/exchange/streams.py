"""The seam between the executor and the device: streams, events and the lifetime of buffers.

Each stage has a side stream of its own, so that chunk i+1's AllToAll, chunk i's AllGather and
chunk i-1's copies can run at once. On CPU ranks there are no streams: a collective runs in the
background of its process group, and the host waits for it where its result is first needed.
Either way the executor makes the same calls; only `BoundChain.depths` differs.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch

# Waits for what a stage started: blocks the current stream on a GPU, the host on CPU ranks.
Ready = Callable[[], object]


class Streams(Protocol):
    """What the executor asks of a device.

    Attributes:
        copies_block_host: the host itself moves what stays on a node; see `BoundChain.depths`.
    """

    copies_block_host: bool

    def fork(self) -> None:
        """Make every side stream wait for what the caller's stream has been given so far."""

    def join(self) -> None:
        """Make the caller's stream wait for everything issued on the side streams."""

    def on(self, position: int) -> AbstractContextManager[Any]:
        """Context in which stage `position` launches its work."""

    def on_caller(self) -> AbstractContextManager[Any]:
        """Context in which the memory of messages and outputs is allocated.

        Since the fork the caller's stream has been given nothing to do but what an allocation does
        itself, so memory freed on it can be used at once. Memory allocated on a side stream could
        be reused by walks only.
        """

    def hold(self, tensors: list[torch.Tensor]) -> None:
        """Keep memory of the caller's stream alive until the join.

        From then on that stream comes after every use, so it may reuse the memory at once. The host
        reaches the join long before the device does, so nothing could be freed earlier anyway."""

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        """Called once a stage has launched; returns what its consumer calls before it reads."""

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """Keep the memory of `tensors` from being reused before the current stream has read them.

        Another stage has made them, for several walks."""


class HostStreams:
    """CPU ranks: no streams; copies run at once, collectives in the background."""

    copies_block_host = True

    def fork(self) -> None: ...

    def join(self) -> None: ...

    def on(self, position: int) -> AbstractContextManager[Any]:
        # The stand-ins of CPU ranks search every call for "cuda", which does not occur here.
        return torch._C.DisableTorchFunction()

    def on_caller(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def hold(self, tensors: list[torch.Tensor]) -> None: ...

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def keep(self, tensors: list[torch.Tensor]) -> None: ...


class CudaStreams:
    """One side stream per stage, ordered by events; nothing here blocks the host."""

    copies_block_host = False

    def __init__(self, device: torch.device, num_stages: int) -> None:
        self._caller = torch.cuda.current_stream(device)
        # With the caller's priority: the 1F1B schedule may give its communication a higher one.
        self._streams = [
            _side_stream(device, position, self._caller.priority) for position in range(num_stages)
        ]
        self._held: list[torch.Tensor] = []

    def fork(self) -> None:
        event = self._caller.record_event()
        for stream in self._streams:
            stream.wait_event(event)

    def join(self) -> None:
        for stream in self._streams:
            self._caller.wait_stream(stream)
        self._held.clear()

    def on(self, position: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[position])

    @contextmanager
    def on_caller(self) -> Iterator[None]:
        with torch.cuda.stream(self._caller):
            yield
        # The first write must come after the NaN with which deterministic mode fills the memory,
        # and after the allocation itself if that is one of the stream's operations.
        if torch.are_deterministic_algorithms_enabled() or _allocates_in_order():
            torch.cuda.current_stream().wait_stream(self._caller)

    def hold(self, tensors: list[torch.Tensor]) -> None:
        self._held += tensors

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        if not works:
            event = torch.cuda.current_stream().record_event()
            return lambda: torch.cuda.current_stream().wait_event(event)

        def wait() -> None:
            # Here and not at the launch: with one launch queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a
            # wait holds up all that is issued after it, including the next stage's collective.
            for work in works:
                work.wait()

        return wait

    def keep(self, tensors: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            tensor.record_stream(stream)


@cache
def _allocates_in_order() -> bool:
    """Whether memory is there only once its stream has reached the allocation."""
    return torch.cuda.is_available() and torch.cuda.get_allocator_backend() == "cudaMallocAsync"


@cache
def _side_stream(device: torch.device, position: int, priority: int) -> torch.cuda.Stream:
    """The side stream for stage `position` of every walk, made once and shared by all layers."""
    return torch.cuda.Stream(device, priority=priority)


def streams_for(device: torch.device, num_stages: int) -> Streams:
    """The streams for a walk over `num_stages` stages, on the device that holds the rows."""
    return CudaStreams(device, num_stages) if device.type == "cuda" else HostStreams()
