"""Bytes that kernels read and write: counted in Triton's interpreter, mask by mask.

Every program of the grid runs there, and every value that a mask lets through is counted as often
as it is read or written.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from triton.runtime.interpreter import InterpreterBuilder, _get_np_dtype

from monta_megatron.chains.stages import Parts
from monta_megatron.exchange.buffers import Columns, MessageFormat
from monta_megatron.exchange.kernels.copies import duplicate, find_copies
from monta_megatron.exchange.kernels.routing import count_routing
from monta_megatron.exchange.kernels.sums import reduce, reduce_ranks
from monta_megatron.exchange.rows import Copies, expert_ids_of

# Of the bytes that cannot be avoided: columns read once and written once.
MOST = 1.1
NUM_TOKENS, NUM_EXPERTS, TOPK, HIDDEN_SIZE = 64, 32, 8, 4096


@contextmanager
def counted() -> Iterator[list[int]]:
    """[1] bytes that kernels touch meanwhile."""
    total = [0]
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def count(pointers: Any, mask: Any) -> None:
        itemsize = _get_np_dtype(pointers.get_element_ty()).itemsize
        total[0] += int(mask.data.sum()) * itemsize

    def counted_load(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        count(pointers, mask)
        return load(builder, pointers, mask, *others)

    def counted_store(builder: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        count(pointers, mask)
        return store(builder, pointers, value, mask, *others)

    patches = {"create_masked_load": counted_load, "create_masked_store": counted_store}
    with mock.patch.multiple(InterpreterBuilder, **patches):
        yield total


def compare() -> None:
    """Check all kernels on a routing of bf16 tokens, each to 8 of 32 experts on 4 ranks.

    Raises:
        AssertionError: names a kernel, what it touches and what it has to.
    """
    torch.manual_seed(0)
    chosen = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(TOPK, dim=1).indices
    routing_map = torch.zeros(NUM_TOKENS, NUM_EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)
    _, ids = expert_ids_of(routing_map, torch.rand(routing_map.shape), TOPK, fused=True)
    num_pairs = NUM_TOKENS * TOPK
    ranks = Parts(first=0, size=NUM_EXPERTS // 4, num_parts=4)
    num_copies = int(routing_map.unflatten(1, (4, -1)).any(dim=2).sum())
    experts = Parts(first=0, size=1, num_parts=NUM_EXPERTS)
    row, pair = 2 * HIDDEN_SIZE, 4 + 4

    copies = Copies.empty(NUM_TOKENS, num_copies, ranks, ids.device)
    with counted() as total:
        find_copies(ids, ranks, copies)
    tokens, messages = _message(NUM_TOKENS), _message(num_copies)
    least = num_copies * 2 * (row + TOPK * pair)
    assert total[0] < 0.05 * least, f"find_copies: {total[0]} bytes, duplicate {least}"
    with counted() as total:
        duplicate(tokens, copies, messages)
    _check("duplicate", total, least)

    with counted() as total:
        reduce(messages, copies, tokens, torch.float32)
    _check("reduce", total, (num_copies + NUM_TOKENS) * (row + TOPK * 4))

    by_expert = Copies.empty(NUM_TOKENS, num_pairs, experts, ids.device)
    find_copies(ids, experts, by_expert)
    outputs = Columns(
        rows=torch.zeros(num_pairs, HIDDEN_SIZE, dtype=torch.bfloat16), probs=torch.zeros(num_pairs)
    )
    with counted() as total:
        duplicate(tokens, by_expert, outputs, torch.randperm(num_pairs))
    _check("duplicate, per expert", total, num_pairs * 2 * (row + 4))

    parts = _message(4 * NUM_TOKENS)
    with counted() as total:
        reduce_ranks(parts, tokens, torch.float32, 4)
    _check("reduce_ranks", total, 5 * NUM_TOKENS * (row + TOPK * 4))

    many = routing_map.repeat(64, 1)
    with counted() as total:
        count_routing(many, 8, {"node": 2, "rank": 4}, True)
    _check("count_routing", total, many.nbytes)

    probs = torch.rand(routing_map.shape).requires_grad_()
    with counted() as total:
        lists, _ = expert_ids_of(routing_map, probs, TOPK, fused=True)
    _check("expert_ids_of", total, routing_map.nbytes + num_pairs * (4 + pair))
    with counted() as total:
        lists.sum().backward()
    _check("its backward", total, routing_map.nbytes + num_pairs * 4 + probs.nbytes)


def _check(kernel: str, total: list[int], least: int) -> None:
    assert least <= total[0] <= MOST * least, f"{kernel}: {total[0]} bytes, at least {least}"


def _message(num_rows: int) -> Columns:
    rows = torch.zeros(1, HIDDEN_SIZE, dtype=torch.bfloat16)
    lists = torch.zeros(1, TOPK), torch.zeros(1, TOPK, dtype=torch.int32)
    payload = MessageFormat.of([rows, *lists], packed=True)
    return payload.columns(payload.allocate(num_rows))
