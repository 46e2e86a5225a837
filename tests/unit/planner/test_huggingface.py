"""Models from config.json: published ones, what is named as unread, and refusals of one line."""

import ast
import json
import math
from difflib import ndiff
from pathlib import Path
from typing import Any

import golden
import pytest
from clusters import GOLDEN, preset
from published_configs import (
    ACTIVATIONS,
    CONFIGS,
    NEEDS_TRANSFORMER_ENGINE,
    NO_PRESET,
    NUM_PARAMETERS,
    OF_THE_CLASS,
    ROTARY_BASES,
    SAVED,
    SIGMOID_SCORES,
    model_of_config,
)

from monta_megatron.common.errors import UserError
from monta_megatron.planner import config_keys as keys
from monta_megatron.planner.model import load_arguments, load_model
from monta_megatron.planner.ranking import num_parameters, rank_layouts

PARAMETERS = {**NUM_PARAMETERS, **OF_THE_CLASS}
# Presets of a family are its published model.
PRESETS = {name: name for name in CONFIGS.keys() - NO_PRESET}
PRESETS |= {"glm4_moe": "glm_4_5_air", "qwen3_next": "qwen3_next_80b_a3b"}
# What config.json does not say, or a preset chooses: the run of training, and positions of MLA.
CHOSEN = {"moe-aux-loss-coeff", "moe-router-load-balancing-type", "max-position-embeddings"}
CHOSEN |= {"moe-router-bias-update-rate", "seq-length", "init-method-std", "moe-z-loss-coeff"}
# Of rope_scaling, which is named as not read.
CHOSEN |= {"position-embedding-type"}
# Sizes that a plan needs.
SIZES = (
    *("moe_layers", "num_experts", "moe_router_topk", "moe_ffn_hidden_size", "num_attention_heads"),
    *("moe_router_num_groups", "moe_router_group_topk", "value_bytes", "prob_bytes"),
)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_its_published_model_or_preset(name: str) -> None:
    """Parameters to a tenth of a percent, or 1% with linear attention, which counts as full."""
    model = model_of_config(CONFIGS[name], name)
    assert name in PARAMETERS.keys() | PRESETS.keys()
    if name in PARAMETERS:
        within = 0.01 if name in NEEDS_TRANSFORMER_ENGINE else 1e-3
        assert num_parameters(model) == pytest.approx(PARAMETERS[name], rel=within)
    if name in PRESETS:
        preset, arguments = load_model(PRESETS[name]), load_arguments(PRESETS[name])[0]
        assert all(getattr(model, size) == getattr(preset, size) for size in SIZES)
        told = model.arguments.keys() & arguments.keys() - CHOSEN
        assert len(told) >= 15
        assert {key: model.arguments[key] for key in told} == {key: arguments[key] for key in told}


@pytest.mark.parametrize("name", CONFIGS)
def test_router_activation_and_rotary_base_of_published_configs(name: str) -> None:
    arguments = model_of_config(CONFIGS[name], name).arguments
    scores = "sigmoid" if name in SIGMOID_SCORES else "softmax"
    assert arguments.get("moe-router-score-function", "softmax") == scores
    activations = {"swiglu", "quick-geglu", "squared-relu"} & arguments.keys()
    assert activations == {ACTIVATIONS.get(name, "swiglu")}
    if ROTARY_BASES[name] == 0:
        assert arguments["position-embedding-type"] == "none"
    else:
        assert arguments["rotary-base"] == ROTARY_BASES[name]


