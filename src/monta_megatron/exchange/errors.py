"""Errors of an exchange, and the text of a rank's passes where one fails or is late.

Every rank issues the same operations in the same order, so the numbers of two ranks compare: the
rank with the lowest is behind, and the others wait for it. Below all else that exchanges.
"""

from collections.abc import Collection, Mapping
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from monta_megatron.chains.program import BoundProgram, Operation
from monta_megatron.common import __version__
from monta_megatron.common.presets import version_of
from monta_megatron.exchange.collectives import PeerGroup

Groups = Mapping[str, PeerGroup]


class ExchangeError(RuntimeError):
    """An exchange failed; the message names the place, the last operations and the versions."""


class PassUnderWay(Protocol):
    """A pass that has begun.

    Attributes:
        bound: its program with a micro-batch's rows.
        groups: of its collectives.
        num_issued: operations that were issued.
        works: by number of a collective, its parts; empty once the host has waited.
    """

    bound: BoundProgram
    groups: Groups
    num_issued: int
    works: dict[int, list[dist.Work]]


# Passes of this process that are not over.
UNDER_WAY: WeakSet[PassUnderWay] = WeakSet()


def failure(one: PassUnderWay, operation: Operation, error: Exception) -> ExchangeError:
    """The error of an operation that failed when it was started or waited for."""
    place = place_of(one.bound, one.groups, operation)
    return ExchangeError(
        f"{place} failed: {error}\n{_of_pass(one, operation.number)}; {versions()}"
    )


def passes_under_way() -> str:
    """All passes under way, for an error that belongs to none of them."""
    passes = [f"{_pass(each.bound)}: {_of_pass(each)}" for each in UNDER_WAY]
    return "; ".join([*(passes or ["no pass is under way"]), versions()])


def place_of(bound: BoundProgram, groups: Groups, operation: Operation) -> str:
    """Pass, chain, stage, chunk and group of an operation; a copy has no group."""
    return f"{_pass(bound)}, {_within(bound, groups, operation)}"


def last_operations(
    bound: BoundProgram, groups: Groups, num_issued: int, pending: Collection[int]
) -> str:
    """The last operation that has started, and the last that has ended, in the order of issue.

    Args:
        bound: the program of a pass.
        groups: of its collectives.
        num_issued: operations that were issued.
        pending: numbers of the collectives among them that have not ended.
    """
    operations = bound.program.operations
    # Work on a device behind work that has not ended has not even started.
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
    """Versions of the libraries in an exchange; NCCL's where that is the backend."""
    found = [f"monta-megatron {__version__}"]
    if megatron := version_of("megatron-core"):
        found.append(f"megatron-core {megatron}")
    found.append(f"torch {torch.__version__}")
    if dist.is_initialized() and "nccl" in dist.get_backend_config():
        found.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    return ", ".join(found)


def _of_pass(one: PassUnderWay, *failed: int) -> str:
    pending = {
        number for number, works in one.works.items() if not all(map(_has_ended, works))
    }.union(failed)
    return last_operations(one.bound, one.groups, one.num_issued, pending)


def _has_ended(work: dist.Work) -> bool:
    try:
        # A collective that has failed is completed too; then waiting for it raises.
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
