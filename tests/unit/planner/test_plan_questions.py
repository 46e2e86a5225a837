"""`monta plan --sweep`, `--out`, `--iteration-ms`, and hosts that a job uses in part."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from clusters import document

from monta_megatron.cli import main
from monta_megatron.common import presets
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.tools.launch.prepare import checked, prepare

PLAN = ["plan", "--model", "qwen3_30b_a3b", "--cluster", "a100_hdr"]
LAYOUT = ["--world-size", "32", "--ep", "16"]


@pytest.mark.parametrize(
    ("sweep", "flag", "values"),
    [
        ("tokens=512,4k", "--tokens", ["512", "4k"]),
        ("ep=8,16", "--ep", ["8", "16"]),
        ("inter-rate-ratio=0.5,2", "--inter-rate-ratio", ["0.5", "2"]),
        ("world-size=16,32", "--world-size", ["16", "32"]),
    ],
)
def test_a_row_of_a_sweep_is_a_plan(
    capsys: pytest.CaptureFixture[str], sweep: str, flag: str, values: list[str]
) -> None:
    layout = dict(zip(LAYOUT[::2], LAYOUT[1::2], strict=True))
    words = [word for pair in layout.items() for word in pair]
    swept = document(capsys, *PLAN, *words, "--sweep", sweep)
    assert swept["sweep"] == flag.removeprefix("--")
    for row, value in zip(swept["rows"], values, strict=True):
        changed = {**layout, flag: value}
        one = document(capsys, *PLAN, *(word for pair in changed.items() for word in pair))
        for name in ("chain", "num_chunks", "predicted_us", "stock_us"):
            assert row[name] == one[name]


def test_a_value_that_does_not_fit_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--world-size", "32", "--sweep", "ep=16,48"]) == 0
    assert "must be a multiple of etp * ep * pp (48)" in capsys.readouterr().out


def test_a_sweep_over_more_ranks_than_the_cluster_has_adds_nodes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = load_cluster("a100_hdr").num_ranks * 2
    swept = document(capsys, *PLAN, "--ep", "16", "--sweep", f"world-size={ranks}")
    assert swept["rows"][0]["chain"] is not None


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--sweep", "tp=1,2"], "--sweep: got 'tp=1,2', must be KEY=a,b,c with KEY one of"),
        (["--sweep", "ep=48"], "layout: world_size: got"),
        (["--ep", "16", "--iteration-ms", "5"], "--iteration-ms: given, must be with --global-ba"),
        (["--ep", "16", "--out", "{here}"], "--out: got {here}, must not exist; --force"),
        ([*LAYOUT, "--sweep", "ep=8,16", "--out", "new"], "--out: got new, must be left out with"),
        (
            [*LAYOUT, "--inter-rate-ratio", "2", "--out", "new"],
            "--inter-rate-ratio: got 2.0, must be left out with --out",
        ),
        (["--ep", "16", "--log", "x"], "--model: got qwen3_30b_a3b, must be left out with --log"),
        (
            ["--nodes", "2", "--ranks-per-node", "9", "--ep", "9"],
            "ranks_per_node: got 9, must be at most 8, the ranks of a node of A100",
        ),
    ],
)
def test_wrong_questions_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    here = tmp_path / "run.yaml"
    here.write_text("kept")
    try:
        status = main([*PLAN, *(word.replace("{here}", str(here)) for word in words)])
    except SystemExit as end:
        status = end.code
    assert status == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"monta plan: {line.replace('{here}', str(here))}"), error
    assert "\n" not in error and here.read_text() == "kept"


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "qwen3_30b_a3b", "--cluster", "a100_hdr", *LAYOUT, "--tp", "2",
         "--seq-length", "2k"],
        # 61 layers on 16 stages.
        ["--model", "deepseek_v3", "--cluster", "h100_8x_ndr", "--world-size", "1024",
         "--ep", "64", "--pp", "16"],
    ],
)  # fmt: skip
def test_a_run_file_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words, "--out", "run.yaml"]) == 0
    run = prepare("run.yaml", [], None, dry_run=True)
    assert checked(run).megatron is not None
    assert (
        run.plan is not None and run.plan.num_chunks == run.config.megatron["moe-monta-num-chunks"]
    )


def test_a_run_file_says_what_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Racks in part, and kernels; the script is anything that exists."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_LM_DIR", str(tmp_path))
    (tmp_path / "pretrain_gpt.py").touch()
    model = tmp_path / "my model.yaml"
    model.write_text(presets.find("models", "qwen3_30b_a3b").read_text())
    for words in (
        ["--cluster", "gb200_nvl72", "--nodes", "2", "--ranks-per-node", "64", "--ep", "128"],
        ["--cluster", "gb200_nvl72", "--nodes", "4", "--ranks-per-node", "2", "--ep", "8"],
        [*PLAN[3:], *LAYOUT, "--kernels", "torch"],
    ):
        words = ["plan", "--model", str(model), *words, "--out", "run.yaml", "--force"]
        planned = document(capsys, *words)
        launched = prepare("run.yaml", [], None, dry_run=True).plan
        assert launched is not None
        # The run permutes in one kernel, which starts with fewer operations.
        assert launched.predicted_us == pytest.approx(planned["predicted_us"], rel=0.01)


def test_hosts_in_part_are_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 of the 8 ranks of each of two hosts: two nodes, in every command that takes sizes."""
    part = document(capsys, *PLAN, "--nodes", "2", "--ranks-per-node", "4", "--ep", "8")
    assert part["key"]["nodes"] == [0, 0, 0, 0, 1, 1, 1, 1]
    single = document(capsys, *PLAN, "--nodes", "4", "--ranks-per-node", "1", "--ep", "4")
    assert single["key"]["nodes"] == [0, 1, 2, 3]
    drawn = document(
        capsys, "timeline", *PLAN[1:], "--nodes", "2", "--ranks-per-node", "4", "--ep", "8",
        "--chain", "hierarchical_alltoall", "--out", str(tmp_path),
    )  # fmt: skip
    assert "4 of 8 ranks per node" in drawn["title"]
    monkeypatch.chdir(tmp_path)
    for nodes, on_host, planned in ((2, 4, part), (4, 1, single)):
        run = {
            "name": "part", "model": PLAN[2], "cluster": PLAN[4], "script": "train.py",
            "layout": {"nodes": nodes, "ranks_per_node": on_host, "ep": nodes * on_host},
            "megatron": {"global-batch-size": 64},
        }  # fmt: skip
        (tmp_path / "run.yaml").write_text(json.dumps(run))
        (tmp_path / "train.py").touch()
        launched = prepare("run.yaml", [], None, dry_run=True).plan
        assert launched is not None and launched.chain == planned["chain"]
        assert list(launched.key.nodes) == planned["key"]["nodes"]


