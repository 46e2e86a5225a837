"""Times tasks on all ranks of a group at once, for as long as the budget lasts.

A run takes as long as its slowest rank. Where CPU ranks outnumber the cores, an operation that
stays on a node is the cores' work, and others work while one rank waits; its time is then how long
a core is busy with it: the mean over ranks, times the ranks that share a core.

All ranks share the elapsed time after each run and decide by it alone, so no rank stops without
the others.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from monta_megatron.calibration.fit import excess_of
from monta_megatron.calibration.operations import Starter
from monta_megatron.calibration.tasks import LEAST_SIZES, Pair, Passes, Point, Sample, Task
from monta_megatron.common.text import Progress

# Short runs are repeated, since ranks start and end unevenly. As many as nccl-tests on a GPU; on
# CPU ranks many runs of one operation in a row would find its code and data in the caches.
RUN_US = 20_000.0
MAX_REPEATS = {"cpu": 2, "cuda": 20}


@dataclass(kw_only=True)
class Timer:
    """Runs of tasks; all ranks of the group call the same methods in the same order.

    Attributes:
        group: the ranks.
        device: that the group serves.
        starter: gives the function that starts a task.
        ranks_per_core: CPU ranks that share a core; 1 if each has its own.
        begin_s: when the calibration began, by `time.perf_counter`.
        budget_s: for how long it may run.
        elapsed_s: since the beginning, the same on all ranks.
        samples: of each task, in the order of its runs.
        excesses: likewise, of each pair.
        took_s: elapsed time of the latest run of each.
    """

    group: dist.ProcessGroup
    device: torch.device
    starter: Callable[[Task], Starter]
    ranks_per_core: float
    begin_s: float
    budget_s: float
    elapsed_s: float = 0.0
    samples: dict[Task, list[Sample]] = field(default_factory=dict)
    excesses: dict[Pair, list[float]] = field(default_factory=dict)
    took_s: dict[Task | Pair, float] = field(default_factory=dict)

    def run_sizes(self, points: Sequence[Point], progress: Progress) -> list[Point]:
        """Time each point once, smaller ones first; large ones only within half of the budget.

        Returns:
            Those that were timed, in the order given.
        """
        timed: dict[object, list[Point]] = {}
        for point in sorted(points, key=lambda point: point.num_bytes):
            progress.step()
            smaller = timed.setdefault(point.curve, [])
            expected_us = 0.0
            if smaller:
                before = smaller[-1]
                expected_us = self.samples[before][0].us * point.num_bytes / before.num_bytes
            is_late = self.elapsed_s + expected_us / 1e6 > self.budget_s / 2
            if is_late and len(smaller) >= LEAST_SIZES:
                continue
            # Connections and fresh memory take little of a long run.
            if expected_us < RUN_US:
                self._run(point)
            self._measure(point, expected_us)
            smaller.append(point)
        return [point for point in points if point in self.samples]

    def run_rounds(self, tasks: Sequence[Task | Pair], progress: Progress) -> int:
        """Time tasks round by round until the budget is spent.

        Each has been timed once in the end; beyond that no run starts that would exceed the budget.
        A step of `progress` is a second.

        Returns:
            The fewest runs of any task.
        """
        number = 0
        while True:
            number += 1
            # Another order in every round, the same on all ranks: other data is in the caches.
            for task in random.Random(number).sample(tasks, len(tasks)):
                took_s = self.took_s.get(task)
                if took_s is not None and number == 1:
                    continue
                if took_s is not None and self.elapsed_s + took_s > self.budget_s:
                    return number - 1
                self._measure(task)
                progress.step(int(self.elapsed_s))

    def _measure(self, task: Task | Pair, expected_us: float = RUN_US) -> None:
        """Run a task, repeatedly if it is short, and keep its times."""
        begin_s = self.elapsed_s
        if isinstance(task, Pair):
            # In immediate succession: times change more between rounds than by the excess.
            first_us = self._run(task.first, others=()).us
            second_us = self._run(task.second, task.repeats, others=()).us * task.repeats
            others = [self.starter(task.second)] * task.repeats
            excess = excess_of(first_us, second_us, self._run(task.first, others=others).us)
            self.excesses.setdefault(task, []).append(excess)
        else:
            samples = self.samples.setdefault(task, [])
            # Host work runs once in an exchange.
            us = samples[-1].us if samples and isinstance(task, Point) else expected_us
            repeats = min(int(RUN_US / max(us, 1.0)), MAX_REPEATS[self.device.type])
            samples.append(self._run(task, max(repeats, 1)))
        self.took_s[task] = self.elapsed_s - begin_s

    def _run(self, task: Task, repeats: int = 1, others: Sequence[Starter] | None = None) -> Sample:
        """The mean of some runs of a task in a row.

        Operations of a pair give `others`, which run between start and wait; their time is never
        that of a core.
        """
        start = self.starter(task)
        on_node = isinstance(task, Passes) or task.resource != "inter"
        by_core = others is None and on_node and self.ranks_per_core > 1
        clock = time.process_time if by_core else time.perf_counter
        launch_clock = time.thread_time if by_core else time.perf_counter
        self._share((), dist.ReduceOp.MAX)
        launch_s = 0.0
        begin_s = clock()
        for _ in range(repeats):
            launch_begin_s = launch_clock()
            wait = start()
            launch_s += launch_clock() - launch_begin_s
            for start_other in others or ():
                start_other()()
            wait()
        torch.cuda.synchronize()
        times_us = [(clock() - begin_s) * 1e6 / repeats, launch_s * 1e6 / repeats]
        if by_core:
            means_us = self._share(times_us, dist.ReduceOp.SUM)
            return Sample(*(us * self.ranks_per_core for us in means_us))
        return Sample(*self._share(times_us, dist.ReduceOp.MAX))

    def _share(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        """The largest or, by a sum, the mean of all ranks; every rank waits for the others."""
        elapsed_s = time.perf_counter() - self.begin_s
        of_all = torch.tensor([*values, elapsed_s], dtype=torch.float64, device=self.device)
        dist.all_reduce(of_all, op=op, group=self.group)
        if op == dist.ReduceOp.SUM:
            of_all /= self.group.size()
        *reduced, self.elapsed_s = of_all.tolist()
        return reduced
