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
        copies_block_host: the host itself moves what stays on a node; see `BoundChain.depths`.
    """

    copies_block_host: bool

    def fork(self) -> None:
        """Order every side stream behind what the caller's stream has done so far."""

    def join(self) -> None:
        """Order the caller's stream behind everything issued on the side streams."""

    def on(self, position: int) -> AbstractContextManager[Any]:
        """Context in which stage `position` launches."""

    def on_caller(self) -> AbstractContextManager[Any]:
        """Context in which the memory of messages and outputs is allocated.

        Since the fork the caller's stream has been given nothing to do, so what it freed is free.
        Memory of a side stream would be lost to everything but walks.
        """

    def hold(self, tensors: list[torch.Tensor]) -> None:
        """Let the caller's memory live until the join: from then on its stream is behind all that
        uses it, and may have it again at once. The host comes there long before the device, so
        nothing could be freed earlier anyway."""

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        """Called once a stage has launched: what its consumer calls before it reads the result."""

    def keep(self, tensors: list[torch.Tensor]) -> None:
        """The current stream reads what another stage has made for several walks; its memory is
        not reused before that."""


class HostStreams:
    """CPU ranks: no streams; copies run at once, collectives in the background."""

    copies_block_host = True

    def fork(self) -> None: ...

    def join(self) -> None: ...

    def on(self, position: int) -> AbstractContextManager[Any]:
        # The stand-ins of CPU ranks look at every call for the word "cuda", which is not here.
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
        # Of the caller's priority: the 1F1B schedule may give its communication a higher one.
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

    def on_caller(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._caller)

    def hold(self, tensors: list[torch.Tensor]) -> None:
        self._held += tensors

    def ready(self, works: list[torch.distributed.Work]) -> Ready:
        if not works:
            event = torch.cuda.current_stream().record_event()
            return lambda: torch.cuda.current_stream().wait_event(event)

        def wait() -> None:
            # Here and not at the launch: with one launch queue (CUDA_DEVICE_MAX_CONNECTIONS=1) a
            # wait holds up all that is issued behind it, so the next stage's collective too.
            for work in works:
                work.wait()

        return wait

    def keep(self, tensors: list[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            tensor.record_stream(stream)


@cache
def _side_stream(device: torch.device, position: int, priority: int) -> torch.cuda.Stream:
    """The side stream of every walk's stage `position`, made once and shared by every layer."""
    return torch.cuda.Stream(device, priority=priority)


def streams_for(device: torch.device, num_stages: int) -> Streams:
    """The streams of the device on which the rows lie, for a walk over so many stages."""
    return CudaStreams(device, num_stages) if device.type == "cuda" else HostStreams()
