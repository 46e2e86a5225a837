"""Starters of the timed operations: the executor's own calls, on buffers allocated as it does.

Notation: N = rows, H = hidden size, M = copies.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np
import torch

from monta_megatron.calibration.tasks import (
    HIDDEN_ROW_BYTES,
    MESSAGE_ROW_BYTES,
    NUM_COPIES,
    NUM_PASS_STAGES,
    Passes,
    Point,
    Task,
)
from monta_megatron.chains import CHAINS, Counts
from monta_megatron.chains.program import COLLECTIVES, Resource
from monta_megatron.core import Layout
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.collectives import PeerGroup, start_all_gather, start_all_to_all
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.rows import Copies, copy_rows

# Starts an operation; the function that it returns waits for the result.
Starter: TypeAlias = Callable[[], Callable[[], object]]

# More than the cache of a GPU or of a core holds.
COLD_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
MAX_SETS = 8
# Tokens of host work.
NUM_TOKENS = 128


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
            return _passes(task.num_chunks, groups["intra", 1], device, fused)
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
            from monta_megatron.exchange.kernels.duplicate import duplicate

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
            from monta_megatron.exchange.kernels.reduce import reduce

            reduce(Columns(rows_MH), copies, Columns(into_NH), torch.float32, launches=launches)
        else:
            into_NH.copy_(copies.sum_by_row(rows_MH, torch.float32))
        return into_NH

    return add


def _rows(num_rows: int, device: torch.device) -> torch.Tensor:
    """[N, H] of ones: CPUs sum fp32 rows; on GPUs rows are mostly bf16."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.ones(num_rows, HIDDEN_ROW_BYTES // dtype.itemsize, dtype=dtype, device=device)


def _passes(num_chunks: int, alone: PeerGroup, device: torch.device, fused: bool) -> Starter:
    """All four passes of a rank with itself: almost nothing moves."""
    # One expert, to which all rows go in the order that they are in.
    layout = Layout(ep=1, etp=1, num_local_experts=1, rank=0, nodes=(0,))
    sent = np.full((1, 1), NUM_TOKENS)
    chain = CHAINS["alltoall_allgather"]
    assert len(chain.stages) == NUM_PASS_STAGES
    rows, probs = torch.ones(NUM_TOKENS, 1, device=device), torch.ones(NUM_TOKENS, device=device)

    def start() -> Callable[[], object]:
        exchange = Exchange(
            bound_chain=chain.bind(layout, Counts(sent=sent, received=sent[None]), num_chunks),
            groups=dict.fromkeys(chain.groups, alone),
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
