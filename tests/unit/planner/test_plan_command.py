"""`monta plan`: what people read, what scripts read, run files, and jobs on parts of hosts."""

import json
from dataclasses import replace
from pathlib import Path

import golden
import pytest
from clusters import document
from training_logs import QWEN3_30B, training_log

from monta_megatron.cli import main
from monta_megatron.common import presets
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.models.files import load_model
from monta_megatron.tools.launch.prepare import checked, prepare

GOLDEN = Path(__file__).parent / "golden"
PLAN = ["plan", "--model", "qwen3_30b_a3b", "--cluster", "a100_hdr"]
LAYOUT = [*PLAN, "--world-size", "32", "--ep", "16"]
DEEPSEEK = ["plan", "--model", "deepseek_v3", "--cluster", "h100_8x_ndr"]

COMMANDS = {
    "layout": LAYOUT,
    "chain": [*LAYOUT, "--chain", "allgather"],
    "iteration": [*LAYOUT, "--iteration-ms", "20000", "--global-batch-size", "256"],
    "stages": [*LAYOUT, "--stages"],
    "sweep": [*LAYOUT, "--sweep", "tokens=512,4k"],
    "ranking": [*PLAN, "--world-size", "32"],
    # 61 layers on 16 stages; no exchange in a node fits on fewer.
    "uneven_stages": [*DEEPSEEK, "--world-size", "256"],
    "in_a_node": [*PLAN, "--world-size", "8"],
    "log": ["plan", "--log", "train.log", "--cluster", "a100_hdr"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    of_16 = {**QWEN3_30B, "world_size": 16, "expert_model_parallel_size": 16}
    (tmp_path / "train.log").write_text(training_log(of_16, 20_000.0))
    assert main(COMMANDS[name]) == 0
    printed = capsys.readouterr().out
    golden.check(GOLDEN / f"plan_{name}.txt", printed)
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 25 or name == "stages"


def test_the_benefit_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--world-size", "128", "--tp", "2", "--ep", "16", "--pp", "4"]
    words = ["plan", "--model", "qwen3_235b_a22b", "--cluster", "h100_8x_ndr", *words]
    planned = document(capsys, *words, "--global-batch-size", "512", "--iteration-ms", "9000")
    benefit, us = planned["benefit"], planned["predicted_us"]
    # 94 layers in 4 stages: one has 24; 512 sequences of 16 data parallel ranks.
    assert (benefit["num_moe_layers"], benefit["num_micro_batches"]) == (24, 32)
    by_chain = {entry["chain"]: entry["predicted_us"] for entry in planned["candidates"]}
    assert planned["stock_us"] == by_chain["alltoall"]
    assert benefit["saved_us"] == pytest.approx(by_chain["alltoall"] - us)
    assert benefit["saved_s_per_iteration"] == pytest.approx(benefit["saved_us"] * 24 * 32 / 1e6)
    assert planned["exchange_share"] == pytest.approx(by_chain["alltoall"] * 24 * 32 / 9e6)
    assert planned["saved_share"] == pytest.approx(benefit["saved_us"] * 24 * 32 / 9e6)


def test_every_layout_that_fits_has_the_fewest_stages(capsys: pytest.CaptureFixture[str]) -> None:
    planned = document(capsys, *DEEPSEEK, "--world-size", "256")
    layouts = planned["layouts"]
    costs = [entry["us_per_1k_tokens"] for entry in layouts]
    assert costs == sorted(costs) and len(costs) > 10
    best = layouts[0]
    assert (best["chain"], best["ep"]) == (planned["chain"], planned["shape"]["layout"]["ep"])
    # An exchange in a node needs 16 stages, so none has more.
    in_node = [entry["pp"] for entry in layouts if entry["num_nodes"] == 1]
    assert min(in_node) == max(entry["pp"] for entry in layouts) == 16
    assert max(entry["needed_bytes"] for entry in layouts) <= 0.9 * 80e9
    crossing = next(entry for entry in layouts if entry["num_nodes"] == 2 and entry["tp"] == 2)
    words = [f"--{name}={crossing[name]}" for name in ("tp", "ep", "etp")]
    named = document(capsys, *DEEPSEEK, "--world-size=256", *words, f"--pp={crossing['pp'] // 2}")
    assert not named["memory"]["fits"]


def test_the_ranking_follows_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    first = {}
    mixtral = ["plan", "--model", "mixtral_8x7b", "--cluster", "a100_hdr", "--world-size", "16"]
    for words in ((), ("--tokens", "64")):
        first[words] = document(capsys, *mixtral, *words)["layouts"][0]
    even, few = first.values()
    assert even["tokens"] > few["tokens"] == 64
    assert even["predicted_us"] > few["predicted_us"]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("tokens", ["512", "4k"]),
        ("ep", ["8", "16"]),
        ("world-size", ["16", "32"]),
    ],
)
def test_a_row_of_a_sweep_is_a_plan(
    capsys: pytest.CaptureFixture[str], key: str, values: list[str]
) -> None:
    swept = document(capsys, *LAYOUT, "--sweep", f"{key}={','.join(values)}")
    assert swept["sweep"] == key
    for row, value in zip(swept["rows"], values, strict=True):
        # The last of two flags counts.
        one = document(capsys, *LAYOUT, f"--{key}", value)
        for name in ("chain", "num_chunks", "predicted_us", "stock_us"):
            assert row[name] == one[name]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--tokens", "0"], "--tokens: got '0', must be an integer >= 1"),
        (["--seq-length", "1", "--tp", "2"], "tp: got 2, must divide seq-length"),
        (["--world-size", "0"], "--world-size: got '0', must be an integer >= 1"),
        (["--world-size", "4096"], "world_size: got 4096, must be at most the"),
        (["--world-size", "1"], "world_size: got 1, no (tp, ep, etp) with cp 1 and pp any fits"),
        (["--ep", "256"], "world_size: got "),
        (["--ep", "3", "--world-size", "3"], "ep: got 3, must divide num-experts"),
        (["--ep", "2", "--tp", "64"], "tp: got 64, must divide num-attention-heads of qwen3"),
        (["--ep", "2", "--pp", "64"], "pp: got 64, must be at most num-layers"),
        (["--ep", "2", "--pp", "32"], "pp: got 32, must leave some of the 48 layers"),
        (["--ep", "16", "--tokens", "9" * 30], f"tokens: got {'9' * 30}, must be at most"),
        (["--ep", "16", "--global-batch-size", "100"], "--global-batch-size: got 100, must be a"),
        (["--ep", "16", "--iteration-ms", "5"], "--iteration-ms: got 5, must be beside --global"),
        (["--sweep", "tp=1,2"], "--sweep: got 'tp=1,2', must be KEY=a,b,c with KEY one of"),
        (["--sweep", "ep=16,48"], "--sweep ep=48: world_size: got"),
        (["--sweep", "tokens=1"], "--ep: not given, must be with --sweep"),
        (["--ep", "16", "--out", "{here}"], "--out: got {here}, must not exist"),
        (["--ep", "16", "--sweep", "ep=8", "--out", "x"], "--out: got x, must be left out with"),
        (["--ep", "16", "--log", "x"], "--model: got qwen3_30b_a3b, must be left out with --log"),
        (["--ranks-per-node", "9", "--ep", "9"], "ranks_per_node: got 9, must be"),
    ],
)
def test_an_impossible_request_is_one_line(
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
        [*LAYOUT, "--tp", "2", "--seq-length", "2k"],
        # 61 layers on 16 stages.
        [*DEEPSEEK, "--world-size", "1024", "--ep", "64", "--pp", "16"],
    ],
)
def test_a_run_file_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, "--out", "run.yaml"]) == 0
    run = prepare("run.yaml", [], None, dry_run=True)
    assert checked(run).megatron is not None
    assert (
        run.plan is not None and run.plan.num_chunks == run.config.megatron["moe-monta-num-chunks"]
    )


