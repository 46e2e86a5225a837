"""Correctness before time: every candidate against stock, then interleaved repeats.

Each repeat runs every candidate once, in a rotated order, on the benchmark's own data.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from monta_megatron.chains import CHAINS
from monta_megatron.core import Layout
from monta_megatron.exchange.collectives import gather_objects
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.tools.bench.candidates import Batch, BenchCandidate, Passed, run_candidate
from monta_megatron.tools.joined_ranks import wait_for_all

# bf16: every hop that carries partial sums adds one rounding to the single one of an fp32 sum;
# errors of k independent roundings add up as sqrt(k). The margin covers the fp32 sums' own errors.
LOW_PRECISION_MARGIN = 1.05
# fp32: our error over stock's, which rounds after every addition.
FULL_PRECISION_FACTOR = 1.5
# Gradients of the probabilities are sums of ETP terms of one sign; summed in another order, they
# differ by a few eps.
PROBS_TOLERANCE_EPS = 8
# Baselines other than alltoall are Megatron's or plain collectives, which sum in the rows' dtype.
BASELINE_FACTOR = 16


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The expected sums, computed from the rounded outputs of the experts.

    Attributes:
        exact: [T, H] fp64.
        once: [T, H] summed in fp32 in the order of the experts, then rounded once.
    """

    exact: torch.Tensor
    once: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Results of stock alltoall, and the sums that they stand for.

    Attributes:
        passed: the results.
        output: the sums of the forward pass.
        gradient: those of the backward pass.
    """

    passed: Passed
    output: Reference
    gradient: Reference


def check_candidates(candidates: list[BenchCandidate], layout: Layout) -> list[str]:
    """One line for each difference of a candidate on any rank; the same list on every rank."""
    experts = weighted_experts(layout)
    baseline = next(candidate for candidate in candidates if candidate.is_baseline)
    batch = baseline.batch
    expected = Expected(
        passed=run_candidate(baseline, experts, backward=True),
        output=reference_sum(batch.hidden, batch, layout),
        gradient=reference_sum(batch.output_gradient, batch, layout),
    )
    return _of_all_ranks(
        [
            f"{candidate.name}: {line}"
            for candidate in candidates
            if candidate is not baseline
            for line in _differences(candidate, expected, experts, layout)
        ]
    )


def _differences(
    candidate: BenchCandidate, expected: Expected, experts: Experts, layout: Layout
) -> list[str]:
    passed, stock = run_candidate(candidate, experts, backward=True), expected.passed
    differences = _moved(candidate, passed, stock) if candidate.kind == "monta" else []
    exact = has_stocks_order(candidate, layout)
    for name, mine, theirs, reference in (
        ("output", passed.output, stock.output, expected.output),
        ("input gradient", passed.input_gradient, stock.input_gradient, expected.gradient),
    ):
        assert mine is not None and theirs is not None
        mine = mine[candidate.tokens_here]
        if exact:
            differences += [] if torch.equal(mine, theirs) else [f"{name} differs"]
        else:
            differences += _rounded(name, mine, theirs, reference, candidate, layout)
    return differences


def weighted_experts(layout: Layout) -> Experts:
    """Experts that scale a row by its probability and by a factor that differs between them.

    So a row at the wrong expert, or with another's probability, changes the output.
    """

    def compute(
        rows: torch.Tensor, tokens_per_expert: torch.Tensor, row_probs: torch.Tensor
    ) -> torch.Tensor:
        local = torch.arange(layout.num_local_experts) + layout.first_expert
        factors = expert_factor(local, layout.rank % layout.etp)
        by_row = factors.repeat_interleave(torch.as_tensor(tokens_per_expert).cpu())
        return (rows * (row_probs * by_row.to(rows.device))[:, None]).to(rows.dtype)

    return compute


def expert_factor(experts: torch.Tensor, etp_rank: int) -> torch.Tensor:
    """A factor between 1 and 2 for the part of each expert on one of its ranks."""
    return 1 + ((7 * experts + 3 * etp_rank) % 16).float() / 16


def reference_sum(rows: torch.Tensor, batch: Batch, layout: Layout) -> Reference:
    """The sum, over experts and their parts, of the outputs of `weighted_experts` for these rows.

    Its backward pass scales gradients by the same factors, so this serves both directions.

    Args:
        rows: [T, 1, H] hidden states, or gradients of the output.
    """
    tokens = rows.flatten(0, 1)  # [T, H]
    ids = _experts_of_tokens(batch.routing_map)  # [T, k]
    exact = tokens.new_zeros(tokens.shape, dtype=torch.float64)
    once = tokens.new_zeros(tokens.shape, dtype=torch.float32)
    for slot in range(ids.shape[1]):
        chosen = ids[:, slot, None]
        for etp_rank in range(layout.etp):
            factors = expert_factor(chosen.cpu(), etp_rank).to(tokens.device)
            term = (tokens * (batch.probs.gather(1, chosen) * factors)).to(tokens.dtype)
            exact += term
            once += term
    return Reference(exact=exact, once=once.to(tokens.dtype))


def has_stocks_order(candidate: BenchCandidate, layout: Layout) -> bool:
    """Whether sums must be taken in stock alltoall's order, and so be bitwise equal to its own."""
    return candidate.kind == "monta" and layout.etp <= 2 and candidate.rows == "permuted tokens"


