"""`monta place` on traces: report and file, and what is refused."""

import json
import pickle
from pathlib import Path

import golden
import pytest
import yaml
from commands import Monta
from planted import planted_routing, record, write_trace
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parents[2] / "configs"
NUM_TOKENS = 4096


def write_planted(folder: Path, strength: float) -> None:
    """Two layers, planted on 16 ranks of 2 nodes."""
    layers = [planted_routing(64, 16, 2, NUM_TOKENS, strength, seed)[0] for seed in range(2)]
    experts = [rows.nonzero()[1].reshape(NUM_TOKENS, -1).tolist() for rows in layers]
    write_trace(folder, 0, map(record, range(2), experts))


@pytest.fixture
def words(tmp_path: Path) -> list[object]:
    """Placement for OLMoE's router (top-8 of 64 experts) in two layers, to placement.json."""
    fields = yaml.safe_load((CONFIGS / "models" / "olmoe_1b_7b.yaml").read_text())
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(fields | {"num-layers": 2}))
    flags = f"--trace {tmp_path}/trace --model {path} --cluster a800_2x8_ib200 --ep 16"
    return ["place", *flags.split(), "--out", tmp_path / "placement.json"]


def test_a_placement_is_written(tmp_path: Path, words: list[object], monta: Monta) -> None:
    write_planted(tmp_path / "trace", strength=3.0)
    out = tmp_path / "placement.json"
    status, printed, error = monta(*words, "--json")
    assert (status, error) == (0, f"monta place: wrote {out}\n")
    document = json.loads(printed)
    assert json.loads(out.read_text()) == document and document["refused"] is None
    before, after = (document["copies_per_token"][when] for when in ("before", "after"))
    for part, uniform in document["copies_per_token"]["uniform"].items():
        assert after[part] < 0.8 * before[part] and before[part] == pytest.approx(uniform, rel=0.1)
    gain = 1 - sum(after.values()) / sum(before.values())
    assert document["gain_pct"] == pytest.approx(100 * gain)
    placement = {layer: sorted(order) for layer, order in document["placement"].items()}
    assert placement == {"0": list(range(64)), "1": list(range(64))}
    loads = [layer["after"]["load"] for layer in document["layers"].values()]
    assert max(loads) < 1.25, "1.1 for the tokens that it was made from"
    assert monta.refusal(*words) == f"monta place: --out: got {out}, must not exist"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("monta_megatron.tools.place.MAX_LOAD", 0.5)
        assert "as much as today, must be at most 0.5" in monta(*words[:-2])[1]


def test_uniform_traces_have_no_placement(
    tmp_path: Path, words: list[object], monta: Monta
) -> None:
    write_planted(tmp_path / "trace", strength=0.0)
    status, printed, error = monta(*words, "--json")
    assert (status, error) == (1, f"monta place: {tmp_path / 'placement.json'} is not written\n")
    document = json.loads(printed)
    assert document["gain_pct"] < 3 and "must be at least 3%" in document["refused"]
    assert not (tmp_path / "placement.json").exists()
    _, table, _ = monta(*words)
    assert "uniform" in table and document["refused"] in table


@pytest.mark.usefixtures("words")
def test_bad_input(tmp_path: Path, monta: Monta, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written."""
    monkeypatch.chdir(tmp_path)
    write_planted(Path("trace"), strength=3.0)
    for name, text in yaml.safe_load((HERE / "bad_files.yaml").read_text()).items():
        Path(name).write_text(text)
    flat = Metadata({}, storage_data={MetadataIndex("optimizer.distributed.param_0"): None})
    for name, index in {
        "saved": pickle.dumps(Metadata({}, storage_data={})),
        "flat": pickle.dumps(flat),
        "garbage": b"garbage",
    }.items():
        Path(name, "iter_0000002").mkdir(parents=True)
        Path(name, "iter_0000002", ".metadata").write_bytes(index)
        Path(name, "latest_checkpointed_iteration.txt").write_text("2")
    before = sorted(tmp_path.rglob("*"))

    def answer(words: str) -> str:
        return monta.refusal(*words.split()).replace(f"{tmp_path}/", "")

    golden.check_session(HERE / "bad_input.txt", answer)
    assert sorted(tmp_path.rglob("*")) == before
