"""Kernels compiled for GPUs of three generations, without one: what the assembler says of them."""

import re
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")

from compiled_kernels import TARGETS, Compiled, Launch, launches, launches_of

from monta_megatron.chains.stages import Parts
from monta_megatron.exchange.buffers import Columns, MessageFormat
from monta_megatron.exchange.kernels.copies import duplicate, find_copies
from monta_megatron.exchange.kernels.routing import count_routing
from monta_megatron.exchange.kernels.sums import reduce, reduce_ranks
from monta_megatron.exchange.rows import Copies, expert_ids_of

MOST_REGISTERS = 128
NUM_ROWS, NUM_COPIES, TOPK = 64, 100, 8


def message(num_rows: int, dtype: torch.dtype, hidden_size: int, topk: int = TOPK) -> Columns:
    """Rows with their lists in a packed message."""
    rows = torch.empty(1, hidden_size, dtype=dtype)
    lists = torch.empty(1, topk), torch.empty(1, topk, dtype=torch.int32)
    payload = MessageFormat.of([rows, *lists], packed=True)
    return payload.columns(payload.allocate(num_rows))


def copies_of(num_rows: int = NUM_ROWS, num_copies: int = NUM_COPIES) -> Copies:
    """Copies for one expert each, of no values."""
    one = Parts(first=0, size=1, num_parts=1)
    return Copies.empty(num_rows, num_copies, one, torch.device("cpu"))


def launch_find(num_parts: int) -> list[Launch]:
    ids = torch.empty(NUM_ROWS, TOPK, dtype=torch.int32)
    parts = Parts(first=0, size=1, num_parts=num_parts)
    return launches_of(find_copies, ids, parts, copies_of())


def launch_duplicate(dtype: torch.dtype, hidden_size: int) -> list[Launch]:
    before, after = (message(rows, dtype, hidden_size) for rows in (NUM_ROWS, NUM_COPIES))
    if dtype == torch.uint8:
        # Whole messages.
        before, after = Columns(rows=before.rows), Columns(rows=after.rows)
    return launches_of(duplicate, before, copies_of(), after)


def launch_duplicate_per_expert(dtype: torch.dtype, hidden_size: int) -> list[Launch]:
    rows = torch.empty(NUM_COPIES, hidden_size, dtype=dtype)
    into, places = Columns(rows=rows, probs=torch.empty(NUM_COPIES)), torch.arange(NUM_COPIES)
    return launches_of(duplicate, message(NUM_ROWS, dtype, hidden_size), copies_of(), into, places)


def launch_reduce(dtype: torch.dtype, hidden_size: int) -> list[Launch]:
    before, after = (message(rows, dtype, hidden_size) for rows in (NUM_COPIES, NUM_ROWS))
    index = torch.empty(NUM_COPIES, dtype=torch.int64)
    unrounded = None if dtype == torch.float32 else torch.empty(10, hidden_size)
    return launches_of(reduce, before, copies_of(), after, torch.float32, index, unrounded, 3)


def launch_reduce_ranks(dtype: torch.dtype, hidden_size: int) -> list[Launch]:
    before, after = (message(rows, dtype, hidden_size) for rows in (4 * NUM_ROWS, NUM_ROWS))
    unrounded = None if dtype == torch.float32 else torch.empty(NUM_ROWS, hidden_size)
    return launches_of(reduce_ranks, before, after, torch.float32, 2, unrounded, 1)


def launch_lists(num_experts: int) -> list[Launch]:
    routing_map = torch.empty(NUM_ROWS, num_experts, dtype=torch.bool)
    probs = torch.empty(NUM_ROWS, num_experts, requires_grad=True)
    with launches() as caught:
        lists, _ = expert_ids_of(routing_map, probs, TOPK, fused=True)
        lists.backward(torch.empty_like(lists))
    return caught


def launch_counts(num_experts: int, num_nodes: int, num_ranks: int) -> list[Launch]:
    routing_map = torch.empty(4096, num_experts, dtype=torch.bool)
    parts = {"node": num_nodes, "rank": num_ranks}
    return launches_of(count_routing, routing_map, 8, parts, True)


