"""Runs tasks on all ranks of a group at once, round by round, until the time is spent.

The time of a run is that of its slowest rank. A short task is repeated within a run, since the
ranks' uneven start and end would otherwise be most of its time.

Where CPU ranks outnumber the cores, an operation that stays on a node is the cores' work, and while
one rank waits the others work. So what counts is how long a core is busy with the operation, for
all ranks that share it. Such operations run mixed, one after the other, as in an exchange: the
caches then hold nothing of an operation when it starts, and the end of no barrier is counted.

The next run and the end follow from times that all ranks share: no rank stops alone.
"""

import heapq
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from monta_megatron.calibration.operations import Starter
from monta_megatron.calibration.tasks import HostWork, Pair, Point, Repeated, Sample, Task

MAX_ROUNDS = 60
# The time that a run should take; shorter tasks are repeated within it.
RUN_US = 20_000.0
# In an exchange different operations follow each other. Many runs of a small one in a row are two
# to three times as fast, as data and code are in the caches. The second run is like a later chunk.
MAX_REPEATS_IN_RUN = 2


class Timer:
    """Times tasks; all ranks of the group call the same methods in the same order.

    Args:
        group: the ranks.
        device: that the group serves.
        start_of: gives the function that starts a point or the host's work.
        ranks_per_core: CPU ranks that share a core; 1 if each has its own.
        begin_s: when the calibration has begun, by `time.perf_counter`.

    Attributes:
        elapsed_s: since then, as far as all ranks know; the same on all of them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        start_of: Callable[[Task], Starter],
        ranks_per_core: float,
        begin_s: float,
    ) -> None:
        self._group, self._device, self._begin_s = group, device, begin_s
        self._start_of, self._ranks_per_core = start_of, ranks_per_core
        self.elapsed_s = 0.0

    def run(self, task: Task, repeats: int = 1) -> Sample:
        """One run; every rank gets the slowest one's times.

        Args:
            task: what is run.
            repeats: how many times in a row; the times returned are for one.
        """
        beside: list[Starter] = []
        times = 1
        if isinstance(task, Pair):
            start = self._start_of(task.first.point)
            beside = [self._start_of(task.second.point)] * task.second.repeats
        elif isinstance(task, Repeated):
            start, times = self._start_of(task.point), task.repeats
        else:
            start = self._start_of(task)
        self._wait_for_all()
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
        times_s = [time.perf_counter() - begin_s, launch_s]
        us, launch_us = (s * 1e6 / repeats for s in self._reduce(times_s, dist.ReduceOp.MAX))
        return Sample(task=task.name, us=us, launch_us=launch_us)

    def run_mixed(self, tasks: Sequence[tuple[Task, int]]) -> list[Sample]:
        """Run all of them, with no barrier in between.

        Args:
            tasks: what is run, and how often in a row.

        Returns:
            For each task, how long a core is busy with its last run: the mean over ranks, times the
            ranks that share a core. Where a task runs more than once, the same for its first run.
        """
        names: list[str] = []
        times_s: list[float] = []
        starts = [self._start_of(task) for task, _ in tasks]
        self._wait_for_all()
        for (task, times), start in zip(tasks, starts, strict=True):
            runs_s = []
            for _ in range(times):
                begin_s, begin_here_s = time.process_time(), time.thread_time()
                wait = start()
                launch_s = time.thread_time() - begin_here_s
                wait()
                runs_s.append((time.process_time() - begin_s, launch_s))
            if times > 1:
                assert isinstance(task, Point)
                names.append(task.name_of_first)
                times_s += runs_s[0]
            names.append(task.name)
            times_s += runs_s[-1]
        of_core_us = 1e6 * self._ranks_per_core
        of_all = iter(self._reduce(times_s, dist.ReduceOp.SUM))
        return [
            Sample(task=name, us=run_s * of_core_us, launch_us=launch_s * of_core_us)
            for name, run_s, launch_s in zip(names, of_all, of_all, strict=True)
        ]

    def first_runs(
        self,
        points: Sequence[Point],
        kept_us: Mapping[str, float],
        on_point: Callable[[Point, float | None], None],
    ) -> dict[Point, float]:
        """About how long each point takes, not counting a run that makes connections and buffers.

        All curves grow together, so that a killed calibration leaves none far behind.

        Args:
            points: all of them; those of a curve in the order of their sizes.
            kept_us: by a point's name, the time from an earlier calibration.
            on_point: called for each point, with the time measured here, or None if it was kept.
        """
        sizes = [[p for p in points if p.curve == curve] for curve in {p.curve: 0 for p in points}]
        times_us: dict[Point, float] = {}
        # Bytes, curve, size, expected us.
        waiting = [(of[0].num_bytes, curve, 0, 0.0) for curve, of in enumerate(sizes)]
        while waiting:
            _, curve, size, expected_us = heapq.heappop(waiting)
            point = sizes[curve][size]
            us = None if point.name in kept_us else self._first_run_us(point, expected_us)
            times_us[point] = kept_us[point.name] if us is None else us
            on_point(point, us)
            for larger in sizes[curve][size + 1 : size + 2]:
                expected_us = times_us[point] * larger.num_bytes / point.num_bytes
                heapq.heappush(waiting, (larger.num_bytes, curve, size + 1, expected_us))
        return times_us

    def _first_run_us(self, point: Point, expected_us: float) -> float:
        # Connections and fresh memory take little of a long run.
        if expected_us < RUN_US:
            self.run(point)
        is_mixed = self._ranks_per_core > 1 and _stays_on_node(point)
        return (self.run_mixed([(point, 1)])[0] if is_mixed else self.run(point)).us

    def rounds(
        self,
        tasks: Sequence[tuple[Task, float]],
        taken: Counter[str],
        budget_s: float,
        on_sample: Callable[[Sample], None],
    ) -> None:
        """Run every task once per round; at least one round, and no further one that ends late.

        Args:
            tasks: all of them, with about how long a run of each takes, in us.
            taken: by a task's name, how many samples an earlier calibration has taken.
            budget_s: when the last round has to end, after the beginning.
            on_sample: called for each sample.
        """
        for number in range(MAX_ROUNDS):
            begin_s = self.elapsed_s
            mixed: list[tuple[Task, int]] = []
            for task, task_us in tasks:
                if taken[task.name] > number:
                    continue
                if self._ranks_per_core > 1 and _stays_on_node(task):
                    mixed.append((task, _repeats(task_us)))
                else:
                    on_sample(self.run(task, _repeats(task_us)))
            # The same order on every rank, a different one in every round; but tasks of similar
            # size stay together, as in an exchange: large ones leave nothing in the caches for
            # small ones.
            random.Random(number).shuffle(mixed)
            mixed.sort(key=lambda entry: _size_class(entry[0]))
            for sample in self.run_mixed(mixed) if mixed else ():
                on_sample(sample)
            if self.elapsed_s + (self.elapsed_s - begin_s) > budget_s:
                return

    def _wait_for_all(self) -> None:
        self._reduce([], dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        """The most, or the mean, of all ranks."""
        elapsed_s = time.perf_counter() - self._begin_s
        of_all = torch.tensor([*values, elapsed_s], dtype=torch.float64, device=self._device)
        dist.all_reduce(of_all, op=op, group=self._group)
        if op == dist.ReduceOp.SUM:
            of_all /= self._group.size()
        *reduced, self.elapsed_s = of_all.tolist()
        return reduced


def _repeats(us: float) -> int:
    return min(max(int(RUN_US / max(us, 1.0)), 1), MAX_REPEATS_IN_RUN)


def _stays_on_node(task: Task) -> bool:
    return isinstance(task, HostWork) or (isinstance(task, Point) and task.resource != "inter")


def _size_class(task: Task) -> int:
    """The size in powers of 4; the host's work counts as small."""
    return task.num_bytes.bit_length() // 2 if isinstance(task, Point) else 0
