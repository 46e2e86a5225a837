"""`monta plan`: what scripts read, what people read, and the preset files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from clusters import CONFIGS, document, layout_of, preset

from monta_megatron.cli import main
from monta_megatron.core import Shape
from monta_megatron.planner.layout import ParallelLayout, shape_of_model
from monta_megatron.planner.models.files import load_model
from monta_megatron.tools.plan.layout_ranking import rank_layouts

MIXTRAL = ["--model", str(CONFIGS / "models" / "mixtral_8x7b.yaml")]
A800 = ["--cluster", str(CONFIGS / "clusters" / "a800_2x8_ib200.yaml")]


QWEN = [
    *("--model", str(CONFIGS / "models" / "qwen3_235b_a22b.yaml")),
    *("--cluster", str(CONFIGS / "clusters" / "h100_8x_ndr.yaml")),
    *("--world-size", "128", "--tp", "2", "--ep", "16", "--pp", "4"),
]


def test_the_benefit_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    benefit = document(capsys, "plan", *QWEN)["benefit"]
    # 94 layers in 4 stages: one has 24 of them.
    assert (benefit["moe_layers"], benefit["micro_batches"]) == (24, None)
    assert benefit["saved_s_per_iteration"] is None and benefit["ratio"] > 1.3
    # 512 sequences of 16 data parallel ranks are 32 micro-batches of 1.
    planned = document(capsys, "plan", *QWEN, "--global-batch-size", "512")
    benefit = planned["benefit"]
    assert benefit["micro_batches"] == 32
    assert benefit["saved_s_per_iteration"] == pytest.approx(benefit["saved_us"] * 24 * 32 / 1e6)
    by_chain = {entry["chain"]: entry["predicted_us"] for entry in planned["candidates"]}
    assert benefit["saved_us"] == pytest.approx(by_chain["alltoall"] - planned["predicted_us"])
    assert benefit["percent"] == pytest.approx(100 * (1 - 1 / benefit["ratio"]))


def test_a_batch_has_to_be_shared_evenly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *QWEN, "--global-batch-size", "100"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "monta plan: --global-batch-size: got 100, must be a multiple of 16, which is "
        "micro_batch_size of qwen3_235b_a22b (1) times data parallel size (16)\n"
    )


def test_why_not_this_chain(capsys: pytest.CaptureFixture[str]) -> None:
    """Asking does not change the choice, nor do 16 chunks, which are no candidate."""

    plain = document(capsys, "plan", *QWEN)
    for flags, chunks in (([], 4), (["--num-chunks", "2"], 2), (["--num-chunks", "16"], 16)):
        shown = document(capsys, "plan", *QWEN, "--chain", "HIERARCHICAL-alltoall", *flags)
        asked = shown.pop("asked")
        assert shown == plain
        assert (asked["chain"], asked["num_chunks"]) == ("hierarchical_alltoall", chunks)
        assert (asked["rejected"] is None) == (chunks == 4)
        assert (asked in plain["candidates"]) == (chunks != 16)


def test_json_without_a_layout_has_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    planned = document(capsys, "plan", *MIXTRAL, *A800)
    layouts = planned["layouts"]
    costs = [entry["us_per_1k_tokens"] for entry in layouts]
    assert costs == sorted(costs) and len(costs) > 10
    best = layouts[0]
    assert (best["chain"], best["ep"]) == (planned["chain"], planned["key"]["ep"])
    # EP 8 inside a node before EP 8 across both.
    assert (best["ep"], best["etp"]) == (8, 1)


def test_the_ranking_follows_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    def layouts(*flags: str) -> list[dict[str, Any]]:
        return list(document(capsys, "plan", *MIXTRAL, *A800, *flags)["layouts"])

    assert {layout["tokens_per_rank"] for layout in layouts("--tokens", "64")} == {64}
    costs = {"uniform": 0.0, "skewed": 0.0}
    for routing in costs:
        costs[routing] = layouts("--routing", routing)[0]["predicted_us"]
    assert costs["skewed"] > costs["uniform"]


def test_layout_file_under_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "layout.yaml"
    path.write_text("world_size: 16\ntp: 2\nep: 2\netp: 2\n")
    words = ["--layout", str(path), "--ep", "4"]
    key = document(capsys, "plan", *MIXTRAL, *A800, *words)["key"]
    assert (key["ep"], key["etp"], key["tokens_per_rank"]) == (4, 2, 2048)


def test_a_layout_costs_what_its_slowest_exchange_costs() -> None:
    model = load_model(CONFIGS / "models" / "mixtral_8x7b.yaml")

    def shapes(layout: ParallelLayout) -> list[Shape]:
        place = layout_of(layout.ep, layout.etp, 8, model.num_experts)
        return [shape_of_model(model, place, tokens) for tokens in (64, 4096, 128)]

    ranking = rank_layouts(model, preset("a800_2x8_ib200"), world_size=16, shapes=shapes)
    assert {layout.tokens_per_rank for layout in ranking} == {4096}


def test_tensor_and_context_parallel_ranks_share_a_sequence() -> None:
    model = replace(
        load_model(CONFIGS / "models" / "mixtral_8x7b.yaml"),
        seq_length=4096,
        micro_batch_size=3,
    )
    layout = ParallelLayout(world_size=16, tp=2, cp=4)
    assert layout.tokens_per_rank(model) == 3 * 4096 // 8
    assert layout.incompatibility(model) is None
    # Context parallelism cuts a sequence into 2 x 4 parts, and 2 tensor parallel ranks share each.
    assert layout.incompatibility(replace(model, seq_length=16)) is None
    assert str(layout.incompatibility(replace(model, seq_length=8))).startswith(
        "tp: got 2, must divide seq-length of mixtral_8x7b (8) together with cp (4)"
    )
