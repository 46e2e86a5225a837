"""Kernels compiled for GPUs of three generations, without one: what the assembler says of them."""

import re
from functools import cache

import pytest
import torch

pytest.importorskip("triton", reason="triton, which comes with torch's GPU wheels")

from compiled_kernels import TARGETS, Compiled, launches
from fake_world import empty_copies, format_of

from monta_megatron.chains.stages import Parts
from monta_megatron.exchange.buffers import Columns
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
    payload = format_of([rows, *lists], packed=True)
    return payload.columns(payload.allocate(num_rows))


def copies_of(num_rows: int = NUM_ROWS, num_copies: int = NUM_COPIES) -> Copies:
    """Copies for one expert each, of no values."""
    one = Parts(first=0, size=1, num_parts=1)
    return empty_copies(num_rows, num_copies, one, torch.device("cpu"))


def run_on_rows(kernel: str, dtype: torch.dtype, hidden_size: int) -> None:
    """A kernel over rows of that dtype and size, which are in packed messages."""
    rows, of_copies, terms = (
        message(number, dtype, hidden_size) for number in (NUM_ROWS, NUM_COPIES, 4 * NUM_ROWS)
    )
    copies, index = copies_of(), torch.arange(NUM_COPIES)
    is_rounded = dtype != torch.float32
    unrounded = torch.empty(NUM_ROWS, hidden_size) if is_rounded else None
    if kernel == "duplicate":
        duplicate(rows, copies, of_copies)
    elif kernel == "duplicate messages":
        duplicate(Columns(rows.rows), copies, Columns(of_copies.rows))
    elif kernel == "duplicate per expert":
        into = torch.empty(NUM_COPIES, hidden_size, dtype=dtype), torch.empty(NUM_COPIES)
        duplicate(rows, copies, Columns(*into), index)
    elif kernel == "reduce":
        of_rank = None if unrounded is None else unrounded[:10]
        reduce(of_copies, copies, rows, torch.float32, index, of_rank, 3)
    else:
        reduce_ranks(terms, rows, torch.float32, 2, unrounded, 1)


def run_on_maps(kernel: str, num_experts: int, *num_parts: int) -> None:
    """A kernel over lists of experts, or a routing map."""
    routing_map = torch.empty(4096, num_experts, dtype=torch.bool)
    if kernel == "find":
        ids = torch.empty(NUM_ROWS, TOPK, dtype=torch.int32)
        find_copies(ids, Parts(first=0, size=1, num_parts=num_experts), copies_of())
    elif kernel == "lists":
        probs = torch.empty(routing_map.shape, requires_grad=True)
        lists, _ = expert_ids_of(routing_map, probs, TOPK, fused=True)
        lists.backward(torch.empty_like(lists))
    else:
        parts = dict(zip(("node", "rank"), num_parts, strict=True))
        count_routing(routing_map, 8, parts, True)


# By kernel, dtype and H: how many reads and writes of 16 bytes each thread makes for the rows of a
# tile.
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
ROWS: dict[tuple[str, torch.dtype, int], tuple[int, int]] = {
    ("duplicate", BFLOAT16, 4096): (4, 4),
    ("duplicate", FLOAT32, 4096): (4, 4),
    ("duplicate", BFLOAT16, 64): (4, 4),
    ("duplicate messages", torch.uint8, 2 * 4096 + 64): (4, 4),
    ("duplicate per expert", BFLOAT16, 7168): (4, 4),
    ("duplicate per expert", FLOAT32, 64): (4, 4),
    # A value that is kept unrounded takes twice the bytes.
    ("reduce", BFLOAT16, 7168): (2, 2 + 4),
    ("reduce", FLOAT16, 4096): (2, 2 + 4),
    ("reduce", FLOAT32, 4096): (2, 2),
    ("reduce", BFLOAT16, 64): (1, 1 + 2),
    # In turn the parts, and the one that was not rounded.
    ("reduce_ranks", BFLOAT16, 4096): (1 + 2, 1),
    ("reduce_ranks", FLOAT32, 4096): (1, 1),
}
MAPS: list[tuple[object, ...]] = [
    *(("find", num_parts) for num_parts in (2, 8, 64, 512)),
    *(("lists", num_experts) for num_experts in (8, 256, 1024)),
    *(("count", *sizes) for sizes in ((8, 1, 2), (160, 5, 40), (512, 64, 512))),
]


@cache
def compiled(target: str, *case: object) -> tuple[Compiled, ...]:
    """What a case launches, compiled."""
    with launches() as caught:
        (run_on_rows if case in ROWS else run_on_maps)(*case)
    return tuple(one.compile(TARGETS[target]) for one in caught)


@pytest.mark.parametrize("target", TARGETS)
def test_no_spills_few_registers_and_no_atomics(target: str) -> None:
    for case in (*ROWS, *MAPS):
        for kernel in compiled(target, *case):
            assert kernel.spilled_bytes == 0, case
            assert kernel.registers <= MOST_REGISTERS, f"{case}: {kernel.registers} registers"
            assert not re.search(r"\b(atom|red)\.", kernel.ptx), case


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
    for dtype, hidden_size, narrowing in (
        (BFLOAT16, 7168, r"cvt\.rn\.bf16x2\.f32"),
        (FLOAT16, 4096, r"cvt\.rn\.f16x2\.f32"),
    ):
        (kernel,) = compiled(target, "reduce", dtype, hidden_size)
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
