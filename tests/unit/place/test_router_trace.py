"""Megatron's router traces: tokens read, layer by layer, and lines that are refused."""

import ast
from dataclasses import replace
from pathlib import Path

import golden
import numpy as np
import pytest
from numpy.typing import NDArray
from planted import record, write_trace

from monta_megatron.planner.model import Model, load_model
from monta_megatron.tools import place
from monta_megatron.tools.place import read_trace

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """Top-1 of 4 experts in 2 layers."""
    monkeypatch.setattr(place, "MIN_CHOICES", 2)
    model = load_model(CONFIGS / "models" / "quickstart.yaml")
    return replace(model, num_experts=4, moe_router_topk=1, num_layers=2, moe_layers=(True, True))


def experts_of(rows: tuple[NDArray[np.bool_], NDArray[np.bool_]]) -> tuple[list[int], list[int]]:
    """The one expert of each training and of each held-out token."""
    training, held_out = (part.argmax(axis=1).tolist() for part in rows)
    return training, held_out


def top1(layer: int, *experts: int) -> dict[str, object]:
    return record(layer, [[expert] for expert in experts])


def test_the_last_tokens_of_every_rank_are_held_out(tmp_path: Path, model: Model) -> None:
    """Two ranks, two layers, two steps; layers of multi-token prediction are left out."""
    mtp = top1(0, 3, 3) | {"block": "mtp"}
    write_trace(tmp_path, 0, [top1(0, 0, 1), top1(1, 2, 3), mtp, top1(0, 0, 0, 0), top1(1, 3, 3)])
    write_trace(tmp_path, 1, [top1(0, 2, 2), top1(1, 1, 1), mtp, top1(0, 1, 1), top1(1, 0, 0)])
    layers = read_trace(tmp_path, model, 1)
    assert {layer: experts_of(rows) for layer, rows in layers.items()} == {
        0: ([0, 1, 0, 2, 2, 1], [0, 0, 1]),
        1: ([2, 3, 3, 1, 1, 0], [3, 0]),
    }


def test_every_stage_counts_its_layers_from_0(tmp_path: Path, model: Model) -> None:
    for rank, expert in ((0, 1), (1, 1), (2, 3), (3, 3)):
        write_trace(tmp_path, rank, [top1(0, *[expert] * 4)])
    layers = read_trace(tmp_path, model, 2)
    assert {layer: experts_of(rows) for layer, rows in layers.items()} == {
        0: ([1] * 6, [1] * 2),
        1: ([3] * 6, [3] * 2),
    }
    # The first stage has no experts, and its ranks write nothing.
    for rank in (0, 1):
        write_trace(tmp_path, rank, [])
    layers = read_trace(tmp_path, replace(model, moe_layers=(False, True)), 2)
    assert list(layers) == [1]
    with pytest.raises(ValueError, match=r"rank0.*got layers \[\], must be \[0, 1\].*--pp 1"):
        read_trace(tmp_path, model, 1)
    (tmp_path / "router_trace_rank1.jsonl").unlink()
    assert "got 3 files, the last one of rank 3" in golden.refusal(read_trace, tmp_path, model, 2)


def test_the_rest_of_a_long_trace_is_not_read(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens of a layer from each of two files; then a line that would be refused."""
    monkeypatch.setattr(place, "MAX_TOKENS", 6)
    monkeypatch.setattr(place, "MIN_CHOICES", 1)
    records = [top1(0, 0, 1), top1(1, 2, 2)]
    for rank in (0, 1):
        write_trace(tmp_path, rank, [*records * 2, {"layer": 1}])
    with pytest.raises(ValueError, match="line 5: must be a record of Megatron's router trace"):
        read_trace(tmp_path, model, 1)
    for rank in (0, 1):
        write_trace(tmp_path, rank, [*records * 3, {"layer": 1}])
    training, held_out = read_trace(tmp_path, model, 1)[0]
    assert (len(training), len(held_out)) == (4, 2)


def test_a_line_that_was_cut_short_ends_the_trace(tmp_path: Path, model: Model) -> None:
    write_trace(tmp_path, 0, [top1(layer, *[0] * 8) for layer in (0, 1)])
    with (tmp_path / "router_trace_rank0.jsonl").open("a") as file:
        file.write('{"block": "decoder", "la')
    training, held_out = read_trace(tmp_path, model, 1)[1]
    assert (len(training), len(held_out)) == (6, 2)


def test_bad_traces(tmp_path: Path, model: Model) -> None:
    """A case is the text of a file."""

    def answer(text: str) -> str:
        (tmp_path / "router_trace_rank0.jsonl").write_text(f"{ast.literal_eval(text)}\n")
        return golden.refusal(read_trace, tmp_path, model, 1).replace(str(tmp_path), "FOLDER")

    golden.check_cases(Path(__file__).with_name("bad_traces.txt"), answer)
