"""When the operations of a layer's passes run: an event simulation with rates.

An operation starts when those that it has to come after have ended, and the host has launched it.
The host launches in the order of issue, which takes time; where it runs copies itself, it waits for
what an operation reads before it gets to it. Operations that run at once slow each other: each is
slowed by

    1 + the sum over the others of (its factor - 1), at most the number of operations running.

It is a sum and not a product because k operations that share one resource, with a factor of 2, then
run at 1/k each, which is what sharing means; a product would give 1/2**(k - 1), slower than
one after the other. The cap ensures this for factors above 2 too, so no schedule is slower than
the serial one, and none is faster than its busiest resource.

With all factors 1 and no launch times this is, for stages that follow each other, the recurrence of
a pipeline,

    ends[s][c] = max(ends[s - 1][c], ends[s][c - 1]) + times[s][c]
"""

from collections.abc import Callable, Sequence
from operator import mul
from typing import NamedTuple

from monta_megatron.chains.program import LINKS, Resource

Factor = Callable[[Resource, Resource], float]


class Task(NamedTuple):
    """One operation, in the order of issue.

    Attributes:
        work: number of the work that it is a chunk of; for readers of the schedule.
        chunk: None for all chunks at once; likewise.
        operation: number in the program of its pass; None outside of the program; likewise.
        resource: that it occupies.
        us: how long it runs alone.
        launch_us: host time to launch it.
        after: tasks that end before it starts.
        launch_after: tasks that end before the host launches it.
        copies_at_launch: the launch is a copy that the host runs, and slows others as one.
    """

    work: int
    chunk: int | None
    operation: int | None
    resource: Resource
    us: float
    launch_us: float
    after: tuple[int, ...] = ()
    launch_after: tuple[int, ...] = ()
    copies_at_launch: bool = False


class Times(NamedTuple):
    """When one task was launched, started and ended, in us."""

    launched_us: float
    start_us: float
    end_us: float


def simulate(tasks: Sequence[Task], factor: Factor) -> tuple[Times, ...]:
    """Run tasks.

    Args:
        tasks: in the order of issue.
        factor: how much an operation on one resource is slowed by one on another.

    Returns:
        The times of each task.
    """
    # Index of a resource, that of memory first.
    resources: list[Resource] = ["memory"]
    resources += [resource for resource in LINKS if any(t.resource == resource for t in tasks)]
    of_task = [resources.index(task.resource) for task in tasks]
    excess = [[factor(one, other) - 1 for other in resources] for one in resources]
    # Numbers of running operations by resource -> the slowdown of one on each of them.
    known_slowdowns: dict[tuple[int, ...], list[float]] = {}
    waits_for = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(number)
    now_us, host_free_us = 0.0, 0.0
    launched_us: list[float] = []
    starts_us: dict[int, float] = {}
    ends_us: dict[int, float] = {}
    # What runs -> the time left if it ran alone: a task, or ~number for the copy at its launch.
    left_us: dict[int, float] = {}
    running = [0] * len(resources)
    # Tasks that wait for nothing but their launch -> when that is over.
    until_us: dict[int, float] = {}

    def resource_of(number: int) -> int:
        return 0 if number < 0 else of_task[number]

    def run(number: int, us: float) -> None:
        left_us[number] = us
        running[resource_of(number)] += 1

    def slowdowns_now() -> list[float]:
        """Of an operation on each resource that has one."""
        key = tuple(running)
        if key not in known_slowdowns:
            known_slowdowns[key] = [
                min(1 + sum(map(mul, running, row)) - row[place], len(left_us))
                for place, row in enumerate(excess)
            ]
        return known_slowdowns[key]

    def start(number: int) -> None:
        """Start a task that is launched, if all that it comes after has ended."""
        if waits_for[number] > 0 or number >= len(launched_us):
            return
        if launched_us[number] > now_us:
            until_us[number] = launched_us[number]
            return
        starts_us[number] = now_us
        run(number, tasks[number].us)

    def launch() -> None:
        """Launch until the host has to wait for something."""
        nonlocal host_free_us
        while len(launched_us) < len(tasks):
            number = len(launched_us)
            task = tasks[number]
            if ~number in left_us or any(before not in ends_us for before in task.launch_after):
                return
            if task.copies_at_launch and task.launch_us > 0:
                run(~number, task.launch_us)
                return
            if task.launch_after:
                host_free_us = max(host_free_us, *(ends_us[before] for before in task.launch_after))
            host_free_us += task.launch_us
            launched_us.append(host_free_us)
            start(number)

    launch()
    while left_us or until_us:
        # Step 1: the next event is the first end, or the first start before it.
        slowdowns = slowdowns_now()
        step_us, ends, starts = float("inf"), None, None
        for number, left in left_us.items():
            if left * slowdowns[resource_of(number)] < step_us:
                step_us, ends = left * slowdowns[resource_of(number)], number
        for number, until in until_us.items():
            if until - now_us < step_us:
                step_us, starts = until - now_us, number

        # Step 2: advance everything that runs to then.
        now_us += step_us
        for number in left_us:
            # Tasks that end together differ by rounding; none goes below 0.
            advanced_us = step_us / slowdowns[resource_of(number)]
            left_us[number] = max(left_us[number] - advanced_us, 0.0)

        # Step 3: the event.
        if starts is not None:
            now_us = until_us.pop(starts)
            start(starts)
            continue
        assert ends is not None
        del left_us[ends]
        running[resource_of(ends)] -= 1
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
    assert len(ends_us) == len(tasks), "the pipeline is stuck"
    return tuple(
        Times(launched_us[number], starts_us[number], ends_us[number])
        for number in range(len(tasks))
    )
