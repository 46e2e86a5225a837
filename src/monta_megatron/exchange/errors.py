"""Errors of an exchange, and reports of collectives before NCCL's time limit ends the process.

Every rank issues the same operations in the same order, so operation numbers compare across ranks:
the rank with the lowest is behind, and the others wait for it.

On a device the host waits for no collective of a pass. If one hangs, its process group's watchdog
kills the process before any Python code can report. So a thread (`TimeLimit`), which the first
exchange of counts starts, polls the collectives in flight, the oldest first, and the host's own
waits; when one comes close to its limit, the thread prints the text of the error that CPU ranks
raise, once.

The future of a collective's result, completed by the watchdog, tells whether it has ended. It holds
no tensors, while the collective's `Work` holds its outputs, and polling it makes no CUDA call,
which could block the host or break a graph capture. Other backends have no such future, and there
is no watchdog under TORCH_NCCL_BLOCKING_WAIT: there the host waits, and an error is raised.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist

from monta_megatron.chains.program import BoundProgram, Operation
from monta_megatron.common import __version__
from monta_megatron.common.files import version_of
from monta_megatron.common.torch_private import timeout_of
from monta_megatron.exchange import roll_call
from monta_megatron.exchange.collectives import PeerGroup, is_nccl

if TYPE_CHECKING:
    from monta_megatron.exchange.executor import Execution

Groups = Mapping[str, PeerGroup]

# As often as NCCL's watchdog: the host issues nothing during a poll, so polls must be short.
LOOK_S = 0.1
# Fractions of the limit after which other ranks can read where this one waits, and after which a
# report is printed.
WRITTEN_AT, PRINTED_AT = 0.5, 0.9
# More collectives than end between two polls; beyond it the oldest is dropped.
MOST_COLLECTIVES = 2**16
BLOCKING_WAIT = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
# Why a rank may not have come to an exchange of counts; continues "ended, stuck elsewhere".
FEWER_MICRO_BATCHES = ", or with fewer micro-batches than the others"
# Values that torch reads as true, in upper or lower case.
ON = ("y", "yes", "1", "t", "true")


class ExchangeError(RuntimeError):
    """A failed exchange; the message names the collective, the last operations and versions."""


# Passes of this process in flight; a pass leaves the set with its last reference.
UNDER_WAY: "WeakSet[Execution]" = WeakSet()


def failure(execution: "Execution", operation: Operation, error: Exception) -> ExchangeError:
    """Error of an operation that failed at its start or wait."""
    place = place_of(execution.bound, execution.groups, operation)
    found = ""
    if operation.group is not None:
        group = execution.groups[operation.group]
        ranks = dist.get_process_group_ranks(group.process_group)
        found = f"{call_roll(_place_on_all_ranks(execution.bound, operation, ranks), ranks)}\n"
    return ExchangeError(
        f"{place} failed: {error}\n{found}{_of_pass(execution, operation.number)}; {versions()}"
    )


def passes_under_way() -> str:
    """All passes in flight, for an error outside of passes."""
    passes = [f"{_pass(each.bound)}: {_of_pass(each)}" for each in UNDER_WAY]
    return "; ".join([*(passes or ["no pass is under way"]), versions()])


class HostWait(NamedTuple):
    """A collective outside the passes on which the host may be blocked.

    Attributes:
        what: the collective and its purpose.
        process_group: its ranks.
        since_s: start, by `time.monotonic`.
        reason: why a rank may not have come; see `roll_call.call_roll`.
        group_name: Megatron's name of the group.
    """

    what: str
    process_group: dist.ProcessGroup
    since_s: float
    reason: str
    group_name: str

    @property
    def ranks(self) -> list[int]:
        """Of the group, as numbered in the whole launch."""
        return dist.get_process_group_ranks(self.process_group)

    @property
    def place(self) -> str:
        """The collective, named alike on all ranks of the group."""
        return f"{self.what}, group {self.group_name} of ranks {_listed(self.ranks)}"

    def __str__(self) -> str:
        rank = dist.get_group_rank(self.process_group, dist.get_rank())
        where = f"rank {rank} of {len(self.ranks)}: ranks {_listed(self.ranks)}"
        return f"{self.what}, group {self.group_name} ({where})"


# Of this process now, the latest last; `TimeLimit` reports those that are late.
host_waits: list[HostWait] = []


@contextmanager
def naming_failure(
    what: str, group: dist.ProcessGroup | None, reason: str = "", group_name: str = "tp_ep"
) -> Iterator[None]:
    """Raise failures inside the block as `ExchangeError`s that name the collective.

    Args:
        what: the collective and its purpose.
        group: its ranks; None for all ranks.
        reason: why a rank may not have come; see `roll_call.call_roll`.
        group_name: of `group`, for the message.

    Raises:
        ExchangeError: the collective failed or timed out.
    """
    process_group = group or dist.group.WORLD
    assert process_group is not None, "torch.distributed is not initialised"
    wait = HostWait(what, process_group, time.monotonic(), reason, group_name)
    host_waits.append(wait)
    device_time_limit().watch_host(process_group)
    try:
        yield
    except RuntimeError as error:
        found = call_roll(wait.place, wait.ranks, reason)
        raise ExchangeError(f"{wait} failed: {error}\n{found}\n{passes_under_way()}") from error
    finally:
        host_waits.remove(wait)


def call_roll(place: str, ranks: Sequence[int], reason: str = "") -> str:
    """See `roll_call.call_roll`; the other ranks are told what it found."""
    found = roll_call.call_roll(place, ranks, reason)
    roll_call.write(place, f", which failed there: {found}")
    return found


def place_of(bound: BoundProgram, groups: Groups, operation: Operation) -> str:
    """Pass, chain, stage, chunk and, for a collective, group of an operation."""
    return f"{_pass(bound)}, {_within(bound, groups, operation)}"


def last_operations(
    bound: BoundProgram, groups: Groups, num_issued: int, pending: Collection[int]
) -> str:
    """The last started and the last ended operation, in the order of issue.

    Args:
        bound: the program of a pass.
        groups: of its collectives.
        num_issued: operations issued so far.
        pending: numbers of those collectives that have not ended.
    """
    operations = bound.program.operations
    # On a device, operations behind pending ones have not started.
    waiting: set[int] = set()
    started, ended = "nothing", "nothing"
    for operation in operations[:num_issued]:
        starts = waiting.isdisjoint(operation.after)
        text = (
            f"operation {operation.number + 1} of {len(operations)}, "
            f"{operation.kind}, {_within(bound, groups, operation)}"
        )
        if starts:
            started = text
        if not starts or operation.number in pending:
            waiting.add(operation.number)
        else:
            ended = text
    return f"last started: {started}; last ended: {ended}"


def versions() -> str:
    """Versions of the libraries of an exchange; NCCL's if it is the backend."""
    found = [f"monta-megatron {__version__}"]
    if megatron := version_of("megatron-core"):
        found.append(f"megatron-core {megatron}")
    found.append(f"torch {torch.__version__}")
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        found.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    return ", ".join(found)


