"""When the operations of a program run: an event simulation with rates, and its bounds.

An operation starts when those that it has to come after have ended, and the host has launched it.
The host launches in the order of issue, which takes time; where it runs copies itself, it waits for
what an operation reads before it gets to it. Operations that run at once slow each other: each is
slowed by

    1 + the sum over the others of (its factor - 1), at most the number of operations running.

It is a sum and not a product because k operations that share one resource, with a factor of 2, then
run at 1/k each, which is what sharing means; a product would give 1/2**(k - 1), slower than
one after the other. The cap ensures this for factors above 2 too, so no schedule is slower than
the serial one, and none is faster than its busiest resource.

A device does what is queued while its host goes on, so a pass does not begin with an idle device
and an idle host: the host is ahead of it by the lead, the time until all that was queued before the
pass has ended, when the host gets to the pass. A launch is exposed only where the lead is used up.
The lead of a pass follows from what was before it:

- the host waits for the counts in a dispatch, when nothing else is queued: its lead is 0;
- a combine begins with what its dispatch left: the time from the last launch to the last end;
- a backward pass waits for nothing, nor do those before it. In n layers, one after the other, whose
  two passes take the device D us and the host H us, the host is ahead by n (D - H) if D >= H: after
  the first few layers all launches are hidden and the passes take D. If D < H the lead is used up
  and each pass begins with what the one before it left, which makes H of the two together.

Hand-worked: passes that take the device 10 and 2 us, and the host 3 us each, take 12 us a layer, as
the second one's launches run during the first; where the host takes 8 us each they take 16.

On CPU ranks the host runs the copies itself, and is ahead of nothing.

With all factors 1 and no launch times this is, for stages that follow each other, the recurrence of
a pipeline,

    ends[s][c] = max(ends[s - 1][c], ends[s][c - 1]) + times[s][c]

Notation: C = chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from monta_megatron.chains.program import Operation, Resource

Factor = Callable[[Resource, Resource], float]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The same thing done for every chunk, with its times.

    Attributes:
        stage: name of the stage.
        resource: that it occupies.
        times_us: [C] how long it runs alone.
        launch_us: host time to launch it, per chunk.
    """

    stage: str
    resource: Resource
    times_us: tuple[float, ...]
    launch_us: float = 0.0


class Times(NamedTuple):
    """When one operation was launched, started and ended, in us."""

    launched_us: float
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When everything runs.

    Attributes:
        times: of each operation, in the order of issue.
        host_us: when the last one was launched; below 0 where the lead was not used up.
        total_us: when the last one ends.
    """

    times: tuple[Times, ...]
    host_us: float
    total_us: float


def simulate(
    operations: Sequence[Operation],
    works: Sequence[Work],
    factor: Factor,
    lead_us: float = 0.0,
) -> Schedule:
    """Run the operations of one pass.

    Args:
        operations: in the order of issue.
        works: [series] what each operation costs, its chunks in the order of issue.
        factor: how much an operation on one resource is slowed by one on another.
        lead_us: by how much the host is ahead of the device at the start.
    """
    times = [iter(work.times_us) for work in works]
    times_us = [next(times[operation.series]) for operation in operations]
    # [kind of task][likewise]: what a running task of the second adds to the slowdown of one of the
    # first; the kinds are the series, then the launches of each series.
    resources: list[Resource] = [work.resource for work in works]
    resources += ["memory"] * len(works)
    of_resource = {
        first: [factor(first, second) - 1 for second in resources] for first in set(resources)
    }
    excess = [
        [*row[:kind], 1.0, *row[kind + 1 :]]
        for kind, row in enumerate(of_resource[resource] for resource in resources)
    ]
    kinds = [operation.series for operation in operations]
    # A launch has the number ~n, which counts from the end.
    kinds += [len(works) + kind for kind in reversed(kinds)]
    waits_for = [len(operation.after) for operation in operations]
    followers: list[list[int]] = [[] for _ in operations]
    for operation in operations:
        for number in operation.after:
            followers[number].append(operation.number)
    now_us, host_free_us = 0.0, -lead_us
    launched_us: list[float] = []
    starts_us: dict[int, float] = {}
    ends_us: dict[int, float] = {}
    # Running task -> the time left if it ran alone: an operation, or ~number for its launch by a
    # host whose launches are work like copies.
    left_us: dict[int, float] = {}
    # Operations that wait for nothing but their launch -> when that is over.
    until_us: dict[int, float] = {}

    def start(number: int) -> None:
        """Start an operation that is launched, if all that it comes after has ended."""
        if waits_for[number] > 0 or number >= len(launched_us):
            return
        if launched_us[number] > now_us:
            until_us[number] = launched_us[number]
            return
        starts_us[number] = now_us
        left_us[number] = times_us[number]

    def launch() -> None:
        """Launch until the host has to wait for something."""
        nonlocal host_free_us
        while len(launched_us) < len(operations):
            operation = operations[len(launched_us)]
            launch_us = works[operation.series].launch_us
            is_launching = ~operation.number in left_us
            if is_launching or any(number not in ends_us for number in operation.launch_after):
                return
            if operation.host == "starts" and launch_us > 0:
                left_us[~operation.number] = launch_us
                return
            if now_us > 0:
                # A host that has waited has no lead left.
                host_free_us = max(host_free_us, now_us)
            host_free_us += launch_us
            launched_us.append(host_free_us)
            start(operation.number)

    launch()
    while left_us or until_us:
        # Step 1: the next event is the first end, or the first start before it.
        step_us, ends, starts = float("inf"), None, None
        slowdowns = {}
        for task, left in left_us.items():
            # The 1 in the formula is the task itself, counted with the tasks of its kind.
            slowdown, added = 0.0, excess[kinds[task]]
            for other in left_us:
                slowdown += added[kinds[other]]
            slowdowns[task] = slowdown = min(slowdown, len(left_us))
            if left * slowdown < step_us:
                step_us, ends = left * slowdown, task
        for number, until in until_us.items():
            if until - now_us < step_us:
                step_us, starts = until - now_us, number

        # Step 2: advance everything that runs to then.
        now_us += step_us
        for task, slowdown in slowdowns.items():
            # Tasks that end together differ by rounding; none goes below 0.
            left_us[task] = max(left_us[task] - step_us / slowdown, 0.0)

        # Step 3: the event.
        if starts is not None:
            now_us = until_us.pop(starts)
            start(starts)
            continue
        assert ends is not None
        del left_us[ends]
        if ends < 0:
            host_free_us = now_us
            launched_us.append(now_us)
            start(~ends)
        else:
            ends_us[ends] = now_us
            for number in followers[ends]:
                waits_for[number] -= 1
                start(number)
        launch()
    assert len(ends_us) == len(operations), "the pipeline is stuck"
    return Schedule(
        times=tuple(
            Times(launched_us[number], starts_us[number], ends_us[number])
            for number in range(len(operations))
        ),
        host_us=host_free_us,
        total_us=max(ends_us.values(), default=0.0),
    )


def serial_us(works: Sequence[Work]) -> float:
    """One after the other, launches included."""
    return sum(sum(work.times_us) + work.launch_us * len(work.times_us) for work in works)
