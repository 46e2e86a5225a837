"""The integers on which `monta bench` compares all results with stock's, without a launch."""

from dataclasses import replace

import torch
from test_bench_numbers import BASE, SPLIT

from monta_megatron.tools.bench import measure
from monta_megatron.tools.bench.candidates import make_batch
from monta_megatron.tools.bench.settings import parse_settings


def test_sums_of_the_check_are_exact_in_bf16() -> None:
    """Top-16, in 8 parts each: partial sums stay below 256, where bf16 has every integer."""
    flags = {**BASE, "experts": "64", "top_k": "16", "tokens": "64"}
    batch = measure.as_integers(make_batch(parse_settings(flags, 4), 0, torch.device("cpu")))
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
