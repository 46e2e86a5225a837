"""Errors of an exchange: the passes and the waits of the host that fail or are late.

Every rank issues the same operations in the same order, so operation numbers compare across ranks:
the rank with the lowest is behind, and the others wait for it.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist

from monta_megatron.chains.program import BoundProgram, Operation
from monta_megatron.common import __version__
from monta_megatron.common.files import version_of
from monta_megatron.exchange.collectives import PeerGroup

if TYPE_CHECKING:
    from monta_megatron.exchange.executor import Execution

Groups = Mapping[str, PeerGroup]


class ExchangeError(RuntimeError):
    """A failed exchange; the message names the collective, the last operations and versions."""


# Passes of this process in flight; a pass leaves the set with its last reference.
UNDER_WAY: "WeakSet[Execution]" = WeakSet()


def failure(execution: "Execution", operation: Operation, error: Exception) -> ExchangeError:
    """Error of an operation that failed at its start or wait."""
    place = place_of(execution.bound, execution.groups, operation)
    return ExchangeError(
        f"{place} failed: {error}\n{_of_pass(execution, operation.number)}; {versions()}"
    )


def passes_under_way() -> str:
    """All passes in flight, for an error outside of passes."""
    passes = [f"{_pass(each.bound)}: {_of_pass(each)}" for each in UNDER_WAY]
    return "; ".join([*(passes or ["no pass is under way"]), versions()])


class HostWait(NamedTuple):
    """A collective outside the passes on which the host may be blocked.

    Attributes:
        what: the collective and its purpose.
        process_group: the ranks of the exchange.
        since_s: start, by `time.monotonic`.
    """

    what: str
    process_group: dist.ProcessGroup
    since_s: float

    def __str__(self) -> str:
        ranks = dist.get_process_group_ranks(self.process_group)
        rank = dist.get_group_rank(self.process_group, dist.get_rank())
        named = ", ".join(map(str, ranks))
        return f"{self.what}, group tp_ep (rank {rank} of {len(ranks)}: ranks {named})"


# Of this process now, the latest last; `time_limit` reports those that are late.
host_waits: list[HostWait] = []


@contextmanager
def naming_failure(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Raise failures inside the block as `ExchangeError`s that name the collective.

    Args:
        what: the collective and its purpose.
        group: the ranks of an exchange.

    Raises:
        ExchangeError: the collective failed or timed out.
    """
    wait = HostWait(what, group, time.monotonic())
    host_waits.append(wait)
    try:
        yield
    except RuntimeError as error:
        raise ExchangeError(f"{wait} failed: {error}\n{passes_under_way()}") from error
    finally:
        host_waits.remove(wait)


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


def _within(bound: BoundProgram, groups: Groups, operation: Operation) -> str:
    ranks = ""
    if operation.group is not None:
        group = groups[operation.group]
        ranks = f", group {group.name} (rank {group.rank} of {group.size})"
    chunk = f"chunk {operation.chunk + 1} of {bound.bound.num_chunks}"
    return f"stage {operation.stage}, {chunk}{ranks}"
