"""Times tasks on all ranks of a group at once, for as long as the budget lasts.

    clock     what it times                                     time of a run
    device    operations on GPUs, by CUDA events around them    of the slowest rank
    wall      host work; operations of CPU ranks                of the slowest rank
    core      work of CPU ranks that outnumber the cores        how long a core is busy with it: the
                                                                mean, times the ranks of a core

An operation on a node is the cores' work: while one rank waits, others work. Between nodes, and
when two operations run together, CPU ranks wait for the network, so "wall" times these.

All ranks share the elapsed time after each run and decide by it alone, so no rank stops without
the others.

What is timed are the executor's own calls, on buffers allocated as it does. Notation: N = rows,
H = hidden size, M = copies, T = tokens, E = experts.
"""

import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from monta_megatron.calibration import tasks
from monta_megatron.calibration.fit import excess_of
from monta_megatron.calibration.tasks import Pair, Passes, Point, Sample, Task
from monta_megatron.chains import CHAINS
from monta_megatron.chains.chain import NUM_BLOCKS
from monta_megatron.chains.program import COLLECTIVES, Resource
from monta_megatron.common.text import Progress
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.collectives import PeerGroup, start_all_gather, start_all_to_all
from monta_megatron.exchange.count_messages import CountMessages
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.rows import Copies, copy_rows

# Short runs are repeated, since ranks start and end unevenly. As many as nccl-tests on a GPU; on
# CPU ranks many runs of one operation in a row would find its code and data in the caches.
RUN_US = 20_000.0
MAX_REPEATS = {"cpu": 2, "cuda": 20}
# Of the second of a pair, to find out how many of them are as long as the first.
TRIAL_REPEATS = 8
# Starts an operation; the function that it returns waits for the result.
Starter: TypeAlias = Callable[[], Callable[[], object]]

# More than the cache of a GPU or of a core holds.
COLD_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
MAX_SETS = 8
# Fills of so many bytes before the runs that a device is timed with; at 8 TB/s they take 2 ms.
NUM_FILLS, FILLS_US = 64, 2_000.0

Clock: TypeAlias = Literal["device", "wall", "core"]