def test_a_run_file_says_what_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Racks in part; the script is anything that exists."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_LM_DIR", str(tmp_path))
    (tmp_path / "pretrain_gpt.py").touch()
    model = tmp_path / "my model.yaml"
    model.write_text(presets.find("models", "qwen3_30b_a3b").read_text())
    for number, sizes in enumerate(
        (
            ["--world-size", "128", "--ranks-per-node", "64", "--ep", "128"],
            ["--world-size", "16", "--ranks-per-node", "4", "--ep", "16"],
        )
    ):
        words = ["plan", "--model", str(model), "--cluster", "gb200_nvl72", *sizes]
        planned = document(capsys, *words, "--out", f"run{number}.yaml")
        launched = prepare(f"run{number}.yaml", [], None, dry_run=True).plan
        assert launched is not None
        # The run permutes in one kernel, which starts with fewer operations.
        assert launched.predicted_us == pytest.approx(planned["predicted_us"], rel=0.01)


def test_hosts_in_part_are_the_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 of the 8 ranks of each of two hosts: two nodes, in every command that takes sizes."""
    part = document(capsys, *PLAN, "--world-size", "8", "--ranks-per-node", "4", "--ep", "8")
    assert part["shape"]["layout"]["nodes"] == [0, 0, 0, 0, 1, 1, 1, 1]
    single = document(capsys, *PLAN, "--world-size", "4", "--ranks-per-node", "1", "--ep", "4")
    assert single["shape"]["layout"]["nodes"] == [0, 1, 2, 3]
    drawn = document(
        capsys, "timeline", *PLAN[1:], "--world-size", "8", "--ranks-per-node", "4", "--ep", "8",
        "--chain", "hierarchical_alltoall", "--out", str(tmp_path / "picture.png"),
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
        assert list(launched.shape.layout.nodes) == planned["shape"]["layout"]["nodes"]


def test_a_rack_is_one_node_of_many_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    """GB200: hosts of 4 make up a node of 72, of which a job may use 64."""
    rack = ["plan", "--model", "qwen3_30b_a3b", "--cluster", "gb200_nvl72"]
    whole = document(capsys, *rack, "--world-size", "64", "--ranks-per-node", "4", "--ep", "64")
    assert set(whole["shape"]["layout"]["nodes"]) == {0}
    part = document(capsys, *rack, "--world-size", "128", "--ranks-per-node", "64", "--ep", "128")
    assert part["shape"]["layout"]["nodes"] == [0] * 64 + [1] * 64
    with pytest.raises(ValueError, match=r"ranks_per_node: got 2, must be a multiple of 4"):
        load_cluster("gb200_nvl72").of_job(2)


def test_a_job_has_its_share_of_the_interfaces() -> None:
    cluster = load_cluster("h100_8x_ndr")
    part = cluster.of_job(4)
    assert (part.ranks_per_node, part.nics_per_node) == (4, 4)
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


def test_tensor_and_context_parallel_ranks_share_a_sequence() -> None:
    model = replace(load_model("mixtral_8x7b"), seq_length=4096, micro_batch_size=3)
    layout = ParallelLayout(world_size=16, tp=2, cp=4)
    assert layout.tokens_per_rank(model) == 3 * 4096 // 8
    assert layout.incompatibility(model) is None
    # Context parallelism cuts a sequence into 2 x 4 parts, and 2 tensor parallel ranks share each.
    assert layout.incompatibility(replace(model, seq_length=16)) is None
    assert str(layout.incompatibility(replace(model, seq_length=8))).startswith(
        "tp: got 2, must divide seq-length of mixtral_8x7b (8) together with cp (4)"
    )
