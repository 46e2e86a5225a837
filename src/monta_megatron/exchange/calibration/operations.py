"""What a calibration times: the executor's own calls, on buffers allocated as it does.

Notation: N = rows, W = most experts of a token, H = hidden size, E = experts.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import cycle
from typing import TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist

from monta_megatron.chains import CHAINS, Counts
from monta_megatron.chains import calibration_tasks as tasks
from monta_megatron.chains.calibration_tasks import NUM_COPIES, NUM_EXPERTS, TOPK, Point, Task
from monta_megatron.chains.chunks import NUM_BLOCKS
from monta_megatron.chains.layout import Layout
from monta_megatron.chains.program import Resource
from monta_megatron.chains.stages import ExpertRange
from monta_megatron.exchange.autograd import combine, dispatch
from monta_megatron.exchange.collectives import PeerGroup, start_all_gather, start_all_to_all
from monta_megatron.exchange.copies import Copies, Parts, find_copies, put_rows
from monta_megatron.exchange.count_table import CountTable, expert_ids_of
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.payload import Payload
from monta_megatron.exchange.state import Exchange

NUM_TOKENS = 128
# More than the cache of a GPU or of a core holds.
COLD_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
MAX_SETS = 8

# Starts an operation; the function that it returns waits for the result.
Start: TypeAlias = Callable[[], Callable[[], object]]
# Makes the buffers of an operation in memory; the function that it returns runs it.
Prepare: TypeAlias = Callable[[Point, torch.device], Callable[[], object]]


def starts_of(
    groups: Mapping[tuple[Resource, int], PeerGroup],
    nodes: tuple[int, ...],
    device: torch.device,
    cold_bytes: int,
    more: Mapping[str, Prepare],
    fused: bool = False,
) -> Callable[[Task], Start]:
    """What starts a point or the host's work on this rank, made when it is first asked for.

    In an exchange an operation works on rows that it has not touched before. Where its runs follow
    each other, each takes the next of several sets of buffers, and its results stay: otherwise
    5 MB would still be in a cache from the previous run, and be copied several times as fast as in
    any chain.

    Args:
        groups: by resource and size, this rank's group.
        nodes: node of every rank that calibrates, in order.
        device: device that it runs on.
        cold_bytes: bytes of buffers to take turns with; 0 for one set of buffers.
        more: by its name, an operation in memory that is none of the exchange's own.
        fused: Triton kernels do the exchange's own, as in a training here.
    """
    # An exchange of all of them, in which every chain can run; all bind the same counts.
    experts = max(NUM_EXPERTS // len(nodes), 1)
    layout = Layout(ep=len(nodes), etp=1, num_local_experts=experts, rank=0, nodes=nodes)
    table, in_memory = _count_table(layout, "auto" if fused else "torch"), IN_MEMORY
    if fused:
        from monta_megatron.exchange.calibration.fused_operations import IN_MEMORY as in_memory
    prepared: dict[str, Prepare] = {**in_memory, "count": partial(_count, table=table), **more}

    @cache
    def start_of(task: Task) -> Start:
        if task == tasks.COUNTS:
            return _bind_counts(table, device)
        if not isinstance(task, Point):
            num_chunks = tasks.NUM_PASS_CHUNKS if task == tasks.PASSES_IN_CHUNKS else 1
            return _passes(device, num_chunks, fused)
        if task.is_collective:
            resource = cast("Resource", task.resource)
            return _collective(task, groups[resource, task.group_size], device)
        num_sets = max(min(cold_bytes // task.num_bytes, MAX_SETS), 1)
        works = cycle([prepared[task.operation](task, device) for _ in range(num_sets)])
        results: deque[object] = deque(maxlen=num_sets)

        def start() -> Callable[[], object]:
            results.append(next(works)())
            return lambda: results

        return start

    return start_of


def _collective(point: Point, group: PeerGroup, device: torch.device) -> Start:
    gathers = point.operation == "allgather"
    # Between nodes `allgather` gathers all tokens, and every rank has equally many. Inside a node
    # chains gather what has arrived, in sizes that differ, which takes another code path.
    odd_row = int(gathers and point.resource == "intra")
    receive = [point.num_rows + odd_row * (peer == 0) for peer in range(group.size)]
    send = [receive[group.rank]] * group.size if gathers else receive
    shape = (send[0] if gathers else sum(send), tasks.MESSAGE_ROW_BYTES)
    message = torch.ones(shape, dtype=torch.uint8, device=device)
    start_collective = start_all_gather if gathers else start_all_to_all

    def start() -> Callable[[], object]:
        output = message.new_empty(sum(receive), tasks.MESSAGE_ROW_BYTES)
        return start_collective(output, message, receive, send, group).wait

    return start


def _bind_counts(table: CountTable, device: torch.device) -> Start:
    """The host's work on exchanged counts: read and bind. To count and to exchange are points."""
    layout = table.layout
    messages, sent = table.count(routing_map(NUM_TOKENS, layout.num_experts).to(device))
    # All ranks are taken to send this one what it sends itself.
    received = messages[layout.rank].expand_as(messages)

    def start() -> Callable[[], object]:
        counts = table.read(table.join(received, sent).cpu().numpy())
        assert counts.tokens is not None, "chains of tokens are among them"
        bound = CHAINS["alltoall_dedup"].bind(layout, counts.tokens, 1)
        return lambda: bound

    return start


