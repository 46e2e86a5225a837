"""Correctness before time: every candidate against stock, then interleaved repeats.

Each repeat runs every candidate once, in a rotated order, on the benchmark's own data.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from monta_megatron.core import Layout
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.tools.bench.candidates import Batch, BenchCandidate, run_candidate
from monta_megatron.tools.joined_ranks import wait_for_all

# Columns after which the signs of `signed_experts` repeat: those of 1,024 parts differ.
SIGN_BITS = 10


def differences_from_stock(candidates: Sequence[BenchCandidate], layout: Layout) -> list[str]:
    """One line for each result that is not equal to the first candidate's, the same on every rank.

    Rows are -1, 0 or 1, probabilities 1 or 2, and experts multiply by 1 or -1: every sum is a small
    integer, exact in any order and any dtype (see `settings.MOST_TERMS`), so all results must be
    equal to the last bit.
    """
    experts = signed_experts(layout)
    lines_here = []
    expected: dict[str, torch.Tensor] = {}
    for candidate in candidates:
        integers = replace(candidate, batch=as_integers(candidate.batch))
        results = run_candidate(integers, experts, backward=True)
        expected = expected or results
        # Stock's dispatchers may have other rows at the experts.
        names = [name for name in results if candidate.kind == "monta" or "experts" not in name]
        lines_here += [
            f"{candidate.kind} {' x'.join(map(str, candidate.key))}: {name} differ from stock's"
            for name in names
            if not torch.equal(results[name][candidate.tokens_here], expected[name])
        ]
    ranks_by_line: dict[str, list[int]] = {}
    for rank, lines in enumerate(gather_objects(lines_here)):
        for line in lines:
            ranks_by_line.setdefault(line, []).append(rank)
    return [f"{line} (rank {', '.join(map(str, ranks))})" for line, ranks in ranks_by_line.items()]


def as_integers(batch: Batch) -> Batch:
    """A batch of the same routing, of small integers."""
    shares = batch.probs * batch.routing_map.sum(dim=1, keepdim=True)
    return replace(
        batch,
        hidden=batch.hidden.round().sign(),
        probs=batch.routing_map * (1.0 + (shares > 1)),
        output_gradient=batch.output_gradient.round().sign(),
    )


def signed_experts(layout: Layout) -> Experts:
    """Experts that scale a row by its probability, and each column by a sign of their own.

    Each rank's part of an expert has the signs of its number's bits, so a row at the wrong expert,
    or with another's probability, changes the output.
    """

    def compute(
        rows: torch.Tensor, tokens_per_expert: torch.Tensor, row_probs: torch.Tensor
    ) -> torch.Tensor:
        experts = torch.arange(layout.num_local_experts) + layout.first_expert
        parts = experts * layout.etp + layout.rank % layout.etp
        # [L, 1] -> [L, H]
        bits = parts[:, None] >> (torch.arange(rows.shape[1]) % SIGN_BITS) & 1
        # [L, H] -> [N, H]
        signs = (1 - 2 * bits).repeat_interleave(torch.as_tensor(tokens_per_expert).cpu(), dim=0)
        return (rows * row_probs[:, None] * signs.to(rows.device)).to(rows.dtype)

    return compute


def time_interleaved(
    runs: Sequence[Callable[[], object]],
    repeats: int,
    warmup: int,
    on_repeat: Callable[[], None] = lambda: None,
) -> NDArray[np.float64]:
    """[repeats, runs] time of the slowest rank in ms.

    Args:
        runs: one function per candidate, called by all ranks together.
        repeats: timed calls of each.
        warmup: untimed calls of each before those.
        on_repeat: called after each repeat, warm-up included.
    """
    times_ms = torch.zeros(repeats, len(runs), dtype=torch.float64)
    # No garbage is collected inside a run, and none of the objects that exist already.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for repeat in range(-warmup, repeats):
            gc.collect()
            for offset in range(len(runs)):
                position = (offset + repeat) % len(runs)
                wait_for_all()
                start = time.perf_counter()
                runs[position]()
                torch.cuda.synchronize()
                if repeat >= 0:
                    times_ms[repeat, position] = (time.perf_counter() - start) * 1e3
            on_repeat()
    finally:
        gc.enable()
        gc.unfreeze()
    dist.all_reduce(times_ms, op=dist.ReduceOp.MAX)
    return times_ms.numpy()
