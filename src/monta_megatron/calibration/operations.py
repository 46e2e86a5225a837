"""Starters of the timed operations: the executor's own calls, on buffers allocated as it does.

Notation: N = rows, W = experts of a row, H = hidden size, M = copies, T = tokens, E = experts.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from itertools import cycle
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from monta_megatron.calibration.tasks import (
    HIDDEN_ROW_BYTES,
    MESSAGE_ROW_BYTES,
    NUM_COPIES,
    NUM_EXPERTS,
    NUM_PASS_CHUNKS,
    NUM_PASS_STAGES,
    TOPK,
    HostWork,
    Point,
    Task,
)
from monta_megatron.chains import CHAINS, Counts
from monta_megatron.chains.chain import NUM_BLOCKS
from monta_megatron.chains.program import COLLECTIVES, Resource
from monta_megatron.chains.stages import ExpertRange
from monta_megatron.core import Layout
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.collectives import PeerGroup, start_all_gather, start_all_to_all
from monta_megatron.exchange.copies import Copies, Parts, copy_rows, find_copies
from monta_megatron.exchange.counts import CountTable
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.monitor import Monitor

# Starts an operation; the function that it returns waits for the result.
Starter: TypeAlias = Callable[[], Callable[[], object]]

# More than the cache of a GPU or of a core holds.
COLD_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
MAX_SETS = 8
# Tokens of host work.
NUM_TOKENS = 128
# Parts of all experts.
PARTS = ExpertRange(first=0, size=NUM_EXPERTS // NUM_COPIES, num_parts=NUM_COPIES)


def starter_of(
    groups: Mapping[tuple[Resource, int], PeerGroup],
    nodes: tuple[int, ...],
    device: torch.device,
    fused: bool,
) -> Callable[[Task], Starter]:
    """Starters of this rank's tasks, each made at its first use.

    Args:
        groups: by resource and size, this rank's group.
        nodes: node of every rank, in order.
        device: device of this rank.
        fused: Triton kernels copy and sum rows, not PyTorch's operations.
    """

    @cache
    def starter(task: Task) -> Starter:
        if task is HostWork.COUNTS:
            return _bind_counts(nodes, device)
        if isinstance(task, HostWork):
            return _passes(1 if task is HostWork.PASSES else NUM_PASS_CHUNKS, device, fused)
        if task.operation in COLLECTIVES:
            return _collective(task, groups[task.resource, task.group_size], device)
        # An exchange works on rows that it has not touched before. With a single set of buffers
        # they would still be in a cache, and be copied several times as fast.
        num_sets = max(min(COLD_BYTES[device.type] // task.num_bytes, MAX_SETS), 1)
        prepare = IN_MEMORY[task.operation]
        sets = cycle([prepare(task.num_rows, device, fused) for _ in range(num_sets)])
        # Kept, so that the next run allocates other memory.
        results: deque[object] = deque(maxlen=num_sets)

        def start() -> Callable[[], object]:
            results.append(next(sets)())
            return lambda: results

        return start

    return starter


def _copy(num_rows: int, device: torch.device, fused: bool) -> Callable[[], torch.Tensor]:
    rows_NH = _rows(num_rows, device)
    order_N = torch.randperm(num_rows, generator=_seeded()).to(device)

    def copy() -> torch.Tensor:
        into_NH = torch.empty_like(rows_NH)
        if fused:
            from monta_megatron.exchange.kernels.duplicate import duplicate

            copies = Copies(row=order_N, by_row=order_N, row_starts=order_N)
            duplicate(Columns(rows_NH), copies, Columns(into_NH))
        else:
            copy_rows(into_NH, rows_NH, order_N)
        return into_NH

    return copy


def _sum(num_rows: int, device: torch.device, fused: bool) -> Callable[[], torch.Tensor]:
    rows_MH = _rows(num_rows * NUM_COPIES, device)
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

            reduce(Columns(rows_MH), copies, Columns(into_NH), torch.float32)
        else:
            into_NH.copy_(copies.sum_by_row(rows_MH, torch.float32))
        return into_NH

    return add


def _find(num_rows: int, device: torch.device, fused: bool) -> Callable[[], Copies]:
    # Experts in every part.
    ids_W = torch.arange(0, NUM_EXPERTS, NUM_EXPERTS // TOPK, dtype=torch.int32)
    ids_NW = ids_W.repeat(num_rows, 1).to(device)
    num_copies = num_rows * NUM_COPIES
    copies = Copies.empty(num_rows, num_copies, PARTS, device)

    def find() -> Copies:
        if fused:
            from monta_megatron.exchange.kernels import find_copies as kernel

            kernel.find_copies(ids_NW, PARTS, copies)
        else:
            find_copies(ids_NW, Parts.of(PARTS, num_rows, num_copies, ids_NW), copies)
        return copies

    return find


# Allocates the buffers of an operation for N rows; returns a function that runs it. Copied rows
# [N, H] in another order; sums [N, H] of `NUM_COPIES` copies each; the copies of rows with experts
# in `NUM_COPIES` parts.
IN_MEMORY: Mapping[str, Callable[[int, torch.device, bool], Callable[[], torch.Tensor | Copies]]]
IN_MEMORY = {"copy": _copy, "sum": _sum, "find": _find}


def _rows(num_rows: int, device: torch.device) -> torch.Tensor:
    """[N, H] of ones: CPUs sum fp32 rows; on GPUs rows are mostly bf16."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.ones(num_rows, HIDDEN_ROW_BYTES // dtype.itemsize, dtype=dtype, device=device)


def _bind_counts(nodes: tuple[int, ...], device: torch.device) -> Starter:
    """Host work on exchanged counts, in an exchange of all ranks with any chain."""
    num_local_experts = max(NUM_EXPERTS // len(nodes), 1)
    layout = Layout(ep=len(nodes), etp=1, num_local_experts=num_local_experts, rank=0, nodes=nodes)
    chains = tuple(c for c in CHAINS.values() if c.incompatibility(layout) is None)
    table = CountTable(chains=chains, layout=layout, num_blocks=NUM_BLOCKS)
    # Expert t is that of token t, and so on.
    routed_TE = torch.eye(NUM_TOKENS, layout.num_experts, dtype=torch.bool, device=device)
    messages, sent = table.count(routed_TE)
    # All ranks are taken to send this one what it sends itself.
    received = messages[layout.rank].expand_as(messages)

    def start() -> Callable[[], object]:
        counts = table.read(table.join(received, sent).cpu().numpy())
        assert counts.tokens is not None, "chains of tokens are among them"
        bound = CHAINS["alltoall_dedup"].bind(layout, counts.tokens, 1)
        return lambda: bound

    return start


def _passes(num_chunks: int, device: torch.device, fused: bool) -> Starter:
    """All four passes of a rank with itself: almost nothing moves."""
    # One expert, to which all rows go in the order that they are in.
    layout = Layout(ep=1, etp=1, num_local_experts=1, rank=0, nodes=(0,))
    sent = np.full((1, 1), NUM_TOKENS)
    chain, world = CHAINS["alltoall_allgather"], dist.group.WORLD
    assert len(chain.stages) == NUM_PASS_STAGES and world is not None
    alone = {
        name: PeerGroup(name=name, process_group=world, size=1, rank=0, nodes=(0,))
        for name in ("ep", "etp")
    }
    rows, probs = torch.ones(NUM_TOKENS, 1, device=device), torch.ones(NUM_TOKENS, device=device)

    def start() -> Callable[[], object]:
        exchange = Exchange(
            bound=chain.bind(layout, Counts(sent=sent, received=sent[None]), num_chunks),
            groups=alone,
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


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)
