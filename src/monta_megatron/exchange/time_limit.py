"""Reports of a rank before NCCL's time limit ends its process.

On a device the host waits for no collective. Where one does not end, the watchdog of its process
group ends the process, and no line of Python runs any more. So a thread looks at the collectives
that were started, the oldest first, and at what the host waits for; where something comes close to
its limit it prints, once, what the error says on CPU ranks.

Whether a collective has ended is told by the future of its result, which that watchdog completes.
It holds no tensors, while the collective's `Work` holds its outputs, and asking it is no call of
CUDA, which may wait for the host or break a capture. Other backends have no such future, nor has
TORCH_NCCL_BLOCKING_WAIT such a watchdog: there the host waits, and an error is raised.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import NamedTuple

import torch
import torch.distributed as dist

from monta_megatron.chains.program import BoundProgram, Operation
from monta_megatron.common.torch_private import result_of, timeout_of
from monta_megatron.exchange import counts
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.errors import last_operations, place_of, versions

# As often as NCCL's watchdog: while it looks the host issues nothing, so little must have ended.
LOOK_S = 0.1
# Of the limit: after that long it is printed.
PRINTED_AT = 0.9
# More collectives than end between two looks; should the oldest never end, it is forgotten.
MOST_COLLECTIVES = 2**16
BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
# Values that torch takes for "on", in any case.
ON = ("y", "yes", "1", "t", "true")


class Started(NamedTuple):
    """A collective that was started, without its tensors.

    Attributes:
        bound: the program of its pass.
        groups: of the program's collectives.
        operation: the collective.
        since_s: when it was started.
        result: the future of its last message; a group's messages arrive in order.
    """

    bound: BoundProgram
    groups: Mapping[str, PeerGroup]
    operation: Operation
    since_s: float
    result: torch.futures.Future[int]

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Whose time limit it has."""
        assert self.operation.group is not None, f"{self.operation.kind} is no collective"
        return self.groups[self.operation.group].process_group

    def __str__(self) -> str:
        return place_of(self.bound, self.groups, self.operation)


class TimeLimit:
    """Watches the collectives started on this rank's device.

    Attributes:
        pending: collectives that were started and, by the latest look, had not ended.
    """

    def __init__(self) -> None:
        self.pending: deque[Started] = deque(maxlen=MOST_COLLECTIVES)
        self._thread: Thread | None = None
        given = [os.environ.get(name, "").lower() for name in BLOCKING_WAIT]
        self._has_watchdog = not any(value in ON for value in given)
        # Printed last.
        self._printed: object = None

    def add(
        self,
        bound: BoundProgram,
        groups: Mapping[str, PeerGroup],
        operation: Operation,
        works: Sequence[dist.Work],
    ) -> None:
        """Look after a collective that was just started."""
        if not self._has_watchdog:
            return
        try:
            result = result_of(works[-1])
        except RuntimeError:
            self._has_watchdog = False
            return
        self.pending.append(Started(bound, groups, operation, time.monotonic(), result))
        if self._thread is None:
            self._thread = Thread(target=self._look, name="monta time limit", daemon=True)
            self._thread.start()

    def late(self, now_s: float) -> str | None:
        """Report due at `now_s`, by `time.monotonic`; None if there is nothing new."""
        # Only this thread takes something out.
        while self.pending and self.pending[0].result.done():
            self.pending.popleft()
        oldest = self.pending[0] if self.pending else None
        for one in ([] if oldest is None else [oldest]) + counts.host_waits[-1:]:
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
        """Of the pass whose collective is the oldest that has not ended."""
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
                # In one piece, among what other ranks print.
                print(lines, end="", file=sys.stderr, flush=True)
