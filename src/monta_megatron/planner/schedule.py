"""When the stages of a pipelined walk run: an event simulation with rates, and its bounds.

Stage s of chunk c starts after stage s - 1 of chunk c and after stage s of chunk c - 1, and after
the host has launched it. The host launches in program order, and each launch takes time.
Operations that run at once slow each other: each is slowed by

    1 + the sum over the others of (its factor - 1), at most the number of operations running.

It is a sum and not a product because k operations that share one resource (each pair's factor is 2)
then run at 1/k each, which is what sharing means; a product would give 1/2**(k - 1), slower than
one after the other. The cap ensures this for factors above 2 too, so no schedule is slower than
the serial one, and none is faster than its busiest resource.

Where copies block the host (CPU ranks), the host waits for what an operation reads before it
launches it, and runs the copies itself; the launch of a collective is work of the same kind, slowed
like a copy by the collectives in the background. No stream keeps a stage's collectives in order:
each runs from its launch on, and those under way share their resource, so chunks arrive later and
closer together.

With all factors 1 and no launch times this is the recurrence of a pipeline,

    ends[s][c] = max(ends[s - 1][c], ends[s][c - 1]) + times[s][c]

Notation: N = stages, C = chunks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from monta_megatron.planner.curves import TIERS, Tier

Factor = Callable[[Tier, Tier], float]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A stage of a pipeline, with its time in each chunk.

    Attributes:
        stage: name of the stage.
        resource: what it occupies.
        times_us: [C] how long it runs alone.
        depth: how many steps it trails the first stage in program order.
        launch_us: host time to launch it, per chunk.
    """

    stage: str
    resource: Tier
    times_us: tuple[float, ...]
    depth: int = 0
    launch_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When everything runs.

    Attributes:
        launched_us: [N][C] when the host has launched it.
        starts_us: [N][C] when it starts.
        ends_us: [N][C] when it ends.
        total_us: when the last one ends.
    """

    launched_us: tuple[tuple[float, ...], ...]
    starts_us: tuple[tuple[float, ...], ...]
    ends_us: tuple[tuple[float, ...], ...]
    total_us: float


def simulate(works: Sequence[Work], factor: Factor, copies_block_host: bool = False) -> Schedule:
    """Run the stages of one walk.

    Args:
        works: in the walk's order, all with the same number of chunks.
        factor: how much an operation on one resource is slowed by one on another.
        copies_block_host: see the top of this file.
    """
    num_chunks = len(works[0].times_us) if works else 0
    asked_for = list(range(len(works)))
    if copies_block_host:
        works, asked_for = _with_launches_as_copies(works)
    host = _Host(works, num_chunks, copies_block_host)
    # [one][other]: what a running task of stage `other` adds to the slowdown of one of stage `one`.
    excess = [
        [1.0 if one is other else factor(one.resource, other.resource) - 1 for other in works]
        for one in works
    ]
    starts_us: list[list[float]] = [[] for _ in works]
    ends_us: list[dict[int, float]] = [{} for _ in works]
    now_us = 0.0
    # stage -> when its next chunk, which waits for its launch, may start.
    waits_until_us: dict[int, float] = {}
    # Running (stage, chunk) -> the time left if it ran alone, in us.
    left_us: dict[tuple[int, int], float] = {}

    def feed(stage: int) -> None:
        """Start a stage's next chunks if their inputs are ready, or let one wait for its launch."""
        shares = copies_block_host and works[stage].resource != "memory"
        while (chunk := len(starts_us[stage])) < len(host.launched_us[stage]):
            is_fed = stage == 0 or chunk in ends_us[stage - 1]
            is_free = shares or chunk == len(ends_us[stage])
            if not is_fed or not is_free:
                return
            launched_us = host.launched_us[stage][chunk]
            if launched_us > now_us:
                waits_until_us[stage] = launched_us
                return
            starts_us[stage].append(now_us)
            left_us[stage, chunk] = works[stage].times_us[chunk]

    for stage in host.launch(now_us, ends_us):
        feed(stage)
    while left_us or waits_until_us:
        # Step 1: the next event is the first end, or the first start before it.
        step_us, ends, starts = float("inf"), (-1, -1), -1
        slowdowns = {}
        for task, left in left_us.items():
            # The 1 in the formula is the task itself, counted with the tasks of its stage.
            slowdown = 0.0
            for stage, _ in left_us:
                slowdown += excess[task[0]][stage]
            slowdowns[task] = slowdown = min(slowdown, len(left_us))
            if left * slowdown < step_us:
                step_us, ends = left * slowdown, task
        for stage, until_us in waits_until_us.items():
            if until_us - now_us < step_us:
                step_us, starts = until_us - now_us, stage

        # Step 2: advance everything that runs to then.
        now_us += step_us
        for task, slowdown in slowdowns.items():
            # Tasks that end together differ by rounding; none goes below 0.
            left_us[task] = max(left_us[task] - step_us / slowdown, 0.0)

        # Step 3: the event.
        if starts >= 0:
            now_us = waits_until_us.pop(starts)
            feed(starts)
        else:
            del left_us[ends]
            stage, chunk = ends
            ends_us[stage][chunk] = now_us
            feed(stage)
            if stage + 1 < len(works):
                feed(stage + 1)
            for stage in host.launch(now_us, ends_us):
                feed(stage)
    assert all(len(ends) == num_chunks for ends in ends_us), "the pipeline is stuck"
    return Schedule(
        launched_us=tuple(tuple(host.launched_us[stage]) for stage in asked_for),
        starts_us=tuple(tuple(starts_us[stage]) for stage in asked_for),
        ends_us=tuple(
            tuple(ends_us[stage][chunk] for chunk in range(num_chunks)) for stage in asked_for
        ),
        total_us=now_us,
    )


