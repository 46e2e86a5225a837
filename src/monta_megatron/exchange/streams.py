"""The seam between the executor and the device: streams, events and the life of buffers.

Each stage has a side stream of its own, so that chunk i+1's AllToAll, chunk i's AllGather and
chunk i-1's copies run at once. On CPU ranks there are no streams: a collective runs in the
background of its process group, and the host waits for it where its result is first needed.
Either way the executor makes the same calls; behind which collectives stages trail differs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Protocol

import torch

# Waits for what a stage started: blocks the current stream on a GPU, the host on CPU ranks.
Ready = Callable[[], object]


class Streams(Protocol):
    """What the executor asks of a device.

    Attributes:
        host_moves: the host itself moves what stays on a node; see `BoundChain.depths`.
    """

    host_moves: bool

    def fork(self) -> None:
        """Order every side stream behind what the caller's stream has done so far."""

    def join(self) -> None:
        """Order the caller's stream behind everything issued on the side streams."""

    def on(self, position: int) -> AbstractContextManager[Any]:
        """Context in which stage `position` launches, and in which its buffers are allocated."""

    def on_caller(self) -> AbstractContextManager[Any]:
        """Context in which memory is allocated that stays with the caller.

        Since the fork the caller's stream has been given nothing to do, so what it freed is free.
        """

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        """Called once a stage has launched: what its consumer calls before it reads the result."""

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """The current stream reads `tensors`; their memory is not reused before it has."""


class HostStreams:
    """CPU ranks: no streams; copies run at once, collectives in the background."""

    host_moves = True

    def fork(self) -> None: ...

    def join(self) -> None: ...

    def on(self, position: int) -> AbstractContextManager[Any]:
        # The stand-ins of CPU ranks look at every call for the word "cuda", which is not here.
        return torch._C.DisableTorchFunction()

    def on_caller(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def keep(self, tensors: list[torch.Tensor]) -> None: ...


class CudaStreams:
    """One side stream per stage, ordered by events; nothing here blocks the host."""

    host_moves = False

    def __init__(self, device: torch.device) -> None:
        self._streams = _side_streams(device)
        self._caller = torch.cuda.current_stream(device)

    def fork(self) -> None:
        for stream in self._streams:
            stream.wait_stream(self._caller)

    def join(self) -> None:
        for stream in self._streams:
            self._caller.wait_stream(stream)

    def on(self, position: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[position])

    def on_caller(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._caller)

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        stream = torch.cuda.current_stream()
        if not works:
            event = stream.record_event()
            return lambda: torch.cuda.current_stream().wait_event(event)

        def wait() -> None:
            # Here and not at the launch: with one launch queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a
            # wait holds up all that is issued behind it, so the next stage's collective too.
            # The stage's own stream waits first: then the process group lets go of what the
            # collective read, and that memory may be reused as soon as this stream is past it.
            with torch.cuda.stream(stream):
                for work in works:
                    work.wait()
            for work in works:
                work.wait()

        return wait

    def keep(self, tensors: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            tensor.record_stream(stream)


# Of the longest chain.
MAX_STAGES = 7


@cache
def _side_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """The side streams of one device, made once and shared by every layer."""
    return tuple(torch.cuda.Stream(device) for _ in range(MAX_STAGES))


def streams_for(device: torch.device) -> Streams:
    """The streams of the device on which the rows lie."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
