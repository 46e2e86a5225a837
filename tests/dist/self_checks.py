"""Functions that run on the ranks of a pool: the first use of a chain, with a fault on one rank."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from dispatchers import in_interpreter, run_phases
from exchanges import uninitialised_memory_is_nan
from layers import Case, build_layer, make_batch, same_on_all_ranks

from monta_megatron.chains.chain import HEADER_SIZE
from monta_megatron.chains.program import Kind, Operation
from monta_megatron.exchange import count_messages, operations, rows
from monta_megatron.exchange.buffers import Buffers
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.integration import first_use

FAULTY_RANK = 1
Fault = Callable[[str], AbstractContextManager[Any]]


def error_of(case: Case, fault: str = "", stage: str = "") -> str:
    """The error of a first use on every rank, or "".

    FAULTY_RANK has the fault, perhaps in one stage alone.
    """
    first_use._passed.clear()
    layer = build_layer(case)
    batch, dispatcher = make_batch(case, layer), layer.token_dispatcher
    is_faulty = fault and dist.get_rank() == FAULTY_RANK
    state, error = torch.get_rng_state(), ""
    with (
        uninitialised_memory_is_nan(),
        in_interpreter(dispatcher) if case.fused else nullcontext(),
        FAULTS[fault](stage) if is_faulty else nullcontext(),
    ):
        try:
            run_phases(case, dispatcher, batch, is_training=False)
        except first_use.SelfCheckError as raised:
            assert not any(first_use._passed.values())
            error = str(raised)
    assert torch.equal(torch.get_rng_state(), state), "random numbers were drawn"
    return same_on_all_ranks(error)


def after(
    kind: Kind,
    change: Callable[[Buffers, Operation], None],
    pass_name: str = "",
    fused: bool = False,
) -> Fault:
    """A fault that changes what an operation has written."""

    def plant(stage: str) -> AbstractContextManager[Any]:
        table: Any = operations.OPERATIONS
        if fused:
            from monta_megatron.exchange.kernels.operations import FUSED_OPERATIONS as table
        original = table[kind]

        def changed(buffers: Buffers, operation: Operation) -> operations.Works:
            works = original(buffers, operation)
            if pass_name in (buffers.pass_name, ""):
                change(buffers, operation)
            return works

        return mock.patch.dict(table, {kind: changed})

    return plant


def swap_experts(buffers: Buffers, operation: Operation) -> None:
    """The first rows of the first two experts change places."""
    second = int(buffers.exchange.bound_chain.rows_per_local_expert[0])
    into = buffers.target(operation)
    if operation.chunk == buffers.exchange.bound_chain.num_chunks - 1:
        into.rows[[0, second]] = into.rows[[second, 0]]


def write_twice(buffers: Buffers, operation: Operation) -> None:
    """A row of the second chunk lies where the next one should."""
    into, index = buffers.target(operation), buffers.row_indices(operation)
    assert index is not None
    if operation.chunk == 1:
        into.rows[index[3]] = into.rows[index[2]]


def take_neighbour(buffers: Buffers, operation: Operation) -> None:
    """A probability is that of the next row."""
    into, index = buffers.target(operation), buffers.row_indices(operation)
    assert index is not None and into.probs is not None
    into.probs[index[2]] = into.probs[index[2] + 1]


def forget_chunk(buffers: Buffers, operation: Operation) -> None:
    """A chunk's rows stay 0."""
    into, index = buffers.target(operation), buffers.row_indices(operation)
    if operation.chunk == 1:
        into.rows[slice(None) if index is None else index] = 0


def forget_probabilities(buffers: Buffers, operation: Operation) -> None:
    """A chunk's probabilities stay 0."""
    into, index = buffers.target(operation), buffers.row_indices(operation)
    assert into.probs is not None
    into.probs[slice(None) if index is None else index] = 0


def add_one(buffers: Buffers, operation: Operation) -> None:
    """The last value of a row is too large."""
    buffers.columns(operation.writes[0]).rows[-1, -1] += 1


def miscount(stage: str) -> AbstractContextManager[Any]:
    """A rank has one token more for an expert than it has said."""
    read = count_messages.CountMessages.read

    def wrong(table: count_messages.CountMessages, joined: Any) -> count_messages.MicroBatchCounts:
        joined[HEADER_SIZE] += 1
        return read(table, joined)

    return mock.patch.object(count_messages.CountMessages, "read", wrong)


def rotate_peers(stage: str) -> AbstractContextManager[Any]:
    """What the peers of an exchange have sent lies in the order of other peers."""
    start = operations.start_all_to_all

    def rotated(
        output: torch.Tensor,
        message: torch.Tensor,
        receive: list[int],
        send: list[int],
        group: PeerGroup,
    ) -> dist.Work:
        work = start(output, message, receive, send, group)
        work.wait()
        first, *others = output.clone().split(receive)
        torch.cat([*others, first], out=output)
        return work

    return mock.patch.object(operations, "start_all_to_all", rotated)


@contextmanager
def sum_backwards(stage: str) -> Iterator[None]:
    """Sums of one stage are made in descending order."""
    original, table, stages = rows.sum_rows, operations.OPERATIONS, [""]

    def descending(terms: torch.Tensor, order: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        if stages[-1] != stage:
            return original(terms, order, starts)
        return original(terms, order.flip(0), len(order) - starts.flip(0)).flip(0)

    def noting_stage(kind: Kind) -> Callable[[Buffers, Operation], operations.Works]:
        def noted(
            buffers: Buffers, operation: Operation, run: Any = table[kind]
        ) -> operations.Works:
            stages.append(operation.stage)
            return run(buffers, operation)

        return noted

    changed = {kind: noting_stage(kind) for kind in table}
    with mock.patch.dict(table, changed), mock.patch.object(rows, "sum_rows", descending):
        yield


FAULTS: dict[str, Fault] = {
    "count wrong": miscount,
    "experts swapped": after("put", swap_experts, "dispatch"),
    "peers rotated": rotate_peers,
    "row written twice": after("put", write_twice, "dispatch"),
    "neighbour's probability": after("put", take_neighbour, "dispatch"),
    "sum backwards": sum_backwards,
    "chunk of combine backward missing": after("put", forget_chunk, "combine_backward"),
    "chunk of dispatch backward missing": after("put", forget_chunk, "dispatch_backward"),
    "chunk of dispatch missing": after("put", forget_chunk, "dispatch"),
    "probabilities of dispatch backward missing": after(
        "put", forget_probabilities, "dispatch_backward"
    ),
    "wrong kernel": after("reduce", add_one, fused=True),
}
