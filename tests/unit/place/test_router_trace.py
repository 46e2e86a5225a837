"""Megatron's router traces: what is read of them, layer by layer."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from monta_megatron.planner.models.files import load_model
from monta_megatron.planner.models.model import Model
from monta_megatron.tools.place import trace
from monta_megatron.tools.place.trace import read_layers, read_trace

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def write_trace(folder: Path, rank: int, records: list[dict[str, object]]) -> None:
    lines = [json.dumps({"step": 0, "rank": rank, **record}) for record in records]
    (folder / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def model() -> Model:
    """Top-1 of 4 experts in 2 layers."""
    model = load_model(CONFIGS / "models" / "quickstart.yaml")
    return replace(model, num_experts=4, moe_router_topk=1, num_layers=2, moe_layers=(True, True))


def experts_of(rows: NDArray[np.bool_]) -> list[int]:
    """[N] the one expert of each token."""
    return rows.argmax(axis=1).tolist()


def top1(layer: int, *experts: int) -> dict[str, object]:
    return {"layer": layer, "top_indices": [[expert] for expert in experts]}


def test_the_rows_of_a_layer_follow_each_other(tmp_path: Path, model: Model) -> None:
    """Two ranks, two layers, two steps; the layers are counted from 1."""
    write_trace(tmp_path, 0, [top1(1, 0, 1), top1(2, 2, 3), top1(1, 0, 0), top1(2, 3, 3)])
    write_trace(tmp_path, 1, [top1(1, 2, 2), top1(2, 1, 1), top1(1, 1, 1), top1(2, 0, 0)])
    read = read_trace(str(tmp_path), model, 1, 8)
    layers = trace.traced_layers(str(tmp_path), read, model, 1)
    assert {layer: list(map(experts_of, rows)) for layer, rows in layers.items()} == {
        0: [[0, 1, 0, 0], [2, 2, 1, 1]],
        1: [[2, 3, 3, 3], [1, 1, 0, 0]],
    }


def test_the_last_tokens_of_every_rank_are_held_out(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "LEAST_CHOICES", 1)
    for rank in (0, 1):
        write_trace(tmp_path, rank, [top1(layer, 0, 1, 2, rank) for layer in (1, 2)])
    training, held_out = read_layers(str(tmp_path), model, 1)[1]
    assert (experts_of(training), experts_of(held_out)) == ([0, 1, 2] * 2, [0, 1])
    monkeypatch.setattr(trace, "LEAST_CHOICES", 2)
    rule = "layer 0: got 8 tokens, must be at least 16 for top-1 of 4 experts"
    with pytest.raises(ValueError, match=rule):
        read_layers(str(tmp_path), model, 1)


def test_the_rest_of_a_long_trace_is_not_read(tmp_path: Path, model: Model) -> None:
    """Three tokens of a layer from each of two files; every layer has them."""
    for rank in (0, 1):
        write_trace(tmp_path, rank, [top1(1, 0, 1), top1(2, 2, 2)] * 2 + [{"layer": 1}])
    # No line behind the last needed one is looked at.
    with pytest.raises(ValueError, match=r"line 5: is no record of the tracer \(KeyError"):
        read_trace(str(tmp_path), model, 1, 10)
    for rank in (0, 1):
        write_trace(tmp_path, rank, [top1(1, 0, 1), top1(2, 2, 2)] * 3 + [{"layer": 1}])
    read = read_trace(str(tmp_path), model, 1, 6)
    assert [[experts_of(rows) for rows in read[rank].values()] for rank in (0, 1)] == [
        [[0, 1, 0], [2, 2, 2]]
    ] * 2


@pytest.mark.parametrize(
    ("target", "reason"), [("nowhere", "No such file or directory"), (".", "Is a directory")]
)
def test_a_file_that_cannot_be_read_is_one_line(
    tmp_path: Path, model: Model, target: str, reason: str
) -> None:
    path = tmp_path / "router_trace_rank0.jsonl"
    path.symlink_to(target)
    with pytest.raises(ValueError) as error:
        read_trace(str(tmp_path), model, 1, 8)
    assert str(error.value) == f"{path}: cannot be read: {reason}; must be a file of the tracer"


RECORD = '{"layer": 2, "hs_shape": [1, 64], "top_indices": [[0]]}'


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("not json", "line 1: is no record of the tracer"),
        ('{"layer": 1}', "line 1: is no record of the tracer (KeyError: 'top_indices')"),
        ('{"top_indices": [[9]]}', "line 1: top_indices: must be a list of experts from 0 to 3"),
        ('{"top_indices": [0, 1]}', "line 1: top_indices: must be a list"),
        ('{"top_indices": [[0, 1]]}', "line 1: topk: got 2, must be 1, moe_router_topk of"),
        (RECORD.replace("2,", "3,"), "line 1: layer: got 3, must be at most 2, num_layers of"),
        (RECORD.replace("64", "32"), "line 1: hs_shape: got 32, must be 64, hidden_size of"),
        ('{"top_indices": []}', "got 0 layers with experts"),
        (RECORD, "got 1 layers with experts, must be the 2 of"),
    ],
)
def test_a_bad_trace_is_one_line(tmp_path: Path, model: Model, line: str, rule: str) -> None:
    (tmp_path / "router_trace_rank0.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError) as error:
        read_layers(str(tmp_path), model, 1)
    assert str(tmp_path) in str(error.value) and rule in str(error.value)
    assert "\n" not in str(error.value)
