"""Models from config.json: 20 published ones, what is named as unread, and refusals of one line."""

import ast
import json
from difflib import ndiff
from pathlib import Path
from typing import Any

import golden
import pytest
from published_configs import (
    CONFIGS,
    NEEDS_TRANSFORMER_ENGINE,
    NO_PRESET,
    NUM_PARAMETERS,
    OF_THE_CLASS,
    model_of_config,
)

from monta_megatron.planner.model import Model, load_arguments, load_model

GOLDEN = Path(__file__).parent / "golden"
PARAMETERS = {**NUM_PARAMETERS, **OF_THE_CLASS}
# Presets of a family are its published model.
PRESETS = {name: name for name in CONFIGS.keys() - NO_PRESET}
PRESETS |= {"glm4_moe": "glm_4_5_air", "qwen3_next": "qwen3_next_80b_a3b"}
# What config.json does not say, or a preset chooses: the run of training, and positions of MLA.
CHOSEN = {"moe-aux-loss-coeff", "moe-router-load-balancing-type", "max-position-embeddings"}
CHOSEN |= {"moe-router-bias-update-rate", "seq-length", "init-method-std", "moe-z-loss-coeff"}
# Of rope_scaling, which is named as not read.
CHOSEN |= {"position-embedding-type"}
# Layers, with experts, experts, of a token, FFN size of one, heads, groups, of a token.
SIZES = {
    "qwen2_moe": (24, 24, 60, 4, 1408, 16, None, None),
    "glm4_moe": (46, 45, 128, 8, 1408, 96, None, None),
    "ernie4_5_moe": (28, 27, 64, 6, 1536, 20, None, None),
    "minimax_m2": (62, 62, 256, 8, 1536, 48, None, None),
    "dots1": (62, 61, 128, 6, 1408, 32, None, None),
    "granitemoe": (32, 32, 40, 8, 512, 24, None, None),
    "hunyuan_v1_moe": (32, 32, 64, 8, 3072, 32, None, None),
    "llama4": (48, 48, 16, 1, 8192, 40, None, None),
    "phimoe": (32, 32, 16, 2, 6400, 32, None, None),
    "qwen3_next": (48, 48, 512, 10, 512, 16, None, None),
    "qwen3_5_moe": (40, 40, 256, 8, 512, 16, None, None),
}


SIZE_NAMES = (
    *("num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
    *("num_attention_heads", "moe_router_num_groups", "moe_router_group_topk"),
)


def sizes_of(model: Model) -> tuple[int | None, ...]:
    sizes = (getattr(model, name) for name in SIZE_NAMES)
    return (model.num_layers, sum(model.moe_layers), *sizes)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_its_published_model_or_preset(name: str) -> None:
    """Parameters to a tenth of a percent, or 1% with linear attention, which counts as full."""
    model = model_of_config(CONFIGS[name], name)
    if name in PARAMETERS:
        within = 0.01 if name in NEEDS_TRANSFORMER_ENGINE else 1e-3
        assert model.num_parameters == pytest.approx(PARAMETERS[name], rel=within)
    if name in SIZES:
        assert sizes_of(model) == SIZES[name]
    if name in PRESETS:
        preset, arguments = load_model(PRESETS[name]), load_arguments(PRESETS[name])[0]
        assert sizes_of(model) == sizes_of(preset)
        assert (model.value_bytes, model.prob_bytes) == (preset.value_bytes, preset.prob_bytes)
        told = model.arguments.keys() & arguments.keys() - CHOSEN
        assert len(told) >= 15
        assert {key: model.arguments[key] for key in told} == {key: arguments[key] for key in told}


def test_every_published_config_is_compared() -> None:
    assert SIZES.keys() == NO_PRESET
    assert PARAMETERS.keys() | PRESETS.keys() == CONFIGS.keys()


def lines_of(name: str, **changes: Any) -> list[str]:
    model = model_of_config({**CONFIGS[name], **changes}, "c")
    return [*(f"{key} {value}" for key, value in model.arguments.items()), *model.notes]


def test_keys_that_change_an_argument_or_are_named() -> None:
    def answer(case: str) -> str:
        name, _, changes = case.partition(" ")
        changed = ndiff(lines_of(name), lines_of(name, **ast.literal_eval(changes)))
        return "; ".join(line for line in changed if line[0] in "+-") or "nothing"

    golden.check_cases(GOLDEN / "keys_of_config_json.txt", answer)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("glm4_moe", {"rotary-percent": 0.5, "mtp-num-layers": 1}),
        ("qwen3_next", {"linear-attention-freq": 4, "linear-num-value-heads": 32}),
        ("hunyuan_v1_moe", {"moe-shared-expert-intermediate-size": 3072}),
        ("llama4", {"moe-shared-expert-intermediate-size": 8192, "ffn-hidden-size": 16384}),
    ],
)
def test_arguments_of_a_family(name: str, arguments: dict[str, Any]) -> None:
    assert arguments.items() <= model_of_config(CONFIGS[name], "c").arguments.items()


