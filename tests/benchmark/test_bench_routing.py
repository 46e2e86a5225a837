"""The rows that a benchmark runs, exchange by exchange, and that the planner expects these."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_bench_numbers import BASE, FLAT

from monta_megatron.chains import CHAINS, Counts
from monta_megatron.planner.routing.drawn import imbalance_map
from monta_megatron.planner.routing.names import IMBALANCE_WORKLOADS
from monta_megatron.tools.bench.settings import Settings, parse_settings
from monta_megatron.tools.bench.traffic import (
    check_routing,
    exchange_of,
    routing_maps,
    routing_name,
    routing_of,
)

RANKS = 4


def settings_of(**flags: object) -> Settings:
    return parse_settings({**BASE, "tp": 1, "repeats": 10, **flags}, RANKS)


def write_trace(folder: Path, topk: int = 2) -> None:
    """Two steps of one layer, 8 tokens each: in step s, rank r wants the experts from r + s on."""
    for rank in range(RANKS):
        lines = [
            json.dumps(
                {"layer": 1, "top_indices": [[(rank + step + k) % 8 for k in range(topk)]] * 8}
            )
            for step in (0, 1)
        ]
        (folder / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("name", IMBALANCE_WORKLOADS)
def test_every_rank_brings_the_rows_of_the_step(name: str) -> None:
    settings = settings_of(routing=name)
    by_rank = [routing_maps(settings, FLAT, rank) for rank in range(RANKS)]
    assert len(by_rank[0]) == {"W6": 5, "W7": 4}.get(name, 1)
    shape = (settings.tokens, settings.num_experts, settings.topk, settings.seed)
    for step, rows in enumerate(by_rank[0]):
        assert np.array_equal(rows, imbalance_map(name, *shape, step))
        for of_rank in by_rank:
            assert of_rank[step] is rows
    assert routing_name(settings) == IMBALANCE_WORKLOADS[name]


def test_the_best_is_chosen_and_judged_on_the_same_exchanges() -> None:
    """Every fourth step of W7 has a burst: 3 of 12, in either half of 24 repeats."""
    settings = settings_of(routing="W7", repeats=24)
    num_exchanges = len(routing_maps(settings, FLAT, 0))
    run = [exchange_of(repeat) for repeat in range(settings.repeats)]
    assert run[0::2] == run[1::2] == list(range(12))
    assert [exchange % num_exchanges for exchange in run[0::2]].count(3) == 3
    # The warm-up runs exchanges too.
    assert exchange_of(-1) == -1


@pytest.mark.parametrize("name", IMBALANCE_WORKLOADS)
def test_the_planner_expects_the_rows_that_are_run(name: str) -> None:
    """Exactly: token-expert pairs from every rank to every expert."""
    settings = settings_of(routing=name)
    run = [rows.sum(axis=0) for rows in routing_maps(settings, FLAT, 0)]
    routing = routing_of(settings, FLAT)
    for rank in range(RANKS):
        layout = replace(FLAT, rank=rank)
        counts = routing.counts(CHAINS["alltoall"], layout, settings.tokens, 1)
        assert isinstance(counts, Counts)
        assert any(np.array_equal(counts.sent.reshape(-1), pairs) for pairs in run)


def test_a_trace_is_run_step_by_step_with_each_ranks_rows(tmp_path: Path) -> None:
    write_trace(tmp_path)
    settings = settings_of(routing=str(tmp_path), tokens=8)
    check_routing(settings)
    for rank in range(RANKS):
        first, second = routing_maps(settings, FLAT, rank)
        for step, rows in enumerate((first, second)):
            assert rows.sum(axis=0).nonzero()[0].tolist() == [rank + step, rank + step + 1]
    # The busiest rank of step 0 holds experts 2 and 3 of the four that are wanted, as in step 1.
    counts = routing_of(settings, FLAT).counts(CHAINS["alltoall"], FLAT, 8, 1)
    assert isinstance(counts, Counts)
    assert counts.sent.tolist() == [[8, 8], [0, 0], [0, 0], [0, 0]]
    assert routing_name(settings) == f"trace {tmp_path}, 2 exchanges"
    # Two repeats run one exchange; 20 tokens are more than a layer has.
    assert len(routing_maps(settings_of(routing=str(tmp_path), tokens=8, repeats=2), FLAT, 0)) == 1
    longer = settings_of(routing=str(tmp_path), tokens=20)
    (rows,) = routing_maps(longer, FLAT, 0)
    assert [np.flatnonzero(row)[0] for row in rows] == [0] * 8 + [1] * 8 + [0] * 4
    assert routing_name(longer).endswith("(16 tokens of a layer, repeated), 1 exchange")


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ({"top_k": 3}, "line 1: topk: got 2, must be 3, --top-k of this benchmark"),
        ({"experts": 4}, "line 1: top_indices: must be a list of experts from 0 to 3"),
    ],
)
def test_a_trace_has_to_fit_the_flags(flags: dict[str, object], rule: str, tmp_path: Path) -> None:
    write_trace(tmp_path)
    for rank in (0, 1, 2):
        (tmp_path / f"router_trace_rank{rank}.jsonl").unlink()
    with pytest.raises(ValueError, match=rule) as error:
        check_routing(settings_of(routing=str(tmp_path), **flags))
    assert "\n" not in str(error.value)