def _count_table(layout: Layout, kernels: str) -> CountTable:
    chains = tuple(chain for chain in CHAINS.values() if chain.incompatibility(layout) is None)
    return CountTable(chains=chains, layout=layout, num_blocks=NUM_BLOCKS, kernels=kernels)


def _passes(device: torch.device, num_chunks: int, fused: bool) -> Start:
    """All four passes of a rank with itself: almost nothing moves, the time is the host's work."""
    # One expert, to which all rows go in the order that they are in.
    layout = Layout(ep=1, etp=1, num_local_experts=1, rank=0, nodes=(0,))
    sent = np.full((1, 1), NUM_TOKENS)
    chain, world = CHAINS["alltoall_allgather"], dist.group.WORLD
    assert len(chain.stages) == tasks.NUM_PASS_STAGES and world is not None
    alone = {
        name: PeerGroup(name=name, process_group=world, size=1, rank=0, nodes=(0,))
        for name in ("ep", "etp")
    }
    rows, probs = torch.ones(NUM_TOKENS, 1, device=device), torch.ones(NUM_TOKENS, device=device)

    def start() -> Callable[[], object]:
        bound = chain.bind(layout, Counts(sent=sent, received=sent[None]), num_chunks)
        exchange = Exchange(
            bound=bound,
            groups=alone,
            sum_dtype=torch.float32,
            monitor=Monitor(),
            fused=fused,
        )
        inputs = rows.detach().requires_grad_(), probs.detach().requires_grad_()
        moved, row_probs = dispatch(exchange, *inputs)
        outputs = combine(exchange, moved), row_probs
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return lambda: outputs

    return start


def _copy(point: Point, device: torch.device) -> Callable[[], object]:
    columns, index = rows_with_lists(point.num_rows, device)
    payload = Payload.of(columns, packed=True)

    def copy() -> list[torch.Tensor]:
        messages = payload.allocate(point.num_rows)
        for into, column in zip(payload.columns(messages).tensors(), columns, strict=True):
            torch.index_select(column, 0, index, out=into)
        return messages

    return copy


def _put(point: Point, device: torch.device) -> Callable[[], object]:
    (hidden, probs, _), index = rows_with_lists(point.num_rows, device)

    def put() -> list[torch.Tensor]:
        outputs = [torch.empty_like(column) for column in (hidden, probs)]
        for output, column in zip(outputs, (hidden, probs), strict=True):
            put_rows(output, index, column)
        return outputs

    return put


