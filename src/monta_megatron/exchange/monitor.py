"""What an exchange did: bytes by stage and tier, the order of starts and waits, and their times."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch
from torch.autograd import profiler

Action = Literal["begin", "start", "wait", "ready", "end"]
_NO_RANGE = nullcontext()


class Step(NamedTuple):
    """What happened to a chunk in a stage of a walk.

    A stage begins and ends a chunk; in between it may wait until the stage before it is ready and
    start a collective. `wait` and `ready` name the stage that is waited for.
    """

    action: Action
    walk: str
    stage: str
    chunk: int


class Recorder(Protocol):
    """Records the times of a walk; see `timeline.step_times`."""

    def note(self, step: Step) -> None:
        """Record that this step happens now."""

    def watch(
        self, works: Sequence[torch.distributed.Work], walk: str, stage: str, chunk: int
    ) -> list[torch.distributed.Work]:
        """Watch a collective that was just started; returns what to wait for in its place."""


@dataclass(kw_only=True)
class Monitor:
    """Filled by the executor as it issues collectives.

    Attributes:
        bytes_sent: (stage, tier) -> bytes of payload that left this rank for another one, counted
            from the tensors that were sent. Tiers: "inter" between nodes, "intra" inside one.
        recorder: records the steps, or None if nobody asked for them.
    """

    bytes_sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    recorder: Recorder | None = None

    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes that left this rank so far, over all stages."""
        totals = {"inter": 0, "intra": 0}
        for (_, tier), num_bytes in self.bytes_sent.items():
            totals[tier] += num_bytes
        return totals

    def note(self, action: Action, walk: str, stage: str, chunk: int) -> None:
        """Pass a step to the recorder, if there is one."""
        if self.recorder is not None:
            self.recorder.note(Step(action, walk, stage, chunk))

    def watch(
        self, works: list[torch.distributed.Work], walk: str, stage: str, chunk: int
    ) -> list[torch.distributed.Work]:
        """Let the recorder, if any, watch a collective; returns what to wait for in its place."""
        if self.recorder is None:
            return works
        return self.recorder.watch(works, walk, stage, chunk)

    def range(
        self, walk: str, chain: str, stage: str, chunk: int
    ) -> AbstractContextManager[object]:
        """Context that names a chunk's stage in a profile (NVTX with `emit_nvtx`) and times it."""
        if self.recorder is None and not profiler._is_profiler_enabled:
            return _NO_RANGE
        return self._range(walk, chain, stage, chunk)

    @contextmanager
    def _range(self, walk: str, chain: str, stage: str, chunk: int) -> Iterator[None]:
        with profiler.record_function(f"monta {walk}: {chain}, {stage}, chunk {chunk}"):
            self.note("begin", walk, stage, chunk)
            yield
            self.note("end", walk, stage, chunk)
