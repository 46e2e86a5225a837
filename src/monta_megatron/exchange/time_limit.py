"""Reports of a rank before NCCL's time limit ends its process.

On a device the host waits for no collective. If one hangs, its process group's watchdog kills the
process before any Python code can report. So a thread polls the collectives in flight, the oldest
first, and the host's own waits; when one comes close to its limit, the thread prints the text of
the error that CPU ranks raise, once.

The future of a collective's result, completed by the watchdog, tells whether it has ended. It holds
no tensors, while the collective's `Work` holds its outputs, and polling it makes no CUDA call,
which could block the host or break a graph capture. Other backends have no such future, and there
is no watchdog under TORCH_NCCL_BLOCKING_WAIT: there the host waits, and an error is raised.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from monta_megatron.chains.program import BoundProgram, Operation
from monta_megatron.common.torch_private import timeout_of
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.errors import host_waits, last_operations, place_of, versions

if TYPE_CHECKING:
    from monta_megatron.exchange.executor import Execution

# As often as NCCL's watchdog: the host issues nothing during a poll, so polls must be short.
LOOK_S = 0.1
# Fraction of the limit after which a report is printed.
PRINTED_AT = 0.9
# More collectives than end between two polls; beyond it the oldest is dropped.
MOST_COLLECTIVES = 2**16
BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
# Values that torch reads as true, in upper or lower case.
ON = ("y", "yes", "1", "t", "true")


class Started(NamedTuple):
    """A collective in flight, without its tensors.

    Attributes:
        bound: the program of its pass.
        groups: of the program's collectives.
        operation: the collective.
        since_s: start, by `time.monotonic`.
        result: future of its last message; a group's messages complete in order.
    """

    bound: BoundProgram
    groups: Mapping[str, PeerGroup]
    operation: Operation
    since_s: float
    result: torch.futures.Future[int]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group whose time limit applies."""
        assert self.operation.group is not None, f"{self.operation.kind} is no collective"
        return self.groups[self.operation.group].process_group

    def __str__(self) -> str:
        return place_of(self.bound, self.groups, self.operation)


class TimeLimit:
    """Watches the collectives on this rank's device.

    Attributes:
        pending: collectives in flight at the latest poll.
    """

    def __init__(self) -> None:
        self.pending: deque[Started] = deque(maxlen=MOST_COLLECTIVES)
        self._thread: Thread | None = None
        given = [os.environ.get(name, "").lower() for name in BLOCKING_WAIT]
        self._has_watchdog = not any(value in ON for value in given)
        # The last one printed.
        self._printed: object = None

    def add(self, execution: "Execution", operation: Operation, works: Sequence[dist.Work]) -> None:
        """Watch a collective just started."""
        if not self._has_watchdog:
            return
        try:
            result = works[-1].get_future_result()  # type: ignore[attr-defined]
        except RuntimeError:
            self._has_watchdog = False
            return
        # Not the execution itself, which holds its buffers.
        bound, groups = execution.bound, execution.groups
        self.pending.append(Started(bound, groups, operation, time.monotonic(), result))
        if self._thread is None:
            self._thread = Thread(target=self._look, name="monta time limit", daemon=True)
            self._thread.start()

    def late(self, now_s: float) -> str | None:
        """Report due at `now_s`, by `time.monotonic`; None if there is nothing new."""
        # Only this thread removes entries.
        while self.pending and self.pending[0].result.done():
            self.pending.popleft()
        oldest = self.pending[0] if self.pending else None
        for one in ([] if oldest is None else [oldest]) + host_waits[-1:]:
            limit, waited_s = timeout_of(one.process_group), now_s - one.since_s
            if limit is None or waited_s < PRINTED_AT * limit.total_seconds():
                continue
            if one is self._printed:
                break
            self._printed = one
            return (
                f"{one} has not ended after {waited_s:.0f} s, and its time limit is "
                f"{limit.total_seconds():.0f} s\n{self._last_operations(oldest)}; {versions()}"
            )
        return None

    def _last_operations(self, oldest: Started | None) -> str:
        """Last operations of the pass with the oldest pending collective."""
        if oldest is None:
            return "no pass is under way"
        pending = list(self.pending)
        same = [oldest, *(each for each in pending if each.bound is oldest.bound)]
        numbers = {each.operation.number for each in same if not each.result.done()}
        num_issued = same[-1].operation.number + 1
        return last_operations(oldest.bound, oldest.groups, num_issued, numbers)

    def _look(self) -> None:
        rank = f"monta, rank {dist.get_rank()}: "
        while True:
            time.sleep(LOOK_S)
            text = self.late(time.monotonic())
            if text is not None:
                lines = "".join(f"{rank}{line}\n" for line in text.splitlines())
                # One write, so that ranks' lines do not interleave.
                print(lines, end="", file=sys.stderr, flush=True)
