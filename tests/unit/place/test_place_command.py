"""`monta place` on traces: what is printed and written, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from planted import planted_routing, write_layers

from monta_megatron.cli import main

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
CLUSTER = CONFIGS / "clusters" / "a800_2x8_ib200.yaml"
NUM_TOKENS = 4096


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """OLMoE's router (top-8 of 64 experts) in two layers."""
    fields = yaml.safe_load((CONFIGS / "models" / "olmoe_1b_7b.yaml").read_text())
    fields |= {"name": "toy", "num_layers": 2, "num_moe_layers": 2, "num_parameters_billions": 1.0}
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def place(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any, str]:
    """Exit status, the document of --json, standard error."""
    status = main(["place", *map(str, words), "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out) if captured.out else None, captured.err


def traced(folder: Path, strength: float) -> list[np.ndarray]:
    """Two layers, on 8 ranks of 2 nodes; the planted order of each."""
    layers = [planted_routing(64, 16, 2, NUM_TOKENS, strength, seed) for seed in range(2)]
    write_layers(folder, {layer: rows for layer, (rows, _) in enumerate(layers)})
    return [planted for _, planted in layers]


def test_a_placement_is_written(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced(tmp_path / "trace", strength=3.0)
    out, plots = tmp_path / "placement.json", tmp_path / "plots"
    words = ("--trace", tmp_path / "trace", "--model", model, "--cluster", CLUSTER, "--out", out)
    status, document, error = place(capsys, *words, "--plot", plots)
    assert (status, document["refused"]) == (0, None)
    assert error == f"monta place: wrote {out}\n"
    assert json.loads(out.read_text()) == document
    copies = document["copies_per_token"]
    for tokens in ("training", "held_out"):
        before, after = copies["before"][tokens], copies["after"][tokens]
        assert before.keys() == after.keys() == {"rank", "node"}
        assert after["rank"] < 0.8 * before["rank"] and after["node"] < 0.8 * before["node"]
    before, after = (copies[when]["held_out"] for when in ("before", "after"))
    gains = [100 * (1 - after[what] / before[what]) for what in after]
    assert document["gain_pct"] == pytest.approx(max(gains))
    assert {layer: sorted(order) for layer, order in document["placement"].items()} == {
        "0": list(range(64)),
        "1": list(range(64)),
    }
    assert [path.suffix for path in plots.iterdir()] == [".png"]
    # It is not overwritten unasked.
    status, _, error = place(capsys, *words)
    assert (status, error) == (
        2,
        f"monta place: --out: got {out}, must not exist; --force overwrites a file\n",
    )


def test_uniform_traces_have_no_placement(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced(tmp_path / "trace", strength=0.0)
    out = tmp_path / "placement.json"
    words = ("--trace", tmp_path / "trace", "--model", model, "--cluster", CLUSTER, "--out", out)
    status, document, error = place(capsys, *words)
    assert status == 0 and not out.exists()
    assert document["gain_pct"] < 3 and "at least 3% (--min-gain)" in document["refused"]
    assert error == f"monta place: {out} is not written: {document['refused']}\n"
    assert main(["place", *map(str, words)]) == 0
    table = capsys.readouterr().out
    assert "uniform" in table and document["refused"] in table


def test_stages_have_layers_of_their_own(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tracer counts a stage's layers from 0: two stages of one layer, of two ranks each."""
    layers = [planted_routing(64, 16, 2, NUM_TOKENS, 3.0, seed)[0] for seed in range(2)]
    for rank in range(4):
        half = np.array_split(layers[rank // 2], 2)[rank % 2]
        write_layers(tmp_path / "trace", {0: half}, rank)
    words = ("--trace", tmp_path / "trace", "--model", model, "--cluster", CLUSTER)
    status, _, error = place(capsys, *words)
    assert status == 2 and "got 1 layers with experts" in error and "--pp" in error
    status, document, _ = place(capsys, *words, "--pp", 2)
    assert status == 0 and list(document["placement"]) == ["0", "1"]


def test_layers_that_no_load_allows_stay(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every token goes to one expert of 64: its rank gets twice the mean, wherever it lies."""
    rows = planted_routing(64, 16, 2, NUM_TOKENS, 3.0, 0)[0]
    hot = rows.copy()
    hot[:, 0] = True
    hot[np.arange(len(hot)), 1 + hot[:, 1:].argmax(1)] = rows[:, 0]
    write_layers(tmp_path / "trace", {0: rows, 1: hot})
    words = ("--trace", tmp_path / "trace", "--model", model, "--cluster", CLUSTER)
    _, document, _ = place(capsys, *words)
    assert document["layers"]["0"]["note"] is None
    assert "must get at most 1.1 (--max-load)" in document["layers"]["1"]["note"]
    assert document["placement"]["1"] == list(range(64))
    _, document, _ = place(capsys, *words, "--max-load", "4")
    assert document["layers"]["1"]["note"] is None


GOOD = {"model": "toy", "num_experts": 4, "placement": {"0": [1, 0, 2, 3]}}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--trace {trace} {files} --undo", "--undo: given, must come with --apply"),
        ("--trace {trace} {files} --max-load 0.9", "--max-load: got 0.9, must be at least 1"),
        ("--trace {trace} {files} --ep 3", "layout: ep: got 3, must divide num-experts"),
        ("--trace {trace} {files} --pp 3", "--pp: got 3, must divide num_layers (2)"),
        ("--trace {configs} {files}", "no router_trace_rank*.jsonl in it"),
        ("--apply {trace} --placement {good}", "--out: must be given, or --replace, and not both"),
        ("--apply {trace} --placement {good} --out new", "torch_dist; there is no .metadata in"),
        ("--apply {trace} --placement {twice} --out new", "is no permutation"),
        ("--apply {trace} --placement {name} --out new", "must be the number of a layer"),
        ("--apply {trace} --placement {empty} --out new", "num_experts: must be"),
    ],
)
def test_bad_input_is_one_line(
    words: str, says: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced(tmp_path / "trace", strength=3.0)
    names = {"trace": tmp_path / "trace", "configs": CONFIGS, "model": model}
    names["files"] = f"--model {model} --cluster {CLUSTER} --out {tmp_path}/new"  # type: ignore[assignment]
    for name, content in {
        "good": GOOD,
        "twice": GOOD | {"placement": {"0": [1, 1, 2, 3]}},
        "name": GOOD | {"placement": {"first": [1, 0, 2, 3]}},
        "empty": {},
    }.items():
        names[name] = tmp_path / f"{name}.json"
        names[name].write_text(json.dumps(content))
    before = sorted(tmp_path.rglob("*"))
    status, _, error = place(capsys, *words.format(**names).split())
    assert status == 2 and says in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
