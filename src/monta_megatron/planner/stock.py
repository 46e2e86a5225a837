"""Prices of the dispatchers that Megatron ships.

`alltoall` is priced as our plain chain, with stock's host costs. `allgather` is no chain of ours;
it has these passes, in Megatron-Core 0.16.1 and 0.19.2 alike:

    dispatch            gather routing map, probabilities and rows of all ranks; the host waits for
                        the number of rows; copy rows per local expert; the host waits again, for
                        the number of their probabilities
    combine             sum outputs into the rows of all ranks; reduce-scatter these in the dtype of
                        the probabilities
    combine_backward    gather gradients in the dtype of the probabilities; copy rows per expert
    dispatch_backward   sum gradients into the rows of all ranks; reduce-scatter rows, then
                        probabilities

Everything runs on one stream. Copies and sums are priced by the bytes that fused kernels move
(`moe-permute-fusion`), as those of stock's `alltoall` are; without fusion they take longer. A
reduce-scatter is taken to cost what an all-gather of its shares does: NCCL's ring moves as much.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from monta_megatron.chains.allgather import ALLGATHER
from monta_megatron.chains.alltoall import ALLTOALL
from monta_megatron.chains.program import PASSES, Pass, Phase, Resource
from monta_megatron.chains.stages import RowCounts
from monta_megatron.core import Shape
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.layout import priced_ranks
from monta_megatron.planner.price import bind_expected, launch_us, price, times_us
from monta_megatron.planner.schedule import Task, simulate
from monta_megatron.planner.traffic import (
    COUNT_MAP_BYTES,
    StageTraffic,
    in_memory,
    moved_by_resource,
)
from monta_megatron.planner.training import Training

# Boundaries of our chain of the same name: after its gather, and at its end.
GATHERED, TO_EXPERTS = 2, -1
# Times that the probability of a token for a local expert is read or written: sliced, transposed
# and selected in dispatch; scattered, transposed and put in place in its backward pass.
NUM_ACCESSES = 5


class Step(NamedTuple):
    """One step of a pass of stock's `allgather`.

    Attributes:
        traffic: bytes that the step moves, by resource.
        num_operations: operations on tensors that the host launches for it, allocations included.
        host_waits: whether the host waits for its end before it goes on.
    """

    traffic: StageTraffic
    num_operations: int
    host_waits: bool = False


def stock_times_us(shape: Shape, cluster: Cluster, training: Training) -> dict[str, float]:
    """Times of Megatron's dispatchers that the training can run, by name."""
    phase = training.phase
    times = {"alltoall": price(shape, cluster.as_stock, ALLTOALL, 1, phase).total_us}
    if training.runs_allgather:
        times["allgather"] = allgather_us(shape, cluster, phase)
    return times


def allgather_us(shape: Shape, cluster: Cluster, phase: Phase) -> float:
    """Time of all passes of stock's `allgather`, from the first launch to the last end."""
    host, on_host = cluster.host, cluster.policy == "host"
    tasks: list[Task] = []
    host_waits = False
    for pass_ in PASSES[phase]:
        for step in allgather_steps(shape, pass_):
            us = launch_us(step.traffic, step.num_operations, cluster)
            if host_waits:
                us += host.counts_to_host_us / host.speed
            before = (len(tasks) - 1,) if tasks else ()
            task = Task(
                resource=step.traffic.resource,
                us=times_us(step.traffic, cluster)[0],
                launch_us=us,
                after=before,
                launch_after=before if host_waits or on_host else (),
            )
            tasks.append(task)
            host_waits = step.host_waits
    return max(simulate(tasks, cluster.factor))


# The same for every cluster with such nodes, as at all corners of published ranges.
@lru_cache(maxsize=64)
def allgather_steps(shape: Shape, pass_: Pass) -> tuple[Step, ...]:
    """The steps of one pass, in the order in which they run.

    Args:
        shape: the exchange.
        pass_: the pass.
    """
    return tuple(_steps(shape, pass_))


def _steps(shape: Shape, pass_: Pass) -> Iterator[Step]:
    layouts = [layout for layout, _ in priced_ranks(shape.layout, shape.routing)]
    bound = [bind_expected(shape, ALLGATHER, 1, layout) for layout in layouts]
    # [S, 1] rows of all ranks, and copies of them for the experts of each priced rank.
    gathered, copies = (
        np.array([chain.rows_by_boundary[boundary] for chain in bound])
        for boundary in (GATHERED, TO_EXPERTS)
    )
    hidden, num_ranks = shape.hidden_size, len(shape.layout.nodes)
    value_bytes, prob_bytes = shape.value_bytes, shape.prob_bytes
    num_experts, num_local_experts = shape.layout.num_experts, shape.layout.num_local_experts
    crosses = "tp_ep" in shape.layout.crossing_groups
    resource: Resource = "inter" if crosses else "intra"

    def collectives(stage: str, share_bytes: int) -> Iterator[Step]:
        """Each rank's share of the rows to every rank, or of the sums from every rank."""
        if num_ranks > 1:
            messages = np.full(
                (len(layouts), 2, 1, num_ranks), shape.tokens_per_rank * share_bytes, dtype=float
            )
            traffic = StageTraffic(
                stage=stage,
                kind="allgather",
                operation="allgather",
                resource=resource,
                moved=moved_by_resource(layouts, "tp_ep", messages, resource),
            )
            yield Step(traffic, num_operations=1)

    def converted(rows: RowCounts) -> Iterator[Step]:
        """Rows from their dtype to that of the probabilities, or back."""
        if num_ranks > 1 and prob_bytes != value_bytes:
            num_bytes = hidden * (value_bytes + prob_bytes) * rows
            yield Step(in_memory("convert", "permute", num_bytes), num_operations=1)

    local_values = num_local_experts * gathered
    row_bytes = hidden * value_bytes
    permute = in_memory("permute", "permute", 2 * row_bytes * copies)
    unpermute = in_memory("unpermute", "unpermute", row_bytes * (copies + gathered), "sum")
    tokens = np.full(gathered.shape, float(shape.tokens_per_rank))
    if pass_.ids:  # dispatch
        yield from collectives("gather routing map", num_experts)
        yield from collectives("gather probs", num_experts * prob_bytes)
        yield from collectives("gather rows", row_bytes)
        counted = in_memory("count", "count", COUNT_MAP_BYTES * local_values)
        yield Step(counted, num_operations=3, host_waits=True)
        yield Step(permute, num_operations=4, host_waits=True)
        selected = in_memory("select probs", "permute", NUM_ACCESSES * prob_bytes * local_values)
        yield Step(selected, num_operations=3)
    elif pass_.transpose and not pass_.probs:  # combine
        yield Step(unpermute, num_operations=2)
        yield from converted(gathered)
        yield from collectives("reduce-scatter rows", hidden * prob_bytes)
        yield from converted(tokens)
    elif not pass_.transpose:  # combine, backward
        yield from converted(tokens)
        yield from collectives("gather rows", hidden * prob_bytes)
        yield from converted(gathered)
        yield Step(permute, num_operations=1)
    else:  # dispatch, backward
        # Of the experts of other ranks, gradients are written as zeros.
        values = NUM_ACCESSES * local_values + num_experts * gathered
        yield Step(in_memory("scatter probs", "permute", prob_bytes * values), num_operations=3)
        yield Step(unpermute, num_operations=2)
        yield from collectives("reduce-scatter rows", row_bytes)
        yield from collectives("reduce-scatter probs", num_experts * prob_bytes)
