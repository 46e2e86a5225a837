#!/usr/bin/env python
"""The parts of `scripts/gpu_check.sh` that are Python.

python scripts/gpu_check.py kernels               compare and time the Triton kernels
torchrun ... scripts/gpu_check.py streams ARGS    `monta bench ARGS`, refusing waits of the host
"""

import sys
import time
import traceback
import warnings
from collections.abc import Callable

import torch

HIDDEN_SIZES = (4096, 7168, 1000)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_TOKENS, HIDDEN, NUM_EXPERTS, TOPK, NUM_RANKS = 4096, 4096, 64, 8, 8
REPEATS = 20
# Files in which the host must not wait for the device, but for the counts, by an event.
PASSES = "monta_megatron/exchange/"


def kernels() -> int:
    """Compare each kernel with PyTorch's operations; then time it beside a copy."""
    from monta_megatron.exchange.kernels.check import first_difference

    device, status = torch.device("cuda", 0), 0
    for dtype in DTYPES:
        for hidden_size in HIDDEN_SIZES:
            difference = first_difference(device, hidden_size, dtype)
            print(f"{dtype}, hidden size {hidden_size}: {difference or 'nothing differs'}")
            status = 1 if difference else status
    for name, (us, num_bytes) in _times(device).items():
        print(f"{name:24} {us:9.1f} us {num_bytes / us / 1e3:9.0f} GB/s")
    return status


def _times(device: torch.device) -> dict[str, tuple[float, int]]:
    """Median microseconds of each, and the bytes that it has to read and write at least."""
    from monta_megatron.chains.stages import ExpertRange
    from monta_megatron.exchange.copies import Copies
    from monta_megatron.exchange.kernels.count_routing import count_routing
    from monta_megatron.exchange.kernels.duplicate import duplicate
    from monta_megatron.exchange.kernels.expert_lists import expert_ids_of
    from monta_megatron.exchange.kernels.find_copies import find_copies
    from monta_megatron.exchange.kernels.reduce import reduce
    from monta_megatron.exchange.kernels.to_experts import to_experts
    from monta_megatron.exchange.payload import Columns

    probs = torch.rand(NUM_TOKENS, NUM_EXPERTS, device=device)
    routing_map = torch.zeros_like(probs, dtype=torch.bool)
    routing_map.scatter_(1, probs.topk(TOPK, dim=1).indices, True)
    lists, ids = expert_ids_of(routing_map, probs, TOPK)
    tokens = torch.randn(NUM_TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    row_bytes = HIDDEN * tokens.itemsize
    copies, messages = {}, {}
    for size in (NUM_EXPERTS // NUM_RANKS, 1):
        parts = ExpertRange(first=0, size=size, num_parts=NUM_EXPERTS // size)
        hits = routing_map.unflatten(1, (parts.num_parts, -1)).any(dim=2)
        copies[size] = Copies.empty(NUM_TOKENS, int(hits.sum()), parts, device), parts
        find_copies(ids, parts, copies[size][0])
        messages[size] = tokens.new_empty(len(copies[size][0].row), HIDDEN)
    (of_ranks, ranks), (of_experts, _) = copies.values()
    to_ranks, rows = messages.values()
    places = torch.randperm(len(rows), device=device)
    columns, summed = Columns(rows=tokens, probs=lists), torch.empty_like(tokens)
    counted = {"node": 2, "rank": NUM_RANKS}
    work: dict[str, tuple[Callable[[], object], int]] = {
        "copy (PyTorch)": (lambda: summed.copy_(tokens), 2 * tokens.nbytes),
        "count_routing": (
            lambda: count_routing(routing_map, 8, counted, True),
            routing_map.nbytes,
        ),
        "expert_lists": (
            lambda: expert_ids_of(routing_map, probs, TOPK),
            routing_map.nbytes + 3 * lists.nbytes,
        ),
        "find_copies": (
            lambda: find_copies(ids, ranks, of_ranks),
            2 * ids.nbytes + 3 * of_ranks.row.nbytes,
        ),
        "duplicate": (
            lambda: duplicate(Columns(rows=tokens), of_ranks, Columns(rows=to_ranks)),
            2 * len(to_ranks) * row_bytes,
        ),
        "to_experts": (
            lambda: to_experts(columns, of_experts, Columns(rows=rows), places),
            2 * len(rows) * row_bytes,
        ),
        "reduce": (
            lambda: reduce(Columns(rows=to_ranks), of_ranks, Columns(rows=summed), torch.float32),
            (len(to_ranks) + NUM_TOKENS) * row_bytes,
        ),
    }
    return {name: (_median_us(do), num_bytes) for name, (do, num_bytes) in work.items()}


def _median_us(do: Callable[[], object]) -> float:
    do()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
    for begin, end in events:
        begin.record()
        do()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) * 1e3 for begin, end in events)[REPEATS // 2]


def streams(arguments: list[str]) -> int:
    """Run `monta bench` and say where the exchange makes the host wait for the device.

    And whether NCCL tells of every collective that it has ended; see `exchange.time_limit`.
    """
    from monta_megatron.cli import main
    from monta_megatron.exchange.streams import device_time_limit

    places: dict[str, None] = {}

    def note(message: object, *_: object, **__: object) -> None:
        frames = [frame for frame in traceback.extract_stack() if PASSES in frame.filename]
        if "synchroniz" in str(message) and frames:
            places[f"{frames[-1].filename}:{frames[-1].lineno}"] = None

    warnings.simplefilter("always")
    warnings.showwarning = note  # type: ignore[assignment]
    torch.cuda.set_sync_debug_mode("warn")
    status = main(["bench", *arguments])
    for place in places:
        print(f"the host waits for the device: {place}")
    # NCCL's watchdog looks first, and then the thread that asks it.
    time.sleep(2.0)
    pending = list(device_time_limit().pending)
    for started in pending[:1]:
        print(f"of {len(pending)} collectives no end is known, first: {started}")
    return 1 if places or pending else status


if __name__ == "__main__":
    command, *rest = sys.argv[1:] or [""]
    if command not in ("kernels", "streams"):
        sys.exit(__doc__)
    sys.exit(kernels() if command == "kernels" else streams(rest))
