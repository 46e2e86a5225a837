"""What each operation of a program waits for, as its policy wants it."""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from monta_megatron.chains.program import Operation, Policy


class Waits(NamedTuple):
    """Fields of an `Operation` that follow from its place among the others."""

    waits: tuple[int, ...]
    after: tuple[int, ...]
    launch_after: tuple[int, ...]
    host: Literal["enqueues", "runs", "starts"]


def waits_of(
    operations: Sequence[Operation], needs: Sequence[Collection[int]], policy: Policy
) -> list[Waits]:
    """What every operation waits for.

    Args:
        operations: in the order of issue.
        needs: for each, the operations that have to end before it: they have written what it reads,
            or read what it overwrites.
        policy: how the program is executed.
    """
    return (_on_host if policy == "host" else _on_streams)(operations, needs)


def _on_streams(operations: Sequence[Operation], needs: Sequence[Collection[int]]) -> list[Waits]:
    """On a device: streams wait for each other, the host for nothing."""
    # What runs operations in order: a side stream, or a group's own.
    queues = [one.group if one.is_collective else one.stream for one in operations]
    # (stream, queue) -> the latest operation of the queue for which the stream has waited.
    waited: dict[tuple[int, object], int] = {}
    latest: dict[object, int] = {}
    result = []
    for number, (operation, numbers) in enumerate(zip(operations, needs, strict=True)):
        stream, waits = operation.stream, []
        # A wait for the latest operation of a queue is one for all before it.
        for need in sorted(numbers, reverse=True):
            queue = queues[need]
            if queue != stream and need > waited.get((stream, queue), -1):
                waited[stream, queue] = need
                waits.append(need)
        before = {latest[queue] for queue in (queues[number], stream) if queue in latest}
        result.append(Waits(tuple(waits), tuple(sorted(before.union(waits))), (), "enqueues"))
        latest[queues[number]] = number
    return result


def _on_host(operations: Sequence[Operation], needs: Sequence[Collection[int]]) -> list[Waits]:
    """On CPU ranks: the host waits for collectives, and for each copy that it makes itself."""
    waited: set[int] = set()
    copied: tuple[int, ...] = ()
    result = []
    for number, (operation, numbers) in enumerate(zip(operations, needs, strict=True)):
        waits = tuple(
            need
            for need in sorted(numbers)
            if operations[need].is_collective and need not in waited
        )
        waited.update(waits)
        host: Literal["starts", "runs"] = "starts" if operation.is_collective else "runs"
        result.append(Waits(waits, (), copied + waits, host))
        copied = copied if operation.is_collective else (number,)
    return result