@pytest.mark.parametrize(
    ("changes", "experts"),
    [
        ({"decoder_sparse_step": 2}, [0, 1] * 16),
        ({"first_k_dense_replace": 3}, [0] * 3 + [1] * 29),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, [0, 0, *[1, 0] * 15]),
        ({"moe_layer_freq": [0] + [1] * 31}, [0] + [1] * 31),
        ({"mlp_layer_types": ["dense"] + ["sparse"] * 31}, [0] + [1] * 31),
        ({"interleave_moe_layer_step": 2}, [0, 1] * 16),
        ({"moe_layer_start_index": 2, "moe_layer_end_index": -1}, [0, 0] + [1] * 30),
        ({"hybrid_override_pattern": "ME*E"}, [0, 1, 0, 1]),
    ],
)
def test_layers_with_experts(changes: dict[str, Any], experts: list[int]) -> None:
    model = model_of_config({**CONFIGS["mixtral_8x7b"], **changes}, "c")
    assert list(map(int, model.moe_layers)) == experts


@pytest.mark.parametrize("part", ["text_config", "thinker_config"])
def test_an_unknown_family_with_its_text_part(part: str) -> None:
    text = {**CONFIGS["mixtral_8x7b"], "model_type": "newcomer_text"}
    inner = {"text_config": text} if part == "thinker_config" else text
    model = model_of_config({"model_type": "newcomer", part: inner}, "c")
    assert (model.num_experts, model.moe_router_topk) == (8, 2)
    assert model.name == "newcomer"
    assert model.notes[0].startswith("told by no config.json: norms of queries and keys, biases")
    assert model.notes[0].endswith("the router's scores (softmax)")


def test_groups_of_deepseek() -> None:
    """The router of DeepSeek-V2-Lite is greedy, whatever its groups; that of V3 has them."""
    for name, groups in (("deepseek_v2_lite", (None, None)), ("deepseek_v3", (8, 4))):
        model = model_of_config({**CONFIGS[name], "n_group": 8, "topk_group": 4}, "c")
        assert (model.moe_router_num_groups, model.moe_router_group_topk) == groups


def test_wrong_configs() -> None:
    def answer(changes: str) -> str:
        config = {**CONFIGS["mixtral_8x7b"], **ast.literal_eval(changes)}
        given = {key: value for key, value in config.items() if value is not None}
        return golden.refusal(model_of_config, given, "config.json")

    golden.check_cases(GOLDEN / "wrong_configs.txt", answer)


def test_a_file_and_its_folder_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    # As another editor writes it.
    path.write_text("\ufeff" + json.dumps(CONFIGS["mixtral_8x7b"]), encoding="utf-8")
    assert load_model(path).num_experts == load_model(tmp_path).num_experts == 8
    with pytest.raises(ValueError, match=r"cannot be read: is a folder without config.json$"):
        load_model(tmp_path.parent)
