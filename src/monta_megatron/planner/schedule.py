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
        resource: resource that the operation occupies.
        us: time of the operation when it runs alone.
        launch_us: host time to launch the operation.
        after: numbers of the tasks that end before it starts.
        launch_after: numbers of the tasks that end before the host launches it.
        copies_at_launch: whether the launch is a copy on the host, which slows others as a copy.
    """

    resource: Resource
    us: float
    launch_us: float
    after: tuple[int, ...] = ()
    launch_after: tuple[int, ...] = ()
    copies_at_launch: bool = False


def simulate(tasks: Sequence[Task], factor: Factor) -> tuple[float, ...]:
    """Run tasks.

    Args:
        tasks: tasks in the order of issue.
        factor: slowdown of an operation on one resource beside an operation on another.

    Returns:
        End of each task, in us.
    """
    # Index of a resource: memory first, the host last, which nothing slows and which slows nothing.
    resources: list[Resource] = ["memory"]
    resources += [resource for resource in LINKS if any(t.resource == resource for t in tasks)]
    host = len(resources)
    task_resources = [resources.index(task.resource) for task in tasks]
    launch_resources = [0 if task.copies_at_launch else host for task in tasks]
    excess = [[factor(one, other) - 1 for other in resources] for one in resources]
    # Numbers of running operations by resource -> the slowdown of one on each of them.
    known_slowdowns: dict[tuple[int, ...], list[float]] = {}
    waits_for = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(number)
    now_us = 0.0
    num_launched = 0
    ends_us: dict[int, float] = {}
    # What runs -> the time left if it ran alone: a task, or ~number for its launch.
    left_us: dict[int, float] = {}
    running = [0] * (host + 1)

    def resource_of(number: int) -> int:
        return launch_resources[~number] if number < 0 else task_resources[number]

    def run(number: int, us: float) -> None:
        left_us[number] = us
        running[resource_of(number)] += 1

    def slowdowns_now() -> list[float]:
        """Of an operation on each resource that has one."""
        key = tuple(running[:host])
        if key not in known_slowdowns:
            known_slowdowns[key] = [
                min(1 + sum(map(mul, key, row)) - row[place], sum(key))
                for place, row in enumerate(excess)
            ]
            known_slowdowns[key].append(1.0)
        return known_slowdowns[key]

    def start(number: int) -> None:
        """Start a task that is launched, if all that it comes after has ended."""
        if waits_for[number] == 0 and number < num_launched:
            run(number, tasks[number].us)

    def launch() -> None:
        """Launch the next task, unless the host is busy or waits for something."""
        if num_launched == len(tasks) or ~num_launched in left_us:
            return
        task = tasks[num_launched]
        if all(before in ends_us for before in task.launch_after):
            run(~num_launched, task.launch_us)

    launch()
    while left_us:
        # Step 1: the next event is the first end.
        slowdowns = slowdowns_now()
        step_us, ended = min(
            (left * slowdowns[resource_of(number)], number) for number, left in left_us.items()
        )

        # Step 2: advance everything that runs to then.
        now_us += step_us
        for number in left_us:
            # Tasks that end together differ by rounding; none goes below 0.
            advanced_us = step_us / slowdowns[resource_of(number)]
            left_us[number] = max(left_us[number] - advanced_us, 0.0)

        # Step 3: what ends lets others start.
        del left_us[ended]
        running[resource_of(ended)] -= 1
        if ended < 0:
            num_launched += 1
            start(~ended)
        else:
            ends_us[ended] = now_us
            for number in followers[ended]:
                waits_for[number] -= 1
                start(number)
        launch()
    assert len(ends_us) == len(tasks), "the pipeline is stuck"
    return tuple(ends_us[number] for number in range(len(tasks)))
