"""Correctness before time: every candidate against stock, then bytes, repeats and their limit.

Each repeat runs every candidate once, in a rotated order, on the benchmark's own data.
"""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from monta_megatron.chains.program import PASSES, Phase
from monta_megatron.core import Layout
from monta_megatron.exchange.collectives import gather_objects, wait_for_all
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.tools.bench.candidates import Batch, Bench, BenchCandidate, run_candidate
from monta_megatron.tools.stock_collectives import sent_by

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
        results = run_candidate(integers, experts)
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


def run_counted(
    candidate: BenchCandidate, experts: Experts, phase: Phase, nodes: Sequence[int]
) -> tuple[int, int]:
    """Run a candidate once, as a warm-up, and count the payload that all ranks send together.

    Args:
        candidate, experts, phase: see `run_candidate`.
        nodes: node of every rank of the launch.

    Returns:
        Bytes between nodes, and between the ranks of a node.
    """
    run = partial(run_candidate, candidate, experts, phase)
    if candidate.kind == "megatron":
        sent_bytes: Mapping[Any, int] = sent_by(run, nodes)
    else:
        monitor = candidate.dispatcher.monitor
        monitor.bytes_sent.clear()
        run()
        sent_bytes = monitor.bytes_by_resource()
    totals = torch.tensor([sent_bytes["inter"], sent_bytes["intra"]])
    dist.all_reduce(totals)
    inter_bytes, intra_bytes = totals.tolist()
    return inter_bytes, intra_bytes


def time_interleaved(
    runs: Sequence[Callable[[], object]], repeats: int, on_repeat: Callable[[], None]
) -> NDArray[np.float64]:
    """[repeats, runs] time of the slowest rank in ms.

    Args:
        runs: one function per candidate, called by all ranks together.
        repeats: timed calls of each.
        on_repeat: called after each repeat.
    """
    times_ms = torch.zeros(repeats, len(runs), dtype=torch.float64)
    # No garbage is collected inside a run, and none of the objects that exist already.
    gc.freeze()
    gc.disable()
    try:
        for repeat in range(repeats):
            gc.collect()
            for offset in range(len(runs)):
                position = (offset + repeat) % len(runs)
                wait_for_all()
                start = time.perf_counter()
                runs[position]()
                torch.cuda.synchronize()
                times_ms[repeat, position] = (time.perf_counter() - start) * 1e3
            on_repeat()
    finally:
        gc.enable()
        gc.unfreeze()
    dist.all_reduce(times_ms, op=dist.ReduceOp.MAX)
    return times_ms.numpy()


def limit_ms(bench: Bench, phase: Phase) -> float | None:
    """The least time that the links between nodes allow; None if unknown or nothing crosses.

    The busiest direction of the busiest node decides. Every pass sends the same rows once, in
    alternating directions, so that node stays the busiest.
    """
    if bench.emulated is None:
        return None
    crossing = rows_that_cross(bench.layout, bench.batch.routing_map.cpu(), len(set(bench.nodes)))
    dist.all_reduce(crossing)
    row_bytes = len(PASSES[phase]) * bench.batch.hidden[0].nbytes
    # 1e6 bit/s are 1e3 bits per ms.
    return int(crossing.max()) * row_bytes * 8 / (bench.emulated.inter_mbit * 1e3) or None


def rows_that_cross(layout: Layout, map_TE: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """[2, nodes] tokens of this rank that leave each node, and that arrive there.

    A node needs a token, once, if one of its ranks holds an expert, or a part of one, of the token.
    """
    crossing = torch.zeros(2, num_nodes, dtype=torch.int64)
    node_by_part = torch.tensor(layout.nodes).view(layout.ep, layout.etp)
    # [T, E] -> [T, EP] tokens with an expert of that EP rank
    wanted = map_TE.view(len(map_TE), layout.ep, -1).any(dim=2)
    here = layout.nodes[layout.rank]
    for node in set(layout.nodes) - {here}:
        num_rows = wanted[:, (node_by_part == node).any(dim=1)].any(dim=1).sum()
        crossing[0, here] += num_rows
        crossing[1, node] += num_rows
    return crossing