def test_files_saved_by_transformers() -> None:
    """Two versions of one model, and families whose layers are in lists or follow a period."""
    models = {name: model_of_config(data, name) for name, data in SAVED.items()}
    old = models["qwen3_moe_of_transformers_4"]
    new = models["qwen3_moe_of_transformers_5"]
    assert new.arguments["rotary-base"] == old.arguments["rotary-base"] == 1_000_000
    assert num_parameters(new) == num_parameters(old) == pytest.approx(30_532_122_624, rel=1e-3)
    assert not new.uncounted and not old.uncounted

    deepseek = models["deepseek_v4_published"]
    assert deepseek.arguments["moe-router-score-function"] == "sqrtsoftplus"
    assert deepseek.arguments["moe-router-enable-expert-bias"]
    assert "o_lora_rank" in deepseek.uncounted

    jamba = models["jamba"]
    assert [layer for layer in range(32) if jamba.moe_layers[layer]] == list(range(1, 32, 2))
    assert num_parameters(jamba) is None
    assert "mamba_d_conv" in jamba.uncounted

    nemotron = models["nemotron_h_of_transformers_5"]
    assert nemotron.moe_layers == (False, True, False, False)
    # Mamba with 128 heads of 64, 8 groups and 128 states; 8 experts and a shared one; attention
    # with 32 and 8 heads of 128; an FFN; embedding and output layer. No gates.
    mamba = 4096 * (2 * 8192 + 2 * 8 * 128 + 128) + 4 * (8192 + 2 * 8 * 128) + 8192 * 4096
    experts = 9 * 2 * 4096 * 7688 + 4096 * 8
    attention, dense = 4096 * 128 * 2 * (32 + 8), 2 * 4096 * 21504
    assert num_parameters(nemotron) == mamba + experts + attention + dense + 2 * 131072 * 4096


def test_layouts_are_not_ranked_without_a_count() -> None:
    model = model_of_config(SAVED["jamba"], "jamba")
    with pytest.raises(UserError, match=r"mamba_d_conv.*cannot be ranked by memory"):
        rank_layouts(model, preset("h100_8x_ndr"), 16, None)


def lines_of(name: str, **changes: Any) -> list[str]:
    model = model_of_config({**CONFIGS[name], **changes}, "c")
    return [*(f"{key} {value}" for key, value in model.arguments.items()), *model.notes]


def test_arguments_of_published_configs() -> None:
    lines = {name: "; ".join(lines_of(name)) for name in CONFIGS}
    golden.check_lines(GOLDEN / "published_configs.txt", lines)


def test_keys_that_change_an_argument_or_are_named() -> None:
    def answer(case: str) -> str:
        name, _, changes = case.partition(" ")
        changed = ndiff(lines_of(name), lines_of(name, **ast.literal_eval(changes)))
        return "; ".join(line for line in changed if line[0] in "+-") or "nothing"

    golden.check_cases(GOLDEN / "keys_of_config_json.txt", answer)


def test_wrong_configs() -> None:
    def answer(changes: str) -> str:
        config = {**CONFIGS["mixtral_8x7b"], **ast.literal_eval(changes)}
        given = {key: value for key, value in config.items() if value is not None}
        return golden.refusal(model_of_config, given, "config.json")

    golden.check_cases(GOLDEN / "wrong_configs.txt", answer)


# Values of every type; a number of layers or experts that no memory would hold is among them.
OF_ANY_TYPE = (
    *(None, True, False, "x", "12", "", 0, -1, 1.5, 1e6, 10**12, math.inf, math.nan),
    *([], [1, "a"], [{}], [[1]], ["x"], [None], {}, {"a": 1}, {"a": {}}, {"rope_type": []}),
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["mixtral_8x7b", "qwen3_next", "deepseek_v3", "jamba"])
def test_any_value_of_any_key_is_read_or_refused_in_one_line(name: str) -> None:
    config = {**CONFIGS, **SAVED}[name]
    for key in sorted(keys.READ | keys.READ_WITH_MAMBA | config.keys()):
        for value in OF_ANY_TYPE:
            try:
                model = model_of_config({**config, key: value}, "config.json")
                lines = model.notes
            except UserError as problem:
                lines = (str(problem),)
            assert not any("\n" in line for line in lines)


def test_a_file_and_its_folder_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    # As another editor writes it.
    path.write_text("\ufeff" + json.dumps(CONFIGS["mixtral_8x7b"]), encoding="utf-8")
    assert load_model(path).num_experts == load_model(tmp_path).num_experts == 8
