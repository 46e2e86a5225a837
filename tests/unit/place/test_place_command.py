"""`monta place` on traces: report and file, and what is refused."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from planted import planted_routing, write_layers
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from monta_megatron.cli import main

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
CLUSTER = CONFIGS / "clusters" / "a800_2x8_ib200.yaml"
NUM_TOKENS = 4096


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """OLMoE's router (top-8 of 64 experts) in two layers."""
    fields = yaml.safe_load((CONFIGS / "models" / "olmoe_1b_7b.yaml").read_text())
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(fields | {"num-layers": 2}))
    return path


def place(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, Any, str]:
    """Exit status, the document of --json, standard error."""
    status = main(["place", *map(str, words), "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out) if captured.out else None, captured.err


def write_trace(folder: Path, strength: float) -> None:
    """Two layers, planted on 16 ranks of 2 nodes."""
    layers = [planted_routing(64, 16, 2, NUM_TOKENS, strength, seed) for seed in range(2)]
    write_layers(folder, {layer: rows for layer, (rows, _) in enumerate(layers)})


def test_a_placement_is_written(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "trace", strength=3.0)
    out = tmp_path / "placement.json"
    words = ("--trace", tmp_path / "trace", "--model", model, "--cluster", CLUSTER, "--out", out)
    status, document, error = place(capsys, *words)
    assert (status, document["refused"]) == (0, None)
    assert error == f"monta place: wrote {out}\n"
    assert json.loads(out.read_text()) == document
    before, after = (document["copies_per_token"][when] for when in ("before", "after"))
    for part, uniform in document["copies_per_token"]["uniform"].items():
        assert after[part] < 0.8 * before[part] and before[part] == pytest.approx(uniform, rel=0.1)
    gains = [100 * (1 - after[part] / before[part]) for part in after]
    assert document["gain_pct"] == pytest.approx(max(gains))
    assert {layer: sorted(order) for layer, order in document["placement"].items()} == {
        "0": list(range(64)),
        "1": list(range(64)),
    }
    loads = [layer["after"]["load"] for layer in document["layers"].values()]
    assert max(loads) < 1.25, "1.1 for the tokens that it was made from"
    status, _, error = place(capsys, *words)
    assert (status, error) == (2, f"monta place: --out: got {out}, must not exist\n")


def test_uniform_traces_have_no_placement(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "trace", strength=0.0)
    out = tmp_path / "placement.json"
    words = ("--trace", tmp_path / "trace", "--model", model, "--cluster", CLUSTER, "--out", out)
    status, document, error = place(capsys, *words)
    assert status == 0 and not out.exists()
    assert document["gain_pct"] < 3 and "must be at least 3%" in document["refused"]
    assert error == f"monta place: {out} is not written\n"
    assert main(["place", *map(str, words)]) == 0
    table = capsys.readouterr().out
    assert "uniform" in table and document["refused"] in table


def test_a_load_that_exists_today_is_allowed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every token goes to one expert of 64: its rank gets twice the mean, wherever it lies."""
    rows = planted_routing(64, 16, 2, NUM_TOKENS, 3.0, 0)[0]
    # In place of another expert of the token, whichever it is.
    hot, scores = rows.copy(), np.random.default_rng(0).random(rows.shape)
    hot[:, 0] = True
    hot[np.arange(len(hot)), 1 + (hot * scores)[:, 1:].argmax(1)] = rows[:, 0]
    write_layers(tmp_path / "trace", {0: rows, 1: hot})
    words = ("--trace", tmp_path / "trace", "--model", model, "--cluster", CLUSTER)
    _, document, _ = place(capsys, *words)
    before, after = (document["layers"]["1"][when] for when in ("before", "after"))
    assert before["load"] > 2 and after["load"] < 1.1 * before["load"]
    assert after["rank"] < 0.9 * before["rank"]


GOOD = {"placement": {"0": [1, 0, 2, 3]}}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--trace {trace} {files} --undo", "--undo: got True, must be left out with --trace"),
        ("--trace {trace} {files} --ep 3", "world_size: got 16, must be a multiple of"),
        (
            "--trace {trace} {files} --ep 64",
            "world_size: got 16, must be a multiple of etp * ep * pp (64)",
        ),
        ("--trace {trace} {files} --pp 3", "must be [], those of model with experts at --pp 3"),
        ("--trace {configs} {files}", "must be a folder with router_trace_rank*.jsonl"),
        ("--apply {trace} --placement {good}", "--out: not given, must be with --apply"),
        ("--apply {trace} --placement {good} --out new", "latest_checkpointed_iteration.txt"),
        (
            "--apply {trace} --placement {twice} --out new",
            "must be a file that `monta place --out`",
        ),
        ("--apply {saved} --placement {good} --out new", "layer 0: got 0 experts"),
        ("--apply {flat} --placement {good} --out new", "--dist-ckpt-optim-fully-reshardable"),
        ("--apply {garbage} --placement {good} --out new", ".metadata: cannot be placed"),
        ("--apply {trace} --placement {name} --out new", "must be a file that `monta place --out`"),
        (
            "--apply {trace} --placement {empty} --out new",
            "must be a file that `monta place --out`",
        ),
    ],
)
def test_bad_input_is_one_line(
    words: str, says: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(tmp_path / "trace", strength=3.0)
    names = {"trace": tmp_path / "trace", "configs": CONFIGS, "model": model}
    flat = Metadata({}, storage_data={MetadataIndex("optimizer.distributed.param_0"): None})
    for name, index in {
        "saved": pickle.dumps(Metadata({}, storage_data={})),
        "flat": pickle.dumps(flat),
        "garbage": b"garbage",
    }.items():
        names[name] = tmp_path / name
        (names[name] / "iter_0000002").mkdir(parents=True)
        (names[name] / "iter_0000002" / ".metadata").write_bytes(index)
        (names[name] / "latest_checkpointed_iteration.txt").write_text("2")
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