def rows_with_lists(num_rows: int, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """[N, H] rows with their [N, W] probabilities and expert ids, in an order: [N]."""
    probs = torch.ones(num_rows, TOPK, device=device)
    # Small, but operations of their own.
    columns = [rows_of(num_rows, device), probs, probs.to(torch.int32)]
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    return columns, order.to(device)


def _sum(point: Point, device: torch.device) -> Callable[[], object]:
    num_rows, num_copies = point.num_rows, point.num_rows * NUM_COPIES
    # [N, W] one expert of every part, so that a row has a copy in every part.
    ids = torch.arange(NUM_COPIES, device=device).expand(num_rows, -1)
    parts = ExpertRange(first=0, size=1, num_parts=NUM_COPIES)
    copies, source = Copies.empty(num_rows, num_copies, parts, device), rows_of(num_copies, device)
    find_copies(ids, Parts.of(parts, num_rows, num_copies, ids), copies)
    shares = torch.ones(num_copies, device=device)

    def add() -> torch.Tensor:
        # The sum is in fp32; the message that it is sent in is allocated separately. After it the
        # probabilities go back to the ids of their experts.
        into = source.new_empty(num_rows, source.shape[1])
        into.copy_(copies.sum_by_row(source, torch.float32))
        into_probs = shares.new_zeros(num_rows, NUM_COPIES)
        into_probs[copies.row, copies.place] = shares
        return into

    return add


def _find(point: Point, device: torch.device) -> Callable[[], object]:
    ids, parts, num_copies = drawn_lists(point.num_rows, device)
    copies = Copies.empty(point.num_rows, num_copies, parts, device)
    return lambda: find_copies(ids, Parts.of(parts, point.num_rows, num_copies, ids), copies)


def _count(point: Point, device: torch.device, table: CountTable) -> Callable[[], object]:
    num_experts = table.layout.num_experts
    counted = routing_map(point.num_rows * NUM_EXPERTS // num_experts, num_experts).to(device)
    return lambda: table.count(counted)


def lists(
    point: Point, device: torch.device, list_experts: Callable[..., object] = expert_ids_of
) -> Callable[[], object]:
    """Makes the lists of experts of every token, as the dispatcher does."""
    on_device = routing_map(point.num_rows, NUM_EXPERTS).to(device)
    probs = torch.ones(point.num_rows, NUM_EXPERTS, device=device)
    return lambda: list_experts(on_device, probs, TOPK)


OPERATIONS = (("copy", _copy), ("put", _put), ("sum", _sum), ("lists", lists))
IN_MEMORY: Mapping[str, Prepare] = dict((*OPERATIONS, ("find", _find), ("find_lists", _find)))


def rows_of(num_rows: int, device: torch.device) -> torch.Tensor:
    """[N, H]: CPUs sum fp32 rows; on GPUs rows are mostly bf16."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    shape = num_rows, tasks.HIDDEN_ROW_BYTES // dtype.itemsize
    return torch.ones(shape, dtype=dtype, device=device)


def drawn_lists(num_rows: int, device: torch.device) -> tuple[torch.Tensor, ExpertRange, int]:
    """[N, W] int32 drawn experts of each row, `TOPK` parts of all experts, and copies for these."""
    ids, size = draw_experts(num_rows, NUM_EXPERTS), NUM_EXPERTS // TOPK
    hits = torch.zeros(num_rows, TOPK, dtype=torch.bool).scatter(1, ids // size, True)
    parts = ExpertRange(first=0, size=size, num_parts=TOPK)
    return ids.int().to(device), parts, int(hits.sum())


def draw_experts(num_rows: int, num_experts: int) -> torch.Tensor:
    """[N, W] ascending experts of each row."""
    scores = torch.rand(num_rows, num_experts, generator=torch.Generator().manual_seed(1))
    return scores.topk(TOPK, dim=1).indices.sort(dim=1).values


def routing_map(num_rows: int, num_experts: int) -> torch.Tensor:
    """[N, E] bool: drawn experts, as Megatron's router has them."""
    ids = draw_experts(num_rows, num_experts)
    return torch.zeros(num_rows, num_experts, dtype=torch.bool).scatter(1, ids, True)
