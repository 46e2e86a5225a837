"""`monta plan`: what people read, what scripts read, run files, and jobs on parts of hosts."""

import json
from dataclasses import replace
from pathlib import Path

import golden
import pytest
import yaml
from clusters import GOLDEN, preset
from commands import Monta
from published_configs import CONFIGS
from run_python import run_python
from training_logs import QWEN3_30B, training_log

from monta_megatron.common import files
from monta_megatron.planner.benefit import IterationShare
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.model import load_model
from monta_megatron.tools.launch.prepare import checked, prepare

PLAN = ["plan", "--model", "qwen3_30b_a3b", "--cluster", "a100_hdr"]
LAYOUT = [*PLAN, "--world-size", "32", "--ep", "16"]
DEEPSEEK = ["plan", "--model", "deepseek_v3", "--cluster", "h100_8x_ndr"]
# By dispatcher, what the arguments of its training say besides.
LOGS = {"alltoall": {}, "allgather": {}, "monta": {"moe_monta_ranks_per_node": 4}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, in which commands run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_texts(folder: Path, monta: Monta) -> None:
    """Among them trainings whose state does not fit, and where plain alltoall is chosen."""
    of_16 = {**QWEN3_30B, "world_size": 16, "expert_model_parallel_size": 16}
    for name, more in LOGS.items():
        text = training_log({**of_16, **more, "moe_token_dispatcher_type": name}, 20_000.0)
        (folder / f"{name}.log").write_text(text)

    def answer(words: str) -> str:
        status, printed, _ = monta(*words.split())
        assert status == 0
        lines = printed.splitlines()
        assert max(map(len, lines)) <= 100
        return "\n".join(lines)

    golden.check_session(GOLDEN / "plans.txt", answer)


def test_the_benefit_by_hand(monta: Monta) -> None:
    words = ["--world-size", "128", "--tp", "2", "--ep", "16", "--pp", "4"]
    words = ["plan", "--model", "qwen3_235b_a22b", "--cluster", "h100_8x_ndr", *words]
    planned = monta.document(*words, "--global-batch-size", "512", "--iteration-ms", "9000")
    benefit, us = planned["benefit"], planned["predicted_us"]
    # 94 layers in 4 stages: one has 24; 512 sequences of 16 data parallel ranks.
    assert (benefit["num_moe_layers"], benefit["num_micro_batches"]) == (24, 32)
    # Stock binds no chain and has no executor, part of which the device's work hides; hosts are
    # 1.25 times as fast.
    ours_us = {each["chain"]: each["predicted_us"] for each in planned["candidates"]}["alltoall"]
    alltoall_us, allgather_us = planned["stock_times_us"].values()
    assert ours_us - (315 - 30 + 4 * 39) / 1.25 <= alltoall_us < ours_us
    # A ring crosses once per node.
    stock_us = planned["stock_us"]
    assert stock_us == allgather_us < alltoall_us and planned["stock"] == "allgather"
    assert benefit["ratio"] == pytest.approx(stock_us / us)
    assert benefit["saved_us"] == pytest.approx(stock_us - us)
    assert benefit["saved_s_per_iteration"] == pytest.approx(benefit["saved_us"] * 24 * 32 / 1e6)
    # What was measured ran alltoall.
    assert planned["exchange_share"] == pytest.approx(alltoall_us * 24 * 32 / 9e6)
    assert planned["saved_share"] == pytest.approx((alltoall_us - us) * 24 * 32 / 9e6)
    assert monta.document(*words)["benefit"]["saved_s_per_iteration"] is None


def test_one_token_is_no_plural(monta: Monta) -> None:
    words = [*LAYOUT, "--tokens", "1"]
    status, printed, _ = monta(*words)
    assert status == 0
    assert "1 token per rank" in printed and "1 tokens" not in printed


def test_a_sweep_names_the_values_that_do_not_fit(monta: Monta) -> None:
    words = [*PLAN, "--world-size", "32", "--sweep", "ep=8,3,16"]
    status, printed, _ = monta(*words)
    *_, last = printed.splitlines()
    rule = "world_size: got 32, must be a multiple of etp * ep * pp (3)"
    assert status == 0 and last == f"not planned: ep=3: {rule}"
    rows = monta.document(*words)["rows"]
    assert rows[1] == {"value": 3, "problem": rule}
    assert all("predicted_us" in row for row in (rows[0], rows[2]))


def test_a_cluster_file_may_lack_its_source(folder: Path, monta: Monta) -> None:
    data = yaml.safe_load((files.CONFIGS / "clusters" / "a100_hdr.yaml").read_text())
    for part in (data, data["network"], data["memory"], data["host"]):
        del part["source"]
    Path("mine.yaml").write_text(yaml.safe_dump(data))
    status, printed, _ = monta(*PLAN[:3], "--cluster", "mine.yaml", "--world-size", "32", "--ep=8")
    assert status == 0
    assert "the cluster file does not name the source of each" in " ".join(printed.split())


@pytest.mark.parametrize(
    "name", [path.stem for path in (files.CONFIGS / "clusters").glob("*.yaml")]
)
def test_every_preset_names_its_sources(name: str) -> None:
    cluster = preset(name)
    parts = (cluster, cluster.host, *cluster.links.values())
    assert all(part.source for part in parts)


@pytest.mark.parametrize(("module", "package"), [("numpy", "numpy"), ("yaml", "pyyaml")])
def test_a_missing_package_is_named(tmp_path: Path, module: str, package: str) -> None:
    # A module that cannot be found in place of the installed one.
    (tmp_path / f"{module}.py").write_text(f"raise ModuleNotFoundError(name='{module}')\n")
    result = run_python("-m", "monta_megatron", *PLAN, PYTHONPATH=str(tmp_path))
    assert result.returncode == 2 and package in result.stderr
    line = f"monta plan: {module} is not installed: pip install numpy pyyaml\n"
    assert result.stderr == line


@pytest.mark.parametrize("saved_share", [-0.001, 0.0, 0.004])
def test_nothing_saved_is_no_percentage(saved_share: float) -> None:
    share = IterationShare(1000.0, "alltoall", exchange_share=0.3, saved_share=saved_share)
    assert share.text.endswith("takes 30% (predicted); there is nothing to save")


@pytest.mark.parametrize("name", ["emulated_2x4_500mbit", "emulated_2x8_500mbit"])
def test_an_emulated_preset_counts_alike_for_stock_and_monta(monta: Monta, name: str) -> None:
    words = ["--model", "quickstart", "--cluster", name, "--ep", "8"]
    planned = monta.document("plan", *words)
    ours_us = {each["chain"]: each["predicted_us"] for each in planned["candidates"]}
    # The host of these presets takes no time around stages either.
    assert planned["stock_times_us"]["alltoall"] == pytest.approx(ours_us["alltoall"])


def test_every_layout_that_fits_has_the_fewest_stages(monta: Monta) -> None:
    planned = monta.document(*DEEPSEEK, "--world-size", "256")
    layouts = planned["layouts"]
    # One across nodes has to save more than 3%.
    costs = [each["us_per_1k_tokens"] * (1 + 0.03 * (each["num_nodes"] > 1)) for each in layouts]
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


@pytest.mark.parametrize(
    ("key", "values"),
    [("tokens", ["512", "4k"]), ("ep", ["8", "16"]), ("world-size", ["16", "32"])],
)
def test_a_row_of_a_sweep_is_a_plan(monta: Monta, key: str, values: list[str]) -> None:
    at = LAYOUT.index(f"--{key}") if f"--{key}" in LAYOUT else len(LAYOUT)
    swept = monta.document(*LAYOUT[:at], *LAYOUT[at + 2 :], "--sweep", f"{key}={','.join(values)}")
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
def test_a_run_file_is_taken_as_it_is(folder: Path, monta: Monta, words: list[str]) -> None:
    assert monta(*words, "--out", "run.yaml")[0] == 0
    run = prepare("run.yaml", [], None, dry_run=True)
    assert checked(run).megatron is not None
    assert run.plan is not None
    # As the presets do.
    assert run.config.slurm.options["time"] == 240
    # Trials are to confirm the choice.
    assert "moe-monta-chain" not in run.config.megatron


@pytest.mark.parametrize(
    ("file", "name"),
    [("_Qwen3 30B/config.json", "Qwen3_30B"), ("qwen3.json", "qwen3")],
)
def test_a_run_is_named_after_a_config_json_or_its_folder(
    folder: Path, monta: Monta, file: str, name: str
) -> None:
    model = folder / file
    model.parent.mkdir(exist_ok=True)
    model.write_text(json.dumps(CONFIGS["qwen3_30b_a3b"]))
    words = ["--cluster", "h100_8x_ndr", "--world-size", 16, "--ep", 16, "--out", "run.yaml"]
    assert monta("plan", "--model", model, *words)[0] == 0
    assert prepare("run.yaml", [], None, dry_run=True).config.name == name


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
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    monta: Monta,
    cluster: str,
    nodes: int,
    ranks_per_node: int,
    ranks_per_link: int,
) -> None:
    """The script is anything that exists."""
    monkeypatch.setenv("MEGATRON_LM_DIR", str(folder))
    (folder / "pretrain_gpt.py").touch()
    model = folder / "my model.yaml"
    model.write_text(files.find_config("models", "qwen3_30b_a3b").read_text())
    num_ranks = nodes * ranks_per_node
    sizes = ["--world-size", num_ranks, "--ranks-per-node", ranks_per_node, "--ep", num_ranks]
    words = ["plan", "--model", model, "--cluster", cluster, *sizes, "--out", "run.yaml"]
    planned = monta.document(*words)
    written = yaml.safe_load((folder / "run.yaml").read_text())
    is_monta = "--moe-token-dispatcher-type monta" in planned["flags"]
    assert (written["megatron"]["moe-token-dispatcher-type"] == "monta") is is_monta
    words = ["--moe-token-dispatcher-type", "monta"]
    launched = prepare("run.yaml", words, None, dry_run=True).plan
    assert launched is not None
    for of_nodes in (planned["shape"]["layout"]["nodes"], launched.shape.layout.nodes):
        assert list(of_nodes) == [rank // ranks_per_link for rank in range(num_ranks)]
    # The run permutes in one kernel, which starts with fewer operations.
    assert launched.predicted_us == pytest.approx(planned["predicted_us"], rel=0.01)


def test_a_job_has_its_share_of_the_interfaces() -> None:
    cluster = preset("h100_8x_ndr")
    part = cluster.for_job(4)
    assert (part.ranks_per_node, part.nics_per_node) == (4, 4)
    assert cluster.for_job(None) is cluster.for_job(8) is cluster
    part_us, us = (each.time_us("alltoall", "inter", 1e6, 8, 4) for each in (part, cluster))
    assert part_us == pytest.approx(us)
    with pytest.raises(ValueError, match=r"ranks_per_node: got 2, must be a multiple of 4"):
        preset("gb200_nvl72").for_job(2)
    # Single ranks need no node link.
    single = replace(cluster, ranks_per_node=1, nics_per_node=1, node_link=None)
    assert single.resources == ("inter", "memory")


def test_tensor_and_context_parallel_ranks_share_a_sequence() -> None:
    model = replace(load_model("mixtral_8x7b"), seq_length=4096, micro_batch_size=3)
    layout = ParallelLayout(world_size=16, tp=2, cp=4)
    assert layout.tokens_per_rank(model) == 3 * 4096 // 8
    assert layout.incompatibility(model) is None
    # Context parallelism cuts a sequence into 2 x 4 parts, and 2 tensor parallel ranks share each.
    assert layout.incompatibility(replace(model, seq_length=16)) is None
    assert "(8) together with cp (4)" in str(layout.incompatibility(replace(model, seq_length=8)))
