"""Architectures of the run presets, against what is published of the models."""

import pytest

from monta_megatron.common import presets
from monta_megatron.planner.models.files import load_model
from monta_megatron.tools.estimate.iteration import stage_parameters
from monta_megatron.tools.estimate.layers import (
    Architecture,
    TrainingSettings,
    architecture_of,
    settings_of,
)
from monta_megatron.tools.launch.prepare import read_run

RUNS = sorted(path.stem for path in (presets.FOLDER / "runs").glob("*.yaml"))


def architecture(run: str, *words: str) -> Architecture:
    file = str(presets.find("runs", run))
    return architecture_of(read_run(file, words)[1].arguments, file)


@pytest.mark.parametrize("run", [run for run in RUNS if run not in ("quickstart", "monta_2x70b")])
def test_parameters_are_those_of_the_model(run: str) -> None:
    """Within 1%, with norms and biases left out; a tied embedding counts twice here."""
    of = architecture(run)
    whole = TrainingSettings(world_size=1, global_batch_size=1)
    held = stage_parameters(of, whole)
    given = load_model(run).num_parameters_billions * 1e9
    assert held.of_experts + held.others == pytest.approx(given, rel=0.01)


@pytest.mark.parametrize(
    ("run", "flops"), [("qwen3_30b_a3b", 2.30e10), ("qwen3_235b_a22b", 1.48e11)]
)
def test_flops_per_token_are_the_published_ones(run: str, flops: float) -> None:
    assert architecture(run).model_flops_per_token(4096) == pytest.approx(flops, rel=0.01)


def test_types_of_attention() -> None:
    assert architecture("deepseek_v3").attention_name == "attention (MLA)"
    assert architecture("qwen3_30b_a3b").attention_name == "attention (GQA)"
    assert architecture("olmoe_1b_7b").attention_name == "attention (MHA)"
    windowed = architecture("gpt_oss_120b")
    # 36 layers, every other one with a window of 128 tokens.
    assert (windowed.window_size, windowed.windowed_share) == (128, 0.5)
    deepseek = architecture("deepseek_v3")
    assert (deepseek.num_layers, deepseek.num_dense_layers) == (61, 3)


@pytest.mark.parametrize(
    ("freq", "share"), [("4", 0.75), ("([1]*3+[0])*12", 0.75), ("[1]*48", 1.0), ("[0]*48", 0.0)]
)
def test_layers_with_linear_attention(freq: str, share: float) -> None:
    variant = ("--experimental-attention-variant", "gated_delta_net")
    of = architecture("qwen3_30b_a3b", *variant, "--linear-attention-freq", freq)
    assert of.num_layers == 48 and of.linear_share == share
    other = architecture("qwen3_30b_a3b", "--experimental-attention-variant", "dsa")
    assert other.linear is None


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"quickstart.yaml: megatron.vocab-size: missing"):
        architecture("quickstart", "--vocab-size", "false")
    with pytest.raises(ValueError, match=r"--window-size: got all, must be two numbers"):
        architecture("gpt_oss_120b", "--window-size", "all")


def test_settings_of_a_run() -> None:
    file = str(presets.find("runs", "qwen3_235b_a22b"))
    merged = read_run(file, [])[1]
    settings = settings_of(merged.arguments, merged.config.layout.parallel)
    # 96 slots, with embedding and loss, on 8 stages in parts of 3.
    assert (settings.virtual_stages, settings.recompute) == (3, "selective")
    assert (settings.num_micro_batches, settings.tokens_per_rank) == (128, 2048)
    assert settings.permute_fusion and not settings.overlap
    changed = settings_of(
        merged.arguments, merged.config.layout.parallel, {"global_batch_size": 32}
    )
    assert changed.num_micro_batches == 2
