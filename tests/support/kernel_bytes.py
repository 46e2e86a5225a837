"""Bytes that kernels read and write: counted in Triton's interpreter, mask by mask.

Every program of the grid runs there, and every value that a mask lets through is counted as often
as it is read or written.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from fake_world import empty_copies, format_of
from triton.runtime.interpreter import InterpreterBuilder, _get_np_dtype

from monta_megatron.chains.stages import Parts
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.kernels.copies import duplicate, find_copies
from monta_megatron.exchange.kernels.routing import count_routing
from monta_megatron.exchange.kernels.sums import reduce, reduce_ranks
from monta_megatron.exchange.rows import expert_ids_of

# Of the bytes that cannot be avoided: columns read once and written once.
MOST = 1.1
TOPK, HIDDEN_SIZE = 8, 4096


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


def work(
    device: torch.device, num_tokens: int, num_experts: int, num_ranks: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """By kernel, a call, and the bytes that cannot be avoided: columns read and written once.

    bf16 tokens of 4,096 values go to 8 experts each.
    """
    chosen = torch.rand(num_tokens, num_experts, device=device).topk(TOPK, dim=1).indices
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool, device=device)
    routing_map.scatter_(1, chosen, True)
    probs = torch.rand(routing_map.shape, device=device).requires_grad_()
    lists, ids = expert_ids_of(routing_map, probs, TOPK, fused=True)
    num_pairs, many = num_tokens * TOPK, routing_map.repeat(64, 1)
    num_copies = int(routing_map.unflatten(1, (num_ranks, -1)).any(dim=2).sum())
    ranks = Parts(first=0, size=num_experts // num_ranks, num_parts=num_ranks)
    experts = Parts(first=0, size=1, num_parts=num_experts)
    copies = empty_copies(num_tokens, num_copies, ranks, device)
    by_expert = empty_copies(num_tokens, num_pairs, experts, device)
    for parts, each in ((ranks, copies), (experts, by_expert)):
        find_copies(ids, parts, each)
    columns = torch.zeros(1, HIDDEN_SIZE, dtype=torch.bfloat16, device=device), lists[:1], ids[:1]
    payload = format_of(columns, packed=True)
    tokens, messages, terms = (
        payload.columns(payload.allocate(number))
        for number in (num_tokens, num_copies, num_ranks * num_tokens)
    )
    outputs = Columns(torch.zeros_like(tokens.rows[by_expert.row]), probs.new_zeros(num_pairs))
    places = torch.randperm(num_pairs, device=device)

    row, pair, of_lists = 2 * HIDDEN_SIZE, 4 + 4, routing_map.nbytes + num_pairs * 4
    indices = 2 * copies.row.nbytes + copies.row_starts.nbytes
    return {
        "find_copies": (lambda: find_copies(ids, ranks, copies), 2 * ids.nbytes + indices),
        "duplicate": (
            lambda: duplicate(tokens, copies, messages),
            num_copies * 2 * (row + TOPK * pair),
        ),
        "duplicate, per expert": (
            lambda: duplicate(tokens, by_expert, outputs, places),
            num_pairs * 2 * (row + 4),
        ),
        "reduce": (
            lambda: reduce(messages, copies, tokens, torch.float32),
            (num_copies + num_tokens) * (row + TOPK * 4),
        ),
        "reduce_ranks": (
            lambda: reduce_ranks(terms, tokens, torch.float32, num_ranks),
            (num_ranks + 1) * num_tokens * (row + TOPK * 4),
        ),
        "count_routing": (
            lambda: count_routing(many, 8, {"node": 2, "rank": num_ranks}, True),
            many.nbytes,
        ),
        "expert_ids_of": (
            lambda: expert_ids_of(routing_map, probs, TOPK, fused=True),
            of_lists + num_pairs * pair,
        ),
        "its backward": (
            lambda: lists.sum().backward(retain_graph=True),
            of_lists + probs.nbytes,
        ),
    }


def compare() -> None:
    """Check all kernels on 64 tokens, 32 experts and 4 ranks.

    Raises:
        AssertionError: names a kernel, what it touches and what it has to.
    """
    torch.manual_seed(0)
    calls = work(torch.device("cpu"), 64, 32, 4)
    for kernel, (call, least) in calls.items():
        with counted() as total:
            call()
        # Finding copies may read more, as that is little beside making them.
        most = 0.05 * calls["duplicate"][1] if kernel == "find_copies" else MOST * least
        assert least <= total[0] <= most, f"{kernel}: {total[0]} bytes, at least {least}"
