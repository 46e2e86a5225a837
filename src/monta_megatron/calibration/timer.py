"""Times tasks on all ranks of a group at once, for as long as the budget lasts.

A run takes as long as its slowest rank. Where CPU ranks outnumber the cores, an operation that
stays on a node is the cores' work, and others work while one rank waits; its time is then how long
a core is busy with it: the mean over ranks, times the ranks that share a core.

All ranks share the elapsed time after each run and decide by it alone, so no rank stops without
the others.

What is timed are the executor's own calls, on buffers allocated as it does. Notation: N = rows,
H = hidden size, M = copies.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from monta_megatron.calibration.fit import excess_of
from monta_megatron.calibration.tasks import (
    HIDDEN_ROW_BYTES,
    LEAST_SIZES,
    MESSAGE_ROW_BYTES,
    NUM_COPIES,
    NUM_TOKENS,
    Pair,
    Passes,
    Point,
    Sample,
    Task,
)
from monta_megatron.chains.chain import BoundChain
from monta_megatron.chains.program import COLLECTIVES, Resource
from monta_megatron.common.text import Progress
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.collectives import PeerGroup, start_all_gather, start_all_to_all
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.rows import Copies, copy_rows

# Short runs are repeated, since ranks start and end unevenly. As many as nccl-tests on a GPU; on
# CPU ranks many runs of one operation in a row would find its code and data in the caches.
RUN_US = 20_000.0
MAX_REPEATS = {"cpu": 2, "cuda": 20}
# Of the second of a pair, to find out how many of them are as long as the first.
FIRST_REPEATS = 8
# Starts an operation; the function that it returns waits for the result.
Starter: TypeAlias = Callable[[], Callable[[], object]]

# More than the cache of a GPU or of a core holds.
COLD_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
MAX_SETS = 8


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
        beside_us: of the second operation of a pair, the latest time of each run.
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
    beside_us: dict[Point, float] = field(default_factory=dict)
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
            repeats = max(round(task.length * first_us / self._beside_us(task.second)), 1)
            second_us = self._run(task.second, repeats, others=()).us * repeats
            self.beside_us[task.second] = second_us / repeats
            others = [self.starter(task.second)] * repeats
            excess = excess_of(first_us, second_us, self._run(task.first, others=others).us)
            self.excesses.setdefault(task, []).append(excess)
        else:
            samples = self.samples.setdefault(task, [])
            # Host work runs once in an exchange.
            us = samples[-1].us if samples and isinstance(task, Point) else expected_us
            repeats = min(int(RUN_US / max(us, 1.0)), MAX_REPEATS[self.device.type])
            samples.append(self._run(task, max(repeats, 1)))
        self.took_s[task] = self.elapsed_s - begin_s

    def _beside_us(self, point: Point) -> float:
        """The latest time per run of several in a row; a core's first run takes far longer."""
        if point not in self.beside_us:
            self.beside_us[point] = self._run(point, FIRST_REPEATS, others=()).us
        return self.beside_us[point]

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