def test_a_rack_is_one_node_of_many_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """GB200: hosts of 4 make up a node of 72, of which a job may use 64."""
    rack = ["plan", "--model", "qwen3_30b_a3b", "--cluster", "gb200_nvl72"]
    whole = document(capsys, *rack, "--nodes", "16", "--ranks-per-node", "4", "--ep", "64")
    assert set(whole["key"]["nodes"]) == {0}
    part = document(capsys, *rack, "--nodes", "2", "--ranks-per-node", "64", "--ep", "128")
    assert part["key"]["nodes"] == [0] * 64 + [1] * 64
    # Two ranks of each of four hosts still share their rack.
    hosts = document(capsys, *rack, "--nodes", "4", "--ranks-per-node", "2", "--ep", "8")
    assert set(hosts["key"]["nodes"]) == {0}


def test_a_job_has_its_share_of_the_interfaces() -> None:
    cluster = load_cluster("h100_8x_ndr")
    part = cluster.of_job(4)
    assert (part.ranks_per_node, part.nics_per_node, part.ranks_per_nic) == (4, 4, 1)
    assert cluster.of_job(None) is cluster.of_job(8) is cluster
    assert part.time_us("alltoall", "inter", 1e6, 8, 4) == pytest.approx(
        cluster.time_us("alltoall", "inter", 1e6, 8, 4)
    )


def test_a_cluster_of_single_ranks_needs_no_node_link() -> None:
    whole = load_cluster("a100_hdr")
    single = replace(whole, ranks_per_node=1, nics_per_node=1, node_link=None)
    assert single.resources == ("inter", "memory")
    with pytest.raises(ValueError, match="node_link: missing, must be given, or alltoall of it"):
        replace(whole, node_link=None)