@dataclass(kw_only=True)
class Timer:
    """Runs of tasks; all ranks of the group call the same methods in the same order.

    Attributes:
        group: process group of all ranks.
        device: device of this rank.
        starter: function that returns the starter of a task.
        ranks_per_core: number of CPU ranks that share a core; 1 if each has its own.
        begin_s: start of the calibration, by `time.perf_counter`.
        budget_s: time budget of the calibration.
        elapsed_s: time since the start, the same on all ranks.
        samples: task -> its samples, in the order of the runs.
        excesses: pair -> its excesses at each of `tasks.LENGTHS`, in the order of the runs.
        took_s: task or pair -> elapsed time of its latest run.
    """

    group: dist.ProcessGroup
    device: torch.device
    starter: Callable[[Task], Starter]
    ranks_per_core: float
    begin_s: float
    budget_s: float
    elapsed_s: float = 0.0
    samples: dict[Task, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    excesses: dict[Pair, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    took_s: dict[Task | Pair, float] = field(default_factory=dict)

    def run_sizes(self, points: Sequence[Point], progress: Progress) -> list[Point]:
        """Time each point once, smaller ones first; large ones only within half of the budget.

        Returns:
            The timed points, in the order given.
        """
        timed: dict[object, list[Point]] = defaultdict(list)
        for point in sorted(points, key=lambda point: point.num_bytes):
            progress.step()
            smaller = timed[point.curve]
            if len(smaller) >= tasks.MIN_SIZES:
                ratio = point.num_bytes / smaller[-1].num_bytes
                expected_s = ratio * self.samples[smaller[-1]][0].us / 1e6
                if self.elapsed_s + expected_s > self.budget_s / 2:
                    continue
            self._measure(point)
            smaller.append(point)
        return [point for point in points if point in self.samples]

    def run_rounds(self, timed: Sequence[Task | Pair], progress: Progress) -> int:
        """Time each once, unless it was, then all round by round until the budget is spent.

        No run of a round starts that would exceed the budget. A step of `progress` is a second.

        Returns:
            The smallest number of runs of any task.
        """
        for task in timed:
            if task not in self.took_s:
                self._measure(task)
        runs = 1
        while True:
            # Another order in every round, the same on all ranks: other data is in the caches.
            for task in random.Random(runs).sample(timed, len(timed)):
                if self.elapsed_s + self.took_s[task] > self.budget_s:
                    return runs
                self._measure(task)
                progress.step(int(self.elapsed_s))
            runs += 1

    def _measure(self, task: Task | Pair) -> None:
        """Run a task, repeatedly if it is a short operation, and keep its times."""
        if isinstance(task, Pair):
            begin_s = self.elapsed_s
            self.excesses[task].append([self._excess(task, length) for length in tasks.LENGTHS])
        else:
            clock, samples = self._clock(task), self.samples[task]
            # The very first run connects, and allocates.
            last = samples[-1] if samples else self._run(task, clock)
            begin_s = self.elapsed_s
            # Host work runs once in an exchange.
            max_repeats = 1.0 if isinstance(task, Passes) else MAX_REPEATS[self.device.type]
            if clock == "device":
                max_repeats = min(max_repeats, FILLS_US / max(last.launch_us, 1.0))
            repeats = max(int(min(RUN_US / max(last.us, 1.0), max_repeats)), 1)
            samples.append(self._run(task, clock, repeats))
        self.took_s[task] = self.elapsed_s - begin_s

    def _clock(self, task: Task | Pair) -> Clock:
        if self.device.type == "cuda" and not isinstance(task, Passes):
            return "device"
        waits = isinstance(task, Pair) or (isinstance(task, Point) and task.resource == "inter")
        return "wall" if waits or self.ranks_per_core == 1 else "core"

    def _excess(self, pair: Pair, length: float) -> float:
        """Each alone, then both together, at once: times change more between rounds than by it."""
        clock, (first, second) = self._clock(pair), pair
        first_us = self._run(first, clock).us
        trial_us = self._run(second, clock, TRIAL_REPEATS).us
        repeats = max(round(length * first_us / trial_us), 1)
        second_us = self._run(second, clock, repeats).us * repeats
        both_us = self._run(first, clock, others=[self.starter(second)] * repeats).us
        return excess_of(first_us, second_us, both_us)

    def _run(
        self, task: Task, clock: Clock, repeats: int = 1, others: Sequence[Starter] = ()
    ) -> Sample:
        """The mean of some runs of a task in a row; `others` run between its start and its wait."""
        start = self.starter(task)
        launch_clock = time.thread_time if clock == "core" else time.perf_counter
        self._share((), dist.ReduceOp.MAX)
        launch_s, read_us = 0.0, start_clock(clock, self.device)
        for _ in range(repeats):
            launch_begin_s = launch_clock()
            wait = start()
            launch_s += launch_clock() - launch_begin_s
            for start_other in others:
                start_other()()
            wait()
        times_us = [read_us() / repeats, launch_s * 1e6 / repeats]
        if clock == "core":
            means_us = self._share(times_us, dist.ReduceOp.SUM)
            return Sample(*(us * self.ranks_per_core for us in means_us))
        return Sample(*self._share(times_us, dist.ReduceOp.MAX))

    def _share(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        """The largest or, by a sum, the mean of all ranks; every rank waits for the others."""
        elapsed_s = time.perf_counter() - self.begin_s
        shared = torch.tensor([*values, elapsed_s], dtype=torch.float64, device=self.device)
        dist.all_reduce(shared, op=op, group=self.group)
        if op == dist.ReduceOp.SUM:
            shared /= self.group.size()
        *reduced, self.elapsed_s = shared.tolist()
        return reduced


def start_clock(clock: Clock, device: torch.device) -> Callable[[], float]:
    """Start a clock of this rank; the function that it returns reads it in microseconds."""
    if clock != "device":
        now = time.process_time if clock == "core" else time.perf_counter
        begin_s = now()
        return lambda: (now() - begin_s) * 1e6
    # A launch may take longer than its kernel: keep the device busy until the host is ahead of it.
    cold = torch.empty(COLD_BYTES["cuda"], dtype=torch.uint8, device=device)
    for _ in range(NUM_FILLS):
        cold.zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()

    def read_us() -> float:
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    return read_us


def starter_of(
    groups: Mapping[tuple[Resource, int], PeerGroup], device: torch.device, fused: bool
) -> Callable[[Task], Starter]:
    """Starters of this rank's tasks, each made at its first use.

    Args:
        groups: (resource, size) -> group of this rank.
        device: device of this rank.
        fused: whether Triton kernels copy and sum rows, in place of PyTorch's operations.
    """

    @cache
    def starter(task: Task) -> Starter:
        if isinstance(task, Passes):
            return _passes(task.num_chunks, groups["intra", 1], device, fused)
        if task.operation in COLLECTIVES:
            return _collective(task, groups[task.resource, task.group_size], device)
        return _in_memory(task, device, fused)

    return starter


def _collective(point: Point, group: PeerGroup, device: torch.device) -> Starter:
    gathers = point.operation == "allgather"
    # Between nodes `allgather` gathers all tokens, and every rank has equally many. Inside a node
    # chains gather what has arrived, in sizes that differ, which takes another code path.
    odd_row = int(gathers and point.resource == "intra")
    receive = [point.num_rows + odd_row * (peer == 0) for peer in range(group.size)]
    send = [receive[group.rank]] * group.size if gathers else receive
    num_rows = send[0] if gathers else sum(send)
    message = torch.ones(num_rows, tasks.MESSAGE_ROW_BYTES, dtype=torch.uint8, device=device)
    start_collective = start_all_gather if gathers else start_all_to_all

    def start() -> Callable[[], object]:
        output = message.new_empty(sum(receive), tasks.MESSAGE_ROW_BYTES)
        return start_collective(output, message, receive, send, group).wait

    return start


def _in_memory(point: Point, device: torch.device, fused: bool) -> Starter:
    """Copy rows in another order, [N, H] -> [N, H], or sum copies of each, [M, H] -> [N, H]."""
    sums, num_rows = point.operation == "sum", point.num_rows
    num_copies = tasks.NUM_COPIES if sums else 1
    # CPUs sum fp32 rows; on GPUs rows are mostly bf16.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    # An exchange works on rows that it has not touched before. With a single set of buffers they
    # would still be in a cache, and be copied several times as fast.
    num_sets = max(min(COLD_BYTES[device.type] // point.num_bytes, MAX_SETS), 1)
    shape = num_sets, num_copies * num_rows, tasks.HIDDEN_ROW_BYTES // dtype.itemsize
    sets = cycle(torch.ones(shape, dtype=dtype, device=device))
    # Kept, so that the next run allocates other memory.
    results: deque[torch.Tensor] = deque(maxlen=num_sets)
    # The copies of a row are anywhere. A copy is made by `row`, sums by the others.
    order_M = torch.randperm(num_copies * num_rows, device=device)
    starts = torch.arange(num_rows + 1, device=device) * num_copies
    copies = Copies(row=order_M, by_row=order_M, row_starts=starts)
    launches: dict[str, Any] = {}
    if fused:
        from monta_megatron.exchange.kernels.copies import duplicate
        from monta_megatron.exchange.kernels.sums import reduce

    def start() -> Callable[[], object]:
        rows_MH = next(sets)
        into_NH = torch.empty_like(rows_MH[:num_rows])
        if fused and sums:
            reduce(Columns(rows_MH), copies, Columns(into_NH), torch.float32, launches=launches)
        elif fused:
            duplicate(Columns(rows_MH), copies, Columns(into_NH), launches=launches)
        elif sums:
            into_NH.copy_(copies.sum_by_row(rows_MH, torch.float32))
        else:
            copy_rows(into_NH, rows_MH, order_M)
        results.append(into_NH)
        return lambda: results

    return start


def _passes(num_chunks: int, alone: PeerGroup, device: torch.device, fused: bool) -> Starter:
    """Starts by counting and binding, and waits for all four passes: almost nothing moves."""
    chain, layout, num_tokens = tasks.HOST_CHAIN, tasks.ALONE, tasks.NUM_TOKENS
    # As for a choice among all chains.
    messages = CountMessages(
        chains=tuple(CHAINS.values()),
        layout=layout,
        num_blocks=NUM_BLOCKS,
        kernels="fused" if fused else "torch",
    )
    routing_map_TE = torch.eye(2, dtype=torch.bool, device=device).repeat(num_tokens // 2, 1)

    def count() -> torch.Tensor:
        # The one message of a rank alone is the one that it receives.
        message_SBX, joined_J = messages.count(routing_map_TE)
        joined_J[: message_SBX.numel()].copy_(message_SBX.flatten())
        return joined_J

    counted_J = count().cpu().numpy()
    rows, probs = torch.ones(num_tokens, 1, device=device), torch.ones(num_tokens, device=device)

    def start() -> Callable[[], object]:
        count()
        # From the copy made above: the host is not to wait for the device.
        counts = messages.read(counted_J).permuted_tokens
        exchange = Exchange(
            bound_chain=chain.bind(layout, counts, num_chunks),
            groups=dict.fromkeys(chain.groups, alone),
            sum_dtype=torch.float32,
            monitor=Monitor(),
            fused=fused,
        )

        def run() -> None:
            inputs = rows.detach().requires_grad_(), probs.detach().requires_grad_()
            expert_rows, row_probs = dispatch(exchange, *inputs)
            outputs = combine(exchange, expert_rows), row_probs
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

        return run

    return start
