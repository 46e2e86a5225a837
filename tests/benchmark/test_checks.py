"""Comparison with stock on integers, without a launch."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_bench_numbers import BASE, SPLIT

from monta_megatron.core import Choice
from monta_megatron.planner.choose import STOCK
from monta_megatron.tools.bench import measure
from monta_megatron.tools.bench.candidates import BenchCandidate, make_batch
from monta_megatron.tools.bench.settings import parse_settings

Results = dict[str, torch.Tensor]
CPU = torch.device("cpu")


def lines_of(
    monkeypatch: pytest.MonkeyPatch, chain: str, change: Callable[[Results], Results]
) -> list[str]:
    """Lines of a candidate whose results are stock's but for `change`."""

    def run(candidate: BenchCandidate, experts: Any) -> Results:
        results = {"rows at the experts": torch.ones(2, 4), "outputs": candidate.batch.hidden}
        return results if candidate.choice == STOCK else change(results)

    monkeypatch.setattr(measure, "run_candidate", run)
    # Rank 1 sees no difference.
    monkeypatch.setattr(measure, "gather_objects", lambda lines: [lines, [], lines])
    stock = BenchCandidate(
        kind="megatron",
        requested=STOCK,
        dispatcher=None,
        batch=make_batch(parse_settings(BASE, 4), 0, CPU),
    )
    kind: Any = "megatron" if chain == "allgather" else "monta"
    other = replace(stock, kind=kind, requested=Choice(chain=chain, num_chunks=4))
    return measure.differences_from_stock([stock, other], SPLIT)


@pytest.mark.parametrize("factor", [1.0, 2.0, math.nan])
def test_every_difference_is_a_line_with_its_ranks(
    monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    def change(results: Results) -> Results:
        return {name: tensor * factor for name, tensor in results.items()}

    lines = [
        f"monta alltoall_dedup in 4 chunks: {name} differ from stock's (rank 0, 2)"
        for name in ("rows at the experts", "outputs")
    ]
    assert lines_of(monkeypatch, "alltoall_dedup", change) == (lines if factor != 1 else [])


def test_stocks_allgather_may_have_other_rows_at_the_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change(results: Results) -> Results:
        return results | {"rows at the experts": torch.zeros(1)}

    assert lines_of(monkeypatch, "allgather", change) == []


def test_sums_of_the_check_are_exact_in_bf16() -> None:
    """Top-16, in 8 parts each: partial sums stay below 256, where bf16 has every integer."""
    flags = {**BASE, "experts": "64", "top_k": "16", "tokens": "64"}
    batch = measure.as_integers(make_batch(parse_settings(flags, 4), 0, CPU))
    assert set(batch.hidden.unique().tolist()) == {-1, 0, 1}
    assert set(batch.probs.unique().tolist()) == {0, 1, 2}
    assert torch.equal(batch.probs > 0, batch.routing_map)
    # Rows by expert, tokens ascending.
    expert, token = batch.routing_map.T.nonzero(as_tuple=True)
    total = torch.zeros(64, 16)
    for rank in range(8):
        layout = replace(SPLIT, ep=1, etp=8, num_local_experts=64, rank=rank, nodes=(0,) * 8)
        experts = measure.signed_experts(layout)
        rows = experts(
            batch.hidden[token, 0], batch.routing_map.sum(dim=0), batch.probs[token, expert]
        )
        total.index_add_(0, token, rows)
        assert total.abs().max() <= 256
    assert total.unique().numel() > 20


def test_each_part_of_an_expert_has_signs_of_its_own() -> None:
    signs = set()
    for rank in range(4):
        experts = measure.signed_experts(replace(SPLIT, rank=rank))
        rows = experts(torch.ones(4, 16), torch.ones(4, dtype=torch.long), torch.ones(4))
        signs |= set(map(tuple, rows.tolist()))
    # 8 experts of 2 parts.
    assert len(signs) == 16