def serial_us(works: Sequence[Work]) -> float:
    """One after the other, launches included."""
    return sum(sum(work.times_us) + work.launch_us * len(work.times_us) for work in works)


def lower_bound_us(works: Sequence[Work], factor: Factor) -> float:
    """A time that no schedule beats: the busiest resource, the host, the longest stage."""
    bounds = [sum(work.launch_us * len(work.times_us) for work in works)]
    for resource in TIERS:
        times = [sum(work.times_us) for work in works if work.resource == resource]
        if times:
            # n operations on one resource run together at n / slowdown of its rate.
            slowdown = 1 + (len(times) - 1) * (min(factor(resource, resource), 2.0) - 1)
            bounds += [sum(times) * slowdown / len(times), max(times)]
    return max(bounds)


def _with_launches_as_copies(works: Sequence[Work]) -> tuple[list[Work], list[int]]:
    """Make each collective's launch a stage before it; also where the given stages are now."""
    expanded: list[Work] = []
    positions = []
    for work in works:
        if work.resource != "memory" and work.launch_us > 0:
            times_us = (work.launch_us,) * len(work.times_us)
            expanded.append(replace(work, resource="memory", times_us=times_us, launch_us=0.0))
            work = replace(work, launch_us=0.0)
        positions.append(len(expanded))
        expanded.append(work)
    return expanded, positions


class _Host:
    """Launches the tasks in program order: step by step, and within a step stage by stage.

    Attributes:
        launched_us: by stage, when each chunk launched so far was launched.
    """

    def __init__(self, works: Sequence[Work], num_chunks: int, copies_block_host: bool) -> None:
        self.launched_us: list[list[float]] = [[] for _ in works]
        self._works = works
        self._copies_block_host = copies_block_host
        in_order = sorted(
            (chunk + work.depth, stage, chunk)
            for stage, work in enumerate(works)
            for chunk in range(num_chunks)
        )
        self._next = iter([(stage, chunk) for _, stage, chunk in in_order])
        self._task = next(self._next, None)
        self._free_us = 0.0
        self._copy: tuple[int, int] | None = None

    def launch(self, now_us: float, ends_us: Sequence[Mapping[int, float]]) -> list[int]:
        """Launch until the host has to wait for something; returns the stages it launched."""
        stages = []
        while self._task is not None and not self._has_to_wait(ends_us):
            stage, chunk = self._task
            work = self._works[stage]
            self._free_us = max(self._free_us, now_us) + work.launch_us
            self.launched_us[stage].append(self._free_us)
            stages.append(stage)
            if work.resource == "memory":
                self._copy = (stage, chunk)
            self._task = next(self._next, None)
        return stages

    def _has_to_wait(self, ends_us: Sequence[Mapping[int, float]]) -> bool:
        """Whether the next task's input is missing, or the host is still busy with a copy."""
        if not self._copies_block_host or self._task is None:
            return False
        stage, chunk = self._task
        is_fed = stage == 0 or chunk in ends_us[stage - 1]
        is_copying = self._copy is not None and self._copy[1] not in ends_us[self._copy[0]]
        return is_copying or not is_fed