def starter_of(
    groups: Mapping[tuple[Resource, int], PeerGroup], device: torch.device, fused: bool
) -> Callable[[Task], Starter]:
    """Starters of this rank's tasks, each made at its first use.

    Args:
        groups: by resource and size, this rank's group.
        device: device of this rank.
        fused: Triton kernels copy and sum rows, not PyTorch's operations.
    """

    @cache
    def starter(task: Task) -> Starter:
        if isinstance(task, Passes):
            return _passes(task.bind(), groups["intra", 1], device, fused)
        if task.operation in COLLECTIVES:
            return _collective(task, groups[task.resource, task.group_size], device)
        # An exchange works on rows that it has not touched before. With a single set of buffers
        # they would still be in a cache, and be copied several times as fast.
        num_sets = max(min(COLD_BYTES[device.type] // task.num_bytes, MAX_SETS), 1)
        prepare = _copy if task.operation == "copy" else _sum
        sets = cycle([prepare(task.num_rows, device, fused) for _ in range(num_sets)])
        # Kept, so that the next run allocates other memory.
        results: deque[object] = deque(maxlen=num_sets)

        def start() -> Callable[[], object]:
            results.append(next(sets)())
            return lambda: results

        return start

    return starter


def _copy(num_rows: int, device: torch.device, fused: bool) -> Callable[[], torch.Tensor]:
    """Copy rows in another order: [N, H]."""
    rows_NH = _rows(num_rows, device)
    order_N = torch.randperm(num_rows, device=device)
    launches: dict[str, Any] = {}

    def copy() -> torch.Tensor:
        into_NH = torch.empty_like(rows_NH)
        if fused:
            from monta_megatron.exchange.kernels.copies import duplicate

            copies = Copies(row=order_N, by_row=order_N, row_starts=order_N)
            duplicate(Columns(rows_NH), copies, Columns(into_NH), launches=launches)
        else:
            copy_rows(into_NH, rows_NH, order_N)
        return into_NH

    return copy


def _sum(num_rows: int, device: torch.device, fused: bool) -> Callable[[], torch.Tensor]:
    """Sum `NUM_COPIES` copies of each row in fp32: [M, H] -> [N, H]."""
    rows_MH = _rows(num_rows * NUM_COPIES, device)
    launches: dict[str, Any] = {}
    numbers_M = torch.arange(len(rows_MH), device=device)
    copies = Copies(
        row=numbers_M % num_rows,
        by_row=numbers_M.view(NUM_COPIES, num_rows).T.flatten(),
        row_starts=torch.arange(num_rows + 1, device=device) * NUM_COPIES,
    )

    def add() -> torch.Tensor:
        into_NH = torch.empty_like(rows_MH[:num_rows])
        if fused:
            from monta_megatron.exchange.kernels.sums import reduce

            reduce(Columns(rows_MH), copies, Columns(into_NH), torch.float32, launches=launches)
        else:
            into_NH.copy_(copies.sum_by_row(rows_MH, torch.float32))
        return into_NH

    return add


def _rows(num_rows: int, device: torch.device) -> torch.Tensor:
    """[N, H] of ones: CPUs sum fp32 rows; on GPUs rows are mostly bf16."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.ones(num_rows, HIDDEN_ROW_BYTES // dtype.itemsize, dtype=dtype, device=device)


def _passes(bound: BoundChain, alone: PeerGroup, device: torch.device, fused: bool) -> Starter:
    """All four passes of a rank with itself: almost nothing moves."""
    rows, probs = torch.ones(NUM_TOKENS, 1, device=device), torch.ones(NUM_TOKENS, device=device)

    def start() -> Callable[[], object]:
        exchange = Exchange(
            bound_chain=bound,
            groups=dict.fromkeys(bound.chain.groups, alone),
            sum_dtype=torch.float32,
            monitor=Monitor(),
            fused=fused,
        )
        inputs = rows.detach().requires_grad_(), probs.detach().requires_grad_()
        expert_rows, row_probs = dispatch(exchange, *inputs)
        outputs = combine(exchange, expert_rows), row_probs
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return lambda: outputs

    return start


def _collective(point: Point, group: PeerGroup, device: torch.device) -> Starter:
    gathers = point.operation == "allgather"
    # Between nodes `allgather` gathers all tokens, and every rank has equally many. Inside a node
    # chains gather what has arrived, in sizes that differ, which takes another code path.
    odd_row = int(gathers and point.resource == "intra")
    receive = [point.num_rows + odd_row * (peer == 0) for peer in range(group.size)]
    send = [receive[group.rank]] * group.size if gathers else receive
    num_rows = send[0] if gathers else sum(send)
    message = torch.ones(num_rows, MESSAGE_ROW_BYTES, dtype=torch.uint8, device=device)
    start_collective = start_all_gather if gathers else start_all_to_all

    def start() -> Callable[[], object]:
        output = message.new_empty(sum(receive), MESSAGE_ROW_BYTES)
        return start_collective(output, message, receive, send, group).wait

    return start
