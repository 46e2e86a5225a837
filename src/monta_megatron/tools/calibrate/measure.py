"""Runs tasks round by round, each once per round, until the time is spent.

The time of a run is that of its slowest rank. A short task is repeated within a run, since the
ranks' uneven start and end would otherwise be most of its time.

Where CPU ranks outnumber the cores, an operation that stays on a node is the cores' work, and while
one rank waits the others work. So what counts is how long a core is busy with the operation, for
all ranks that share it. Such operations run mixed, one after the other, as in an exchange: the
caches then hold nothing of an operation when it starts, and the end of no barrier is counted.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from monta_megatron.tools.calibrate.operations import Start
from monta_megatron.tools.calibrate.points import HostWork, Pair, Point, Repeated, Task
from monta_megatron.tools.calibrate.record import Sample
from monta_megatron.tools.joined_ranks import wait_for_all

MAX_ROUNDS = 60
# The time that a run should take; shorter tasks are repeated within it.
RUN_US = 20_000.0
# In an exchange different operations follow each other. Many runs of a small one in a row are two
# to three times as fast, as data and code are in the caches. The second run is like a later chunk.
MAX_REPEATS_IN_RUN = 2


def run(task: Task, starts: Mapping[str, Start], repeats: int = 1) -> Sample:
    """One run, by all ranks together; each of them gets the slowest one's times.

    Args:
        task: what is run.
        starts: by the name of a point or of host work, the function that starts it.
        repeats: how many times in a row; the times returned are for one.
    """
    beside: list[Start] = []
    times = 1
    if isinstance(task, Pair):
        start = starts[task.first.point.name]
        beside = [starts[task.second.point.name]] * task.second.repeats
    elif isinstance(task, Repeated):
        start, times = starts[task.point.name], task.repeats
    else:
        start = starts[task.name]
    wait_for_all()
    launch_s = 0.0
    begin_s = time.perf_counter()
    for _ in range(repeats * times):
        launch_begin_s = time.perf_counter()
        wait = start()
        launch_s += time.perf_counter() - launch_begin_s
        for start_other in beside:
            start_other()()
        wait()
    torch.cuda.synchronize()
    slowest = torch.tensor([time.perf_counter() - begin_s, launch_s], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    us, launch_us = (slowest * 1e6 / repeats).tolist()
    return Sample(task=task.name, us=us, launch_us=launch_us)


def run_mixed(
    tasks: Sequence[tuple[Task, int]],
    starts: Mapping[str, Start],
    ranks_per_core: float,
) -> list[Sample]:
    """Run all of them, by all ranks together, with no barrier in between.

    Args:
        tasks: what is run, and how often in a row.
        starts: by a task's name, the function that starts it.
        ranks_per_core: ranks that share a core.

    Returns:
        For each task, how long a core is busy with its last run: the mean over ranks, times the
        ranks that share a core. Where a task runs more than once, the same for its first run.
    """
    names: list[str] = []
    busy_s: list[tuple[float, float]] = []
    wait_for_all()
    for task, times in tasks:
        runs_s = []
        for _ in range(times):
            begin_s, begin_here_s = time.process_time(), time.thread_time()
            wait = starts[task.name]()
            launch_s = time.thread_time() - begin_here_s
            wait()
            runs_s.append((time.process_time() - begin_s, launch_s))
        if times > 1:
            assert isinstance(task, Point)
            names.append(task.name_of_first)
            busy_s.append(runs_s[0])
        names.append(task.name)
        busy_s.append(runs_s[-1])
    of_all = torch.tensor(busy_s, dtype=torch.float64)
    dist.all_reduce(of_all)
    of_all *= 1e6 * ranks_per_core / dist.get_world_size()
    return [
        Sample(task=name, us=us, launch_us=launch_us)
        for name, (us, launch_us) in zip(names, of_all.tolist(), strict=True)
    ]


def first_runs(
    points: Sequence[Point],
    starts: Mapping[str, Start],
    kept_us: Mapping[str, float],
    on_point: Callable[[Point, float | None], None],
) -> list[float]:
    """About how long each point takes, not counting a run that makes connections and buffers.

    Args:
        points: all of them.
        starts: by a point's name, the function that starts it.
        kept_us: by a point's name, the time from an earlier calibration.
        on_point: called for each point, with the time measured here, or None if it was kept.
    """
    times_us = []
    for point in points:
        run(point, starts)
        us = None
        if point.name not in kept_us:
            us = min(run(point, starts).us for _ in range(2))
        times_us.append(kept_us[point.name] if us is None else us)
        on_point(point, us)
    return times_us


def measure_rounds(
    tasks: Sequence[Task],
    starts: Mapping[str, Start],
    expected_us: Sequence[float],
    ranks_per_core: float,
    taken: Counter[str],
    end_s: float,
    on_sample: Callable[[Sample], None],
) -> None:
    """Run every task once per round; at least one round, and no further one that would end late.

    Args:
        tasks: all of them.
        starts: by the name of a point or of host work, the function that starts it.
        expected_us: about how long a run of each task takes.
        ranks_per_core: CPU ranks that share a core; 1 if each has its own.
        taken: by a task's name, how many samples an earlier calibration has taken.
        end_s: when the last round has to end, on the first rank's monotonic clock.
        on_sample: called for each sample.
    """
    round_s = 0.0
    for number in range(MAX_ROUNDS):
        left = [
            (task, task_us)
            for task, task_us in zip(tasks, expected_us, strict=True)
            if taken[task.name] <= number
        ]
        begin_s = time.monotonic()
        if number > 0 and _first_rank_says(begin_s + round_s > end_s):
            return
        mixed: list[tuple[Task, int]] = []
        for task, task_us in left:
            repeats = min(max(int(RUN_US / task_us), 1), MAX_REPEATS_IN_RUN)
            if ranks_per_core > 1 and _stays_on_node(task):
                mixed.append((task, repeats))
            else:
                on_sample(run(task, starts, repeats))
        # The same order on every rank, a different one in every round; but tasks of similar size
        # stay together, as in an exchange: large ones leave nothing in the caches for small ones.
        random.Random(number).shuffle(mixed)
        mixed.sort(key=lambda entry: _size_class(entry[0]))
        for sample in run_mixed(mixed, starts, ranks_per_core) if mixed else ():
            on_sample(sample)
        round_s = time.monotonic() - begin_s


def _stays_on_node(task: Task) -> bool:
    return isinstance(task, HostWork) or (isinstance(task, Point) and task.resource != "inter")


def _size_class(task: Task) -> int:
    """The size in powers of 4; the host's work counts as small."""
    return task.num_bytes.bit_length() // 2 if isinstance(task, Point) else 0


def _first_rank_says(here: bool) -> bool:
    answer = torch.tensor([here], dtype=torch.int64)
    dist.broadcast(answer, src=0)
    return bool(answer.item())