def num_partial_hops(candidate: BenchCandidate, layout: Layout) -> int:
    """Number of exchanges that carry partial sums, each rounded to the rows' dtype."""
    if candidate.rows == "permuted tokens":
        return int(layout.etp > 1)
    return len(CHAINS[candidate.dispatcher.choice.chain].groups)


def error_bound(dtype: torch.dtype, num_hops: int, once_rms: float, stock_rms: float) -> float:
    """The largest rms error that a sum may have.

    Args:
        dtype: dtype of the rows.
        num_hops: number of exchanges that carry partial sums.
        once_rms: rms error of the fp32 sum that is rounded once.
        stock_rms: rms error of stock alltoall's sum.
    """
    if dtype == torch.float32:
        return FULL_PRECISION_FACTOR * stock_rms
    return LOW_PRECISION_MARGIN * math.sqrt(1 + num_hops) * once_rms


def _moved(candidate: BenchCandidate, passed: Passed, expected: Passed) -> list[str]:
    """Differences from stock: bitwise, but for the probabilities' gradient."""
    assert passed.probs_gradient is not None and expected.probs_gradient is not None
    # Those of a chunk lie in an order of their own.
    differences = (
        []
        if candidate.experts_pipelined
        else [
            f"{name} differ from stock's"
            for name, mine, theirs in (
                ("rows at the experts", passed.expert_rows, expected.expert_rows),
                ("counts at the experts", passed.tokens_per_expert, expected.tokens_per_expert),
                ("probabilities at the experts", passed.row_probs, expected.row_probs),
            )
            if not torch.equal(mine, theirs)
        ]
    )
    difference = (passed.probs_gradient - expected.probs_gradient).abs()
    largest = PROBS_TOLERANCE_EPS * torch.finfo(difference.dtype).eps
    # A NaN compares as a difference.
    if not (difference <= largest * expected.probs_gradient.abs()).all():
        differences.append(f"gradient of the probabilities is off by up to {difference.max():.3g}")
    return differences


