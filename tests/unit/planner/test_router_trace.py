"""Megatron's router traces: what is read, and that it is replayed as it was."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from clusters import CONFIGS, layout_of

from monta_megatron.chains import CHAINS, TokenCounts
from monta_megatron.common import strict_yaml
from monta_megatron.planner.models.model import Model
from monta_megatron.planner.routing import recorded
from monta_megatron.planner.routing.recorded import (
    Exchange,
    read_trace,
    router_of,
    traced_routing,
    typical_exchange,
)


def write_trace(folder: Path, rank: int, records: list[dict[str, object]]) -> None:
    lines = [json.dumps({"step": 0, "rank": rank, **record}) for record in records]
    (folder / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines) + "\n")


def model_of(topk: int) -> Model:
    """A model of 4 experts and 2 layers."""
    model = strict_yaml.load(Model, CONFIGS / "models" / "quickstart.yaml")
    return replace(model, num_experts=4, moe_router_topk=topk)


def experts_of(exchange: Exchange) -> list[list[list[int]]]:
    """[rank][token] its experts."""
    return [[np.flatnonzero(row).tolist() for row in rows] for rows in exchange]


def top1(layer: int, *experts: int) -> dict[str, object]:
    return {"layer": layer, "top_indices": [[expert] for expert in experts]}


def test_lines_are_replayed_as_exchanges(tmp_path: Path) -> None:
    """Two ranks, two layers, two steps, two tokens in each line."""
    router = router_of(model_of(topk=1))
    write_trace(tmp_path, 0, [top1(1, 0, 1), top1(2, 2, 3), top1(1, 0, 0), top1(2, 3, 3)])
    write_trace(tmp_path, 1, [top1(1, 2, 2), top1(2, 1, 1), top1(1, 1, 1), top1(2, 0, 0)])
    trace = read_trace(str(tmp_path), router, 2)
    assert [experts_of(exchange) for exchange in trace.exchanges(2, 2)] == [
        [[[0], [1]], [[2], [2]]],
        [[[2], [3]], [[1], [1]]],
        [[[0], [0]], [[1], [1]]],
        [[[3], [3]], [[0], [0]]],
    ]
    assert trace.name(2, 2) == f"trace {tmp_path}"
    # Three tokens: layer 1 of both steps, cut there. A rank without a file is as one that has one.
    assert [experts_of(exchange) for exchange in trace.exchanges(3, 3)] == [
        [[[0], [1], [0]], [[2], [2], [1]], [[0], [1], [0]]],
        [[[2], [3], [3]], [[1], [1], [0]], [[2], [3], [3]]],
    ]
    # Five: the rows of a layer come again.
    (first, _) = trace.exchanges(1, 5)
    assert experts_of(first) == [[[0], [1], [0], [0], [0]]]
    assert trace.name(3, 5) == (
        f"trace {tmp_path} (2 of 3 ranks traced, the others as those; 4 tokens of a layer, "
        "repeated)"
    )


def test_what_the_mean_of_a_trace_would_lose(tmp_path: Path) -> None:
    """Every rank wants one expert in each layer; over layers and ranks, all experts get as many."""
    router = router_of(model_of(topk=1))
    write_trace(tmp_path, 0, [top1(layer, *[layer] * 8) for layer in (0, 1)])
    write_trace(tmp_path, 1, [top1(layer, *[layer + 2] * 8) for layer in (0, 1)])
    trace = read_trace(str(tmp_path), router, 8)
    for exchange in trace.exchanges(2, 8):
        loads = sum(rows.sum(axis=0) for rows in exchange)
        assert np.sort(loads).tolist() == [0, 0, 8, 8]


def test_a_plan_is_for_the_ranks_own_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of one rank: rank 0 sends 3 of 4 tokens to node 1, rank 1 none to node 0."""
    monkeypatch.setattr(recorded, "LEAST_CHOICES", 1)
    first = {"layer": 1, "top_indices": [[0, 1], [0, 2], [2, 3], [1, 3]]}
    write_trace(tmp_path, 0, [first])
    write_trace(tmp_path, 1, [{"layer": 1, "top_indices": [[2, 3]] * 4}])
    routing = traced_routing(tmp_path, model_of(topk=2), 4, num_ranks=2, ep=2)
    layout = layout_of(ep=2, etp=1, ranks_per_node=1, num_experts=4)
    for rank, sent in enumerate([[[3, 3]], [[0, 4]]]):
        counts = routing.counts(
            CHAINS["hierarchical_alltoall"], replace(layout, rank=rank), 4, num_blocks=1
        )
        assert isinstance(counts, TokenCounts)
        assert counts.sent_to_nodes is not None
        assert counts.sent_to_nodes.tolist() == sent


def test_the_exchange_in_the_middle_is_planned_for() -> None:
    # Tokens for expert 0 of two experts, of 4 tokens from each of two ranks: 8, 4, 6 and 5.
    def rows(num_first: int) -> np.ndarray:
        return np.eye(2, dtype=bool)[[0] * num_first + [1] * (4 - num_first)]

    exchanges = [(rows(4), rows(4)), (rows(2), rows(2)), (rows(3), rows(3)), (rows(4), rows(1))]
    assert typical_exchange(exchanges, num_ranks=2, ep=2) is exchanges[3]
    assert typical_exchange(exchanges[:1], num_ranks=2, ep=2) is exchanges[0]
    # Four ranks with the rows of two: the first and third are alike.
    assert typical_exchange(exchanges[:3], num_ranks=4, ep=2) is exchanges[2]


def test_the_rest_of_a_long_trace_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorded, "MAX_TOKENS_PER_FILE", 2)
    monkeypatch.setattr(recorded, "LEAST_CHOICES", 0.5)
    write_trace(tmp_path, 0, [top1(1, 0, 1), top1(1, 2)])
    assert read_trace(str(tmp_path), router_of(model_of(topk=1)), 2).num_tokens == 2


@pytest.mark.parametrize(
    ("target", "reason"), [("nowhere", "No such file or directory"), (".", "Is a directory")]
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, target: str, reason: str) -> None:
    path = tmp_path / "router_trace_rank0.jsonl"
    path.symlink_to(target)
    with pytest.raises(ValueError) as error:
        read_trace(str(tmp_path), router_of(model_of(topk=1)), 8)
    assert str(error.value) == f"{path}: cannot be read: {reason}; must be a file of the tracer"
