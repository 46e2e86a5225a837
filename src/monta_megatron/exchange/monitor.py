"""Monitor of an exchange: bytes by stage and resource, order of starts and waits."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch.autograd import profiler

from monta_megatron.chains.program import Operation
from monta_megatron.common.torch_private import is_profiling
from monta_megatron.exchange.collectives import PeerGroup

Action = Literal["begin", "start", "wait", "ready", "end"]
# Messages that are counted together.
MOST_UNCOUNTED = 1024


class Step(NamedTuple):
    """An event of an operation in a pass.

    It begins and ends; in between it may wait until others are ready and start a collective. `wait`
    and `ready` name the operation that is waited for.

    Attributes:
        action: what happened.
        pass_name: name of the pass.
        operation: an operation of its program.
    """

    action: Action
    pass_name: str
    operation: Operation


class Recorder(Protocol):
    """Records the times of a pass; see `exchange.step_times`."""

    def note(self, step: Step) -> None:
        """Record that this step happens now."""

    def watch(
        self, works: Sequence[torch.distributed.Work], pass_name: str, operation: int
    ) -> list[torch.distributed.Work]:
        """Watch a collective that was just started; returns the object to wait for in its place."""


@dataclass(kw_only=True)
class Monitor:
    """Filled by the executor as it issues collectives.

    Attributes:
        recorder: records the steps, or None where none are wanted.
    """

    recorder: Recorder | None = None
    _bytes_sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Adding up when somebody asks costs the host of a collective a tenth: 0.3 us, not 3.
    _sent: list[tuple[str, PeerGroup, list[int], int]] = field(default_factory=list)

    def sent(
        self, stage: str, group: PeerGroup, num_rows: list[int], message: torch.Tensor
    ) -> None:
        """Count a message, of which each peer was sent so many rows."""
        self._sent.append((stage, group, num_rows, message.shape[1:].numel() * message.itemsize))
        if len(self._sent) == MOST_UNCOUNTED:
            self._count()

    @property
    def bytes_sent(self) -> Counter[tuple[str, str]]:
        """(stage, resource) -> bytes of payload that left this rank for another one.

        Counted from the tensors that were sent: "inter" between nodes, "intra" inside one.
        """
        self._count()
        return self._bytes_sent

    def _count(self) -> None:
        for stage, group, num_rows, row_bytes in self._sent:
            for resource, peers in group.peers.items():
                sent = sum(map(num_rows.__getitem__, peers))
                self._bytes_sent[stage, resource] += sent * row_bytes
        self._sent.clear()

    def bytes_by_resource(self) -> dict[str, int]:
        """Bytes that left this rank so far, over all stages."""
        totals = {"inter": 0, "intra": 0}
        for (_, resource), num_bytes in self.bytes_sent.items():
            totals[resource] += num_bytes
        return totals

    def note(self, action: Action, pass_name: str, operation: Operation) -> None:
        """Pass a step to the recorder, if there is one."""
        if self.recorder is not None:
            self.recorder.note(Step(action, pass_name, operation))

    def watch(
        self, works: list[torch.distributed.Work], pass_name: str, operation: Operation
    ) -> list[torch.distributed.Work]:
        """Let the recorder, if any, watch a collective; returns its stand-in for waits."""
        if self.recorder is None:
            return works
        return self.recorder.watch(works, pass_name, operation.number)

    def names_operations(self) -> bool:
        """Whether `range` does anything now."""
        return self.recorder is not None or is_profiling()

    @contextmanager
    def range(self, pass_name: str, chain: str, operation: Operation) -> Iterator[None]:
        """Context that names an operation in a profile (NVTX with `emit_nvtx`) and times it."""
        name = f"monta {pass_name}: {chain}, {operation.stage}, chunk {operation.chunk}"
        with profiler.record_function(name):
            self.note("begin", pass_name, operation)
            yield
            self.note("end", pass_name, operation)