def _rounded(
    name: str,
    mine: torch.Tensor,
    theirs: torch.Tensor,
    reference: Reference,
    candidate: BenchCandidate,
    layout: Layout,
) -> list[str]:
    """A line if the rms error of a sum, over all ranks, is above its bound."""
    errors = torch.stack(
        [
            (rows.reshape(reference.exact.shape).double() - reference.exact).square().sum().cpu()
            for rows in (mine, theirs, reference.once)
        ]
    )
    count = torch.tensor([float(reference.exact.numel())], dtype=torch.float64)
    totals = torch.cat([errors, count])
    dist.all_reduce(totals)
    mine_rms, stock_rms, once_rms = (totals[:3] / totals[3]).sqrt().tolist()
    if candidate.kind == "monta":
        num_hops = num_partial_hops(candidate, layout)
        bound = error_bound(mine.dtype, num_hops, once_rms, stock_rms)
    else:
        bound = BASELINE_FACTOR * max(stock_rms, once_rms)
    if mine_rms <= bound:
        return []
    return [
        f"rms error of the {name} is {mine_rms:.3g}, above {bound:.3g} (stock alltoall "
        f"{stock_rms:.3g}, one rounding {once_rms:.3g})"
    ]


def _experts_of_tokens(routing_map: torch.Tensor) -> torch.Tensor:
    """[T, E] -> [T, k] ascending; every token has as many experts as the first."""
    topk = int(routing_map[0].sum())
    return routing_map.nonzero()[:, 1].view(-1, topk)


def _of_all_ranks(lines_here: list[str]) -> list[str]:
    """The distinct lines of all ranks, with the ranks that have it."""
    ranks_by_line: dict[str, list[int]] = {}
    for rank, lines in enumerate(gather_objects(lines_here)):
        for line in lines:
            ranks_by_line.setdefault(line, []).append(rank)
    return [f"{line} (rank {', '.join(map(str, ranks))})" for line, ranks in ranks_by_line.items()]


@dataclass(frozen=True, kw_only=True)
class Timings:
    """The times of all candidates.

    Attributes:
        times_ms: [repeats, candidates] time of the slowest rank.
        nic_bytes: [candidates] mean bytes that the NICs sent per run, summed over nodes.
    """

    times_ms: NDArray[np.float64]
    nic_bytes: NDArray[np.float64]


def time_interleaved(
    runs: Sequence[Callable[[], object]],
    repeats: int,
    warmup: int,
    read_sent_bytes: Callable[[], int],
    on_repeat: Callable[[], None] = lambda: None,
) -> Timings:
    """Time `runs` side by side.

    Args:
        runs: one function per candidate, called by all ranks together.
        repeats: timed calls of each.
        warmup: untimed calls of each before those.
        read_sent_bytes: bytes sent so far by the NICs that this rank reads, 0 if it reads none.
        on_repeat: called after each repeat, warm-up included.
    """
    num_runs = len(runs)
    times_ms: NDArray[np.float64] = np.zeros((repeats, num_runs))
    sent_bytes: NDArray[np.float64] = np.zeros(num_runs)
    with _garbage_collected_between_repeats():
        for repeat in range(-warmup, repeats):
            gc.collect()
            for turn in range(num_runs):
                position = (turn + repeat) % num_runs
                # The NICs are read while no rank sends: after one barrier, before another.
                wait_for_all()
                sent_before_bytes = read_sent_bytes()
                wait_for_all()
                start = time.perf_counter()
                runs[position]()
                torch.cuda.synchronize()
                elapsed_s = time.perf_counter() - start
                wait_for_all()
                if repeat >= 0:
                    times_ms[repeat, position] = elapsed_s * 1e3
                    sent_bytes[position] += read_sent_bytes() - sent_before_bytes
            on_repeat()

    slowest_ms, all_sent_bytes = torch.from_numpy(times_ms), torch.from_numpy(sent_bytes)
    dist.all_reduce(slowest_ms, op=dist.ReduceOp.MAX)
    dist.all_reduce(all_sent_bytes)
    return Timings(times_ms=slowest_ms.numpy(), nic_bytes=all_sent_bytes.numpy() / repeats)


@contextmanager
def _garbage_collected_between_repeats() -> Iterator[None]:
    """No collection inside a run, and none of the objects that exist already."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
