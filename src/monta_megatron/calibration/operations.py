"""Operations that a calibration times: the executor's own calls, on buffers allocated likewise.

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

from monta_megatron.calibration import tasks
from monta_megatron.calibration.memory_operations import (
    IN_MEMORY,
    Prepare,
    count,
    routing_map,
)
from monta_megatron.calibration.tasks import NUM_EXPERTS, Point, Task
from monta_megatron.chains import CHAINS, Counts
from monta_megatron.chains.chain import NUM_BLOCKS
from monta_megatron.chains.program import Resource
from monta_megatron.core import Layout
from monta_megatron.exchange.collectives import PeerGroup, start_all_gather, start_all_to_all
from monta_megatron.exchange.count_messages import CountMessages
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.monitor import Monitor

NUM_TOKENS = 128
# More than the cache of a GPU or of a core holds.
COLD_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
MAX_SETS = 8

# Starts an operation; the function that it returns waits for the result.
Starter: TypeAlias = Callable[[], Callable[[], object]]


def starts_of(
    groups: Mapping[tuple[Resource, int], PeerGroup],
    nodes: tuple[int, ...],
    device: torch.device,
    cold_bytes: int,
    more: Mapping[str, Prepare],
    fused: bool = False,
) -> Callable[[Task], Starter]:
    """Starters of points and host work on this rank, made when first asked for.

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
    count_messages, in_memory = _count_messages(layout, "auto" if fused else "torch"), IN_MEMORY
    if fused:
        from monta_megatron.calibration.fused_operations import IN_MEMORY as in_memory
    prepared: dict[str, Prepare] = {
        **in_memory,
        "count": partial(count, count_messages=count_messages),
        **more,
    }

    @cache
    def start_of(task: Task) -> Starter:
        if task == tasks.COUNTS:
            return _bind_counts(count_messages, device)
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


def _collective(point: Point, group: PeerGroup, device: torch.device) -> Starter:
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


def _bind_counts(count_messages: CountMessages, device: torch.device) -> Starter:
    """The host's work on exchanged counts: read and bind. To count and to exchange are points."""
    layout = count_messages.layout
    messages, sent = count_messages.count(routing_map(NUM_TOKENS, layout.num_experts).to(device))
    # All ranks are taken to send this one what it sends itself.
    received = messages[layout.rank].expand_as(messages)

    def start() -> Callable[[], object]:
        counts = count_messages.read(count_messages.join(received, sent).cpu().numpy())
        assert counts.tokens is not None, "chains of tokens are among them"
        bound = CHAINS["alltoall_dedup"].bind(layout, counts.tokens, 1)
        return lambda: bound

    return start


def _count_messages(layout: Layout, kernels: str) -> CountMessages:
    chains = tuple(chain for chain in CHAINS.values() if chain.incompatibility(layout) is None)
    return CountMessages(chains=chains, layout=layout, num_blocks=NUM_BLOCKS, kernels=kernels)


def _passes(device: torch.device, num_chunks: int, fused: bool) -> Starter:
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
            bound_chain=bound, groups=alone, sum_dtype=torch.float32, monitor=Monitor(), fused=fused
        )
        inputs = rows.detach().requires_grad_(), probs.detach().requires_grad_()
        moved, row_probs = dispatch(exchange, *inputs)
        outputs = combine(exchange, moved), row_probs
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        return lambda: outputs

    return start
