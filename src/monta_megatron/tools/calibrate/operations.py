"""The points as operations: the executor's own calls, on buffers allocated as it does.

Notation: N = rows, W = most experts of a token, H = hidden size.
"""

from collections import deque
from collections.abc import Callable, Mapping
from itertools import cycle
from typing import TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from monta_megatron.chains import CHAINS, Counts
from monta_megatron.chains.chunks import NUM_BLOCKS
from monta_megatron.chains.layout import Layout
from monta_megatron.chains.stages import ExpertRange
from monta_megatron.exchange.autograd import combine, dispatch
from monta_megatron.exchange.collectives import PeerGroup, start_all_gather, start_all_to_all
from monta_megatron.exchange.copies import Copies, Parts, find_copies, put_rows
from monta_megatron.exchange.count_table import CountTable, expert_ids_of
from monta_megatron.exchange.groups import new_local_group
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.payload import Payload
from monta_megatron.exchange.state import Exchange
from monta_megatron.tools.calibrate.permutation import permute, unpermute
from monta_megatron.tools.calibrate.points import (
    HIDDEN_ROW_BYTES,
    MESSAGE_ROW_BYTES,
    NUM_COPIES,
    NUM_EXPERTS,
    NUM_PASS_STAGES,
    TOPK,
    Point,
    Shape,
)

NUM_TOKENS = 128

# More than the cache of a GPU or of a core holds.
COLD_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
MAX_SETS = 8

# Starts an operation; the function that it returns waits for the result.
Start: TypeAlias = Callable[[], Callable[[], object]]
Groups: TypeAlias = Mapping[tuple[str, int], PeerGroup]