# By kernel, dtype and H: how it is launched, and how many reads and writes of 16 bytes each thread
# makes for the rows of a tile.
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
ROWS: dict[tuple[Callable[..., list[Launch]], torch.dtype, int], tuple[int, int]] = {
    (launch_duplicate, BFLOAT16, 4096): (4, 4),
    (launch_duplicate, FLOAT32, 4096): (4, 4),
    (launch_duplicate, BFLOAT16, 64): (4, 4),
    (launch_duplicate, torch.uint8, 2 * 4096 + 64): (4, 4),
    (launch_duplicate_per_expert, BFLOAT16, 7168): (4, 4),
    (launch_duplicate_per_expert, FLOAT32, 64): (4, 4),
    # A value that is kept unrounded takes twice the bytes.
    (launch_reduce, BFLOAT16, 7168): (2, 2 + 4),
    (launch_reduce, FLOAT16, 4096): (2, 2 + 4),
    (launch_reduce, FLOAT32, 4096): (2, 2),
    (launch_reduce, BFLOAT16, 64): (1, 1 + 2),
    # In turn the parts, and the one that was not rounded.
    (launch_reduce_ranks, BFLOAT16, 4096): (1 + 2, 1),
    (launch_reduce_ranks, FLOAT32, 4096): (1, 1),
}
OTHERS: list[tuple[Callable[..., list[Launch]], object]] = [
    *((launch_find, num_parts) for num_parts in (2, 8, 64, 512)),
    *((launch_lists, num_experts) for num_experts in (8, 256, 1024)),
    *((launch_counts, *sizes) for sizes in ((8, 1, 2), (160, 5, 40), (512, 64, 512))),
]


@cache
def compiled(target: str, launch: Callable[..., list[Launch]], *args: object) -> tuple[Compiled]:
    return tuple(one.compile(TARGETS[target]) for one in launch(*args))


def every_kernel(target: str) -> Iterator[tuple[str, Compiled]]:
    for case in [*ROWS, *OTHERS]:
        for number, kernel in enumerate(compiled(target, *case)):
            yield f"{case[0].__name__}{case[1:]}, launch {number}", kernel


@pytest.mark.parametrize("target", TARGETS)
def test_no_spills_few_registers_and_no_atomics(target: str) -> None:
    for name, kernel in every_kernel(target):
        assert kernel.spilled_bytes == 0, name
        assert kernel.registers <= MOST_REGISTERS, f"{name}: {kernel.registers} registers"
        assert not re.search(r"\b(atom|red)\.", kernel.ptx), name


@pytest.mark.parametrize("target", TARGETS)
def test_rows_are_read_and_written_16_bytes_at_a_time(target: str) -> None:
    for case, (num_reads, num_writes) in ROWS.items():
        (kernel,) = compiled(target, *case)
        assert kernel.count(r"ld\.global\.v4\.b32") == num_reads, case
        assert kernel.count(r"st\.global\.v4\.b32") == num_writes, case
        # Numbers and probabilities are wider: no value of a row is read or written alone.
        assert case[1] == FLOAT32 or kernel.count(r"(ld|st)\.global\.\w*16") == 0, case


@pytest.mark.parametrize("target", TARGETS)
def test_sums_are_rounded_to_nearest_even(target: str) -> None:
    for dtype, narrowing in (
        (BFLOAT16, r"cvt\.rn\.bf16x2\.f32"),
        (FLOAT16, r"cvt\.rn\.f16x2\.f32"),
    ):
        hidden_size = next(
            size for launch, of, size in ROWS if (launch, of) == (launch_reduce, dtype)
        )
        (kernel,) = compiled(target, launch_reduce, dtype, hidden_size)
        # 16 values for each thread, two at a time.
        assert kernel.count(narrowing) == 8
        assert kernel.count(r"cvt\.r[nzmp]\w*\.(bf16|f16)\w*\.f32") == 8


def test_other_counts_and_sizes_compile_nothing() -> None:
    """Rows, copies and the widest list change in every micro-batch; compiling takes seconds."""
    variants = set()
    for topk, num_copies in ((1, 1), (8, 100), (16, 17), (23, 2**20)):
        copies = copies_of(num_copies, num_copies)
        # Neither ids nor index begin at a multiple of 16 bytes.
        ids = torch.empty(num_copies + 1, topk, dtype=torch.int32)[1:]
        index = torch.empty(num_copies + 1, dtype=torch.int64)[1:]
        before, after = (message(num_copies, BFLOAT16, 64, topk) for _ in range(2))
        with launches() as caught:
            find_copies(ids, Parts(first=topk, size=1, num_parts=8), copies)
            duplicate(before, copies, after)
            reduce(before, copies, after, torch.float32, index, first_unrounded=topk)
        for launch in caught:
            variants.add((launch.kernel.__name__, str(launch.variant(TARGETS["sm_90"]))))
    assert len(variants) == 4, "\n".join(map(str, sorted(variants)))
