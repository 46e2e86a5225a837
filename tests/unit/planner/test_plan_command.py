"""`monta plan`: what people read, what scripts read, run files, and jobs on parts of hosts."""

from dataclasses import replace
from pathlib import Path

import golden
import pytest
from commands import Monta
from training_logs import QWEN3_30B, training_log

from monta_megatron.common import files
from monta_megatron.planner.cluster_file import load_cluster
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.model import load_model
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
def test_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, monta: Monta) -> None:
    monkeypatch.chdir(tmp_path)
    of_16 = {**QWEN3_30B, "world_size": 16, "expert_model_parallel_size": 16}
    (tmp_path / "train.log").write_text(training_log(of_16, 20_000.0))
    status, printed, _ = monta(*COMMANDS[name])
    assert status == 0
    golden.check(GOLDEN / f"plan_{name}.txt", printed)
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 25 or name == "stages"


def test_the_benefit_by_hand(monta: Monta) -> None:
    words = ["--world-size", "128", "--tp", "2", "--ep", "16", "--pp", "4"]
    words = ["plan", "--model", "qwen3_235b_a22b", "--cluster", "h100_8x_ndr", *words]
    planned = monta.document(*words, "--global-batch-size", "512", "--iteration-ms", "9000")
    benefit, us = planned["benefit"], planned["predicted_us"]
    # 94 layers in 4 stages: one has 24; 512 sequences of 16 data parallel ranks.
    assert (benefit["num_moe_layers"], benefit["num_micro_batches"]) == (24, 32)
    by_chain = {entry["chain"]: entry["predicted_us"] for entry in planned["candidates"]}
    assert planned["stock_us"] == by_chain["alltoall"]
    assert benefit["saved_us"] == pytest.approx(by_chain["alltoall"] - us)
    assert benefit["saved_s_per_iteration"] == pytest.approx(benefit["saved_us"] * 24 * 32 / 1e6)
    assert planned["exchange_share"] == pytest.approx(by_chain["alltoall"] * 24 * 32 / 9e6)
    assert planned["saved_share"] == pytest.approx(benefit["saved_us"] * 24 * 32 / 9e6)


def test_every_layout_that_fits_has_the_fewest_stages(monta: Monta) -> None:
    planned = monta.document(*DEEPSEEK, "--world-size", "256")
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
    named = monta.document(*DEEPSEEK, "--world-size=256", *words, f"--pp={crossing['pp'] // 2}")
    assert not named["memory"]["fits"]


def test_the_ranking_follows_the_flags(monta: Monta) -> None:
    mixtral = ["plan", "--model", "mixtral_8x7b", "--cluster", "a100_hdr", "--world-size", "16"]
    even, few = (
        monta.document(*mixtral, *words)["layouts"][0] for words in ((), ("--tokens", "64"))
    )
    assert even["tokens"] > few["tokens"] == 64
    assert even["predicted_us"] > few["predicted_us"]


@pytest.mark.parametrize(
    ("key", "values"),
    [("tokens", ["512", "4k"]), ("ep", ["8", "16"]), ("world-size", ["16", "32"])],
)
def test_a_row_of_a_sweep_is_a_plan(monta: Monta, key: str, values: list[str]) -> None:
    swept = monta.document(*LAYOUT, "--sweep", f"{key}={','.join(values)}")
    assert swept["sweep"] == key
    for row, value in zip(swept["rows"], values, strict=True):
        # The last of two flags counts.
        one = monta.document(*LAYOUT, f"--{key}", value)
        for name in ("chain", "num_chunks", "predicted_us", "stock_us"):
            assert row[name] == one[name]


@pytest.mark.parametrize(
    "words",
    [
        [*LAYOUT, "--tp", "2", "--seq-length", "2k"],
        # 61 layers on 16 stages.
        [*DEEPSEEK, "--world-size", "1024", "--ep", "64", "--pp", "16"],
    ],
)
def test_a_run_file_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, monta: Monta, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert monta(*words, "--out", "run.yaml")[0] == 0
    run = prepare("run.yaml", [], None, dry_run=True)
    assert checked(run).megatron is not None
    assert run.plan is not None
    assert run.plan.num_chunks == run.config.megatron["moe-monta-num-chunks"]


@pytest.mark.parametrize(
    ("cluster", "nodes", "ranks_per_node", "ranks_per_link"),
    # 4 of the 8 ranks of two hosts, and 1 of four; racks of 72 in part, and 4 hosts of one.
    [
        ("a100_hdr", 2, 4, 4),
        ("a100_hdr", 4, 1, 1),
        ("gb200_nvl72", 2, 64, 64),
        ("gb200_nvl72", 4, 4, 16),
    ],
)
def test_a_run_file_has_the_nodes_and_the_price_of_the_plan(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    monta: Monta,
    cluster: str,
    nodes: int,
    ranks_per_node: int,
    ranks_per_link: int,
) -> None:
    """The script is anything that exists."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_LM_DIR", str(tmp_path))
    (tmp_path / "pretrain_gpt.py").touch()
    model = tmp_path / "my model.yaml"
    model.write_text(files.find_config("models", "qwen3_30b_a3b").read_text())
    num_ranks = nodes * ranks_per_node
    sizes = ["--world-size", num_ranks, "--ranks-per-node", ranks_per_node, "--ep", num_ranks]
    words = ["plan", "--model", model, "--cluster", cluster, *sizes, "--out", "run.yaml"]
    planned, launched = monta.document(*words), prepare("run.yaml", [], None, dry_run=True).plan
    assert launched is not None
    for of_nodes in (planned["shape"]["layout"]["nodes"], launched.shape.layout.nodes):
        assert list(of_nodes) == [rank // ranks_per_link for rank in range(num_ranks)]
    # The run permutes in one kernel, which starts with fewer operations.
    assert launched.predicted_us == pytest.approx(planned["predicted_us"], rel=0.01)


def test_a_picture_names_hosts_in_part(tmp_path: Path, monta: Monta) -> None:
    sizes = ["--world-size", 8, "--ranks-per-node", 4, "--ep", 8]
    words = [*PLAN[1:], *sizes, "--chain", "hierarchical_alltoall"]
    drawn = monta.document("timeline", *words, "--out", tmp_path / "picture.png")
    assert "4 of 8 ranks per node" in drawn["title"]


def test_a_job_has_its_share_of_the_interfaces() -> None:
    cluster = load_cluster("h100_8x_ndr")
    part = cluster.of_job(4)
    assert (part.ranks_per_node, part.nics_per_node) == (4, 4)
    assert cluster.of_job(None) is cluster.of_job(8) is cluster
    part_us, us = (each.time_us("alltoall", "inter", 1e6, 8, 4) for each in (part, cluster))
    assert part_us == pytest.approx(us)
    with pytest.raises(ValueError, match=r"ranks_per_node: got 2, must be a multiple of 4"):
        load_cluster("gb200_nvl72").of_job(2)


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