def _of_pass(execution: "Execution", *failed: int) -> str:
    pending = {
        number for number, works in execution.works.items() if not all(map(_has_ended, works))
    }.union(failed)
    return last_operations(execution.bound, execution.groups, execution.num_issued, pending)


def _has_ended(work: dist.Work) -> bool:
    try:
        # A failed collective is completed too; waiting for it raises.
        return work.is_completed() and work.wait()
    except RuntimeError:
        return False


def _pass(bound: BoundProgram) -> str:
    return f"{bound.program.pass_.name}: chain {bound.bound.chain.name}"


def _place_on_all_ranks(bound: BoundProgram, operation: Operation, ranks: Sequence[int]) -> str:
    chunk = f"chunk {operation.chunk + 1} of {bound.bound.num_chunks}"
    where = f"group {operation.group} of ranks {_listed(ranks)}"
    return f"{_pass(bound)}, stage {operation.stage}, {chunk}, {where}"


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _within(bound: BoundProgram, groups: Groups, operation: Operation) -> str:
    ranks = ""
    if operation.group is not None:
        group = groups[operation.group]
        ranks = f", group {group.name} (rank {group.rank} of {group.size})"
    chunk = f"chunk {operation.chunk + 1} of {bound.bound.num_chunks}"
    return f"stage {operation.stage}, {chunk}{ranks}"


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
    groups: Groups
    operation: Operation
    since_s: float
    result: torch.futures.Future[int]
    reason: str = ""

    @property
    def ranks(self) -> list[int]:
        """Of the group, as numbered in the whole launch."""
        return dist.get_process_group_ranks(self.process_group)

    @property
    def place(self) -> str:
        """The collective, named alike on all ranks of the group."""
        return _place_on_all_ranks(self.bound, self.operation, self.ranks)

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
        # The last one printed, and the one that the other ranks can read of.
        self._printed: object = None
        self._written: object = None

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
        self._start()

    def watch_host(self, group: dist.ProcessGroup) -> None:
        """Watch the waits of the host for this group too, before the first pass."""
        if self._thread is None and self._has_watchdog and is_nccl(group):
            self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._look, name="monta time limit", daemon=True)
            self._thread.start()

    def late(self, now_s: float) -> str | None:
        """Report due at `now_s`, by `time.monotonic`; None if there is nothing new."""
        # Only the thread's calls remove entries.
        while self.pending and self.pending[0].result.done():
            self.pending.popleft()
        oldest = self.pending[0] if self.pending else None
        waiting = ([] if oldest is None else [oldest]) + host_waits[-1:]
        self._write_first([one for one in waiting if _is_beyond(one, WRITTEN_AT, now_s)])
        for one in waiting:
            limit, waited_s = timeout_of(one.process_group), now_s - one.since_s
            if limit is None or not _is_beyond(one, PRINTED_AT, now_s):
                continue
            if one is self._printed:
                break
            self._printed = one
            return (
                f"{one} has not ended after {waited_s:.0f} s, and its time limit is "
                f"{limit.total_seconds():.0f} s\n{call_roll(one.place, one.ranks, one.reason)}\n"
                f"{self._last_operations(oldest)}; {versions()}"
            )
        return None

    def _write_first(self, late: Sequence["Started | HostWait"]) -> None:
        """Let the other ranks read where this one waits for long; no more once it has gone on."""
        first = late[0] if late else None
        if first is not self._written:
            roll_call.write(first.place if first is not None else "")
            self._written = first

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


def _is_beyond(one: Started | HostWait, share: float, now_s: float) -> bool:
    """Whether a share of the time limit has passed."""
    limit = timeout_of(one.process_group)
    return limit is not None and now_s - one.since_s >= share * limit.total_seconds()


@cache
def device_time_limit() -> TimeLimit:
    """Watcher of all passes' collectives."""
    return TimeLimit()