def make_groups(shape: Shape, nodes: tuple[int, ...]) -> Groups:
    """(resource, ranks on a node) -> the group of this rank, made by all ranks in the same order.

    Args:
        shape: nodes and ranks.
        nodes: node of every rank, in order.
    """
    rank, on_node = dist.get_rank(), shape.ranks_per_node
    node, position = divmod(rank, on_node)
    groups = {}
    for part in shape.parts:
        stride = on_node // part
        # inter: the same positions on every node, `stride` apart; intra: neighbours on this node.
        members = {
            "inter": [r for r in range(len(nodes)) if r % on_node % stride == position % stride],
            "intra": [node * on_node + p for p in range(on_node) if p // part == position // part],
        }
        for resource, ranks in members.items():
            group = new_local_group(ranks, f"monta {resource} {part}")
            groups[resource, part] = PeerGroup(
                name=f"{resource} {len(ranks)}",
                process_group=group,
                size=len(ranks),
                rank=ranks.index(rank),
                nodes=tuple(nodes[other] for other in ranks),
            )
    return groups


def counts_of(nodes: tuple[int, ...], device: torch.device) -> Start:
    """The host's work on exchanged counts: read and bind. To count and to exchange are points.

    Args:
        nodes: node of every rank, in order.
        device: device of the routing map.
    """
    count_table = _count_table(nodes)
    layout = count_table.layout
    generator = torch.Generator().manual_seed(1)
    ids = _draw_experts(NUM_TOKENS, layout.num_experts, generator)
    messages, sent = count_table.count(_routing_map(ids, layout.num_experts).to(device))
    # All ranks are taken to send this one what it sends itself.
    received = messages[layout.rank].expand_as(messages)

    def start() -> Callable[[], object]:
        counts = count_table.read(count_table.join(received, sent).cpu().numpy())
        assert counts.tokens is not None, "chains of tokens are among them"
        bound = CHAINS["alltoall_dedup"].bind(layout, counts.tokens, 1)
        return lambda: bound

    return start


def _count_table(nodes: tuple[int, ...]) -> CountTable:
    """The table of counts for an exchange of all ranks and every chain that could run."""
    num_ranks = len(nodes)
    layout = Layout(
        ep=num_ranks,
        etp=1,
        num_local_experts=max(NUM_EXPERTS // num_ranks, 1),
        rank=dist.get_rank(),
        nodes=nodes,
    )
    chains = tuple(chain for chain in CHAINS.values() if chain.incompatibility(layout) is None)
    return CountTable(chains=chains, layout=layout, num_blocks=NUM_BLOCKS)


def passes_of(device: torch.device, num_chunks: int) -> Start:
    """All four passes of a rank with itself: almost nothing moves, so the time is the host's work.

    Args:
        device: device of the rows.
        num_chunks: number of chunks.
    """
    # One expert, to which all rows go in the order that they are in.
    layout = Layout(ep=1, etp=1, num_local_experts=1, rank=0, nodes=(0,))
    sent = np.full((1, 1), NUM_TOKENS)
    chain = CHAINS["alltoall_allgather"]
    assert len(chain.stages) == NUM_PASS_STAGES
    world = dist.group.WORLD
    assert world is not None, "the launch has been joined"
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
        )
        inputs = rows.detach().requires_grad_(), probs.detach().requires_grad_()
        moved, row_probs = dispatch(exchange, *inputs)
        outputs = combine(exchange, moved), row_probs
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return lambda: outputs

    return start


def operation_of(
    point: Point, groups: Groups, nodes: tuple[int, ...], device: torch.device, cold_bytes: int
) -> Start:
    """The operation that is timed for a point.

    In an exchange an operation works on rows that it has not touched before. Where its runs follow
    each other, each takes the next of several sets of buffers, and its results stay: otherwise
    5 MB would still be in a cache from the previous run, and be copied several times as fast as in
    any chain.

    Args:
        point: the point.
        groups: this rank's groups.
        nodes: node of every rank, in order.
        device: device that it runs on.
        cold_bytes: bytes of buffers to take turns with; 0 for one set of buffers.
    """
    if point.is_collective:
        return _collective(point, groups[point.resource, point.ranks_on_node], device)
    num_sets = max(min(cold_bytes // point.num_bytes, MAX_SETS), 1)
    works = cycle([_in_memory(point, nodes, device) for _ in range(num_sets)])
    results: deque[object] = deque(maxlen=num_sets)

    def start() -> Callable[[], object]:
        results.append(next(works)())
        return lambda: results

    return start


def _collective(point: Point, group: PeerGroup, device: torch.device) -> Start:
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


def _in_memory(point: Point, nodes: tuple[int, ...], device: torch.device) -> Callable[[], object]:
    num_rows = point.num_rows
    # CPUs sum fp32 rows; on GPUs rows are mostly bf16.
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    hidden_size = HIDDEN_ROW_BYTES // dtype.itemsize
    generator = torch.Generator().manual_seed(1)

    def rows(count: int) -> torch.Tensor:
        return torch.ones(count, hidden_size, dtype=dtype, device=device)

    if point.operation in ("copy", "put"):
        # With the probabilities and the expert ids of a row: small, but operations of their own.
        columns = [
            rows(num_rows),
            torch.ones(num_rows, TOPK, device=device),
            torch.ones(num_rows, TOPK, dtype=torch.int32, device=device),
        ]
        payload = Payload.of(columns, packed=True)
        index = torch.randperm(num_rows, generator=generator).to(device)

        def copy() -> list[torch.Tensor]:
            messages = payload.allocate(num_rows)
            for into, column in zip(payload.columns(messages).tensors(), columns, strict=True):
                torch.index_select(column, 0, index, out=into)
            return messages

        def put() -> list[torch.Tensor]:
            outputs = [torch.empty_like(column) for column in columns[:2]]
            for output, column in zip(outputs, columns, strict=False):
                put_rows(output, index, column)
            return outputs

        return copy if point.operation == "copy" else put

    if point.operation == "sum":
        # [N, W] one expert of every part, so that a row has a copy in every part.
        ids = torch.arange(NUM_COPIES, device=device).expand(num_rows, -1)
        parts = ExpertRange(first=0, size=1, num_parts=NUM_COPIES)
        num_copies = num_rows * NUM_COPIES
        copies, source = Copies.empty(num_rows, num_copies, parts, device), rows(num_copies)
        find_copies(ids, Parts.of(parts, num_rows, num_copies, ids), copies)
        shares = torch.ones(num_copies, device=device)

        def add() -> torch.Tensor:
            # The sum is in fp32; the message that it is sent in is allocated separately. After it
            # the probabilities go back to the ids of their experts.
            into = source.new_empty(num_rows, hidden_size)
            into.copy_(copies.sum_by_row(source, torch.float32))
            into_probs = shares.new_zeros(num_rows, NUM_COPIES)
            into_probs[copies.row, copies.place] = shares
            return into

        return add

    if point.operation == "count":
        count_table = _count_table(nodes)
        num_experts = count_table.layout.num_experts
        chosen = _draw_experts(num_rows * NUM_EXPERTS // num_experts, num_experts, generator)
        counted = _routing_map(chosen, num_experts).to(device)
        return lambda: count_table.count(counted)

    ids = _draw_experts(num_rows, NUM_EXPERTS, generator)
    if point.operation in ("find", "find_lists"):
        size = NUM_EXPERTS // TOPK
        parts = ExpertRange(first=0, size=size, num_parts=TOPK)
        hits = torch.zeros(num_rows, TOPK, dtype=torch.bool).scatter(1, ids // size, True)
        num_copies, ids_there = int(hits.sum()), ids.int().to(device)
        copies = Copies.empty(num_rows, num_copies, parts, device)
        return lambda: find_copies(
            ids_there, Parts.of(parts, num_rows, num_copies, ids_there), copies
        )

    on_device = _routing_map(ids, NUM_EXPERTS).to(device)
    if point.operation == "lists":
        probs = torch.ones(num_rows, NUM_EXPERTS, device=device)
        return lambda: expert_ids_of(on_device, probs, TOPK)

    tokens = rows(num_rows)
    permuted = permute(tokens, on_device, TOPK)
    if point.operation == "permute":
        return lambda: permute(tokens, on_device, TOPK)
    return lambda: unpermute(permuted, tokens.shape)


def _draw_experts(num_rows: int, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """[N, W] ascending experts of each row."""
    scores = torch.rand(num_rows, num_experts, generator=generator)
    return scores.topk(TOPK, dim=1).indices.sort(dim=1).values


def _routing_map(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Expert ids as a routing map of Megatron: [N, W] -> [N, E] bool."""
    return torch.zeros(ids.shape[0], num_experts, dtype=torch.bool).scatter(1, ids, True)
