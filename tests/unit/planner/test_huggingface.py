"""Models from config.json: published ones are the presets, and bad ones are refused in one line."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from published_configs import CONFIGS, NO_PRESET, NUM_PARAMETERS, OF_THE_CLASS

from monta_megatron.common import files, presets
from monta_megatron.planner.models.arguments import TRAITS
from monta_megatron.planner.models.families import FAMILIES
from monta_megatron.planner.models.files import load_model, model_of_config
from monta_megatron.planner.models.model import Model, with_batch

# What a preset has from elsewhere: its name, and the number that its paper or model card rounds.
NOT_COMPARED = {"name", "source", "num_parameters_billions", "assumed", "megatron"}
OWN = {"quickstart", "monta_2x70b"}
# In place of a value: the key is left out.
MISSING = object()


def written(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent="\t"))
    return path


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - NO_PRESET))
def test_a_published_config_is_the_preset(name: str) -> None:
    model, preset = model_of_config(CONFIGS[name], name), load_model(name)
    for entry in fields(Model):
        if entry.name not in NOT_COMPARED:
            assert getattr(model, entry.name) == getattr(preset, entry.name), entry.name
    assert model.num_parameters_billions == pytest.approx(preset.num_parameters_billions, rel=0.005)


def test_every_preset_with_a_config_is_compared() -> None:
    names = {path.stem for path in (presets.FOLDER / "models").glob("*.yaml")}
    assert names - OWN == CONFIGS.keys() - NO_PRESET
    compared = {config["model_type"] for config in CONFIGS.values()}
    # Read as DeepSeek-V3, and text parts without their wrapper.
    others = {"kimi_k2", "deepseek_v32", "llama4_text", "qwen3_5_moe_text"}
    assert FAMILIES.keys() - compared == others
    assert TRAITS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", [*NUM_PARAMETERS, *OF_THE_CLASS])
def test_counted_parameters_are_the_published_ones(name: str) -> None:
    """To less than a tenth of a percent: norms and biases are not counted."""
    counted = model_of_config(CONFIGS[name], name).num_parameters_billions * 1e9
    assert counted == pytest.approx({**NUM_PARAMETERS, **OF_THE_CLASS}[name], rel=1e-3)


def test_every_config_has_a_number_of_parameters() -> None:
    assert CONFIGS.keys() == NUM_PARAMETERS.keys() | OF_THE_CLASS.keys()
    assert not NUM_PARAMETERS.keys() & OF_THE_CLASS.keys()


@pytest.mark.parametrize(
    ("name", "changes", "arguments"),
    [
        ("glm4_moe", {}, {"add-qkv-bias": True, "rotary-percent": 0.5, "mtp-num-layers": 1}),
        ("glm4_moe", {"partial_rotary_factor": None}, {"rotary-percent": 0.5}),
        ("minimax_m2", {}, {"rotary-percent": 0.5, "moe-router-score-function": "sigmoid"}),
        ("ernie4_5_moe", {}, {"rotary-interleaved": True, "rotary-base": 500_000}),
        ("ernie4_5_moe", {"use_bias": True}, {"disable-bias-linear": None}),
        ("phimoe", {"rope_theta": None}, {"rotary-base": 1_000_000, "add-qkv-bias": True}),
        ("dots1", {}, {"qk-layernorm": True, "moe-router-enable-expert-bias": True}),
        ("granitemoe", {}, {"moe-router-pre-softmax": None, "rotary-base": 10_000}),
        ("qwen3_30b_a3b", {"norm_topk_prob": None}, {"moe-router-pre-softmax": True}),
        ("qwen3_next", {}, {"linear-attention-freq": 4, "linear-num-value-heads": 32}),
        (
            "qwen3_next",
            {"layer_types": None, "full_attention_interval": 2},
            {"linear-attention-freq": 2},
        ),
        # An integer would say that the last of every two is the one without linear attention.
        (
            "qwen3_next",
            {"layer_types": ["full_attention", "linear_attention"] * 24},
            {"linear-attention-freq": f"[{','.join(['0,1'] * 24)}]"},
        ),
        ("qwen3_5_moe", {}, {"linear-attention-freq": 4, "mtp-num-layers": 1}),
        ("llama4", {}, {"no-rope-freq": 4, "qk-l2-norm": True, "qk-layernorm": None}),
        ("hunyuan_v1_moe", {}, {"moe-shared-expert-intermediate-size": 3072}),
    ],
)
def test_arguments_of_a_family(
    name: str, changes: dict[str, Any], arguments: dict[str, Any]
) -> None:
    megatron = model_of_config({**CONFIGS[name], **changes}, "c").megatron
    assert {key: megatron.get(key) for key in arguments} == arguments


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("phimoe", {}, "attention_bias of the output (queries, keys and values have theirs)"),
        ("phimoe", {}, "a bias of the output layer"),
        ("phimoe", {}, "rotary scaling 'longrope'"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias (latent attention has none)"),
        ("dots1", {"norm_topk_prob": False}, "norm_topk_prob false (Megatron scales sigmoid "),
        ("minimax_m2", {}, "num_mtp_modules (no multi-token prediction; "),
        ("llama4", {}, "attention in chunks (attention is to all keys)"),
        ("llama4", {}, "vision_config"),
        ("hunyuan_v1_moe", {"use_cla": True}, "use_cla (layers do not share keys and values)"),
        ("hunyuan_v1_moe", {}, "rotary scaling 'dynamic'"),
    ],
)
def test_the_rest_of_a_family_is_named(name: str, changes: dict[str, Any], text: str) -> None:
    model = model_of_config({**CONFIGS[name], **changes}, "c")
    assert [each for each in model.not_expressed if each.startswith(text)]


def test_attention_without_output_bias_is_expressed() -> None:
    assert model_of_config(CONFIGS["glm4_moe"], "c").not_expressed == ()


@pytest.mark.parametrize(
    ("key", "value", "is_named"),
    [
        ("layer_types", ["linear_attention", "full_attention"] * 16, True),
        ("layer_types", ["full_attention"] * 32, False),
        ("attn_type_list", [0, 1] * 16, True),
        ("attn_type_list", [1] * 32, False),
        ("linear_num_key_heads", 16, True),
        ("mamba_d_state", 128, True),
        ("attention_bias", True, True),
        ("attention_bias", False, False),
        ("sliding_window", 4096, True),
        ("shared_expert_intermediate_size", 0, False),
        ("zero_expert_num", 256, True),
    ],
)
def test_keys_of_an_unknown_family_that_are_not_read(key: str, value: Any, is_named: bool) -> None:
    config = {**CONFIGS["mixtral_8x7b"], "model_type": "newcomer", key: value}
    model = model_of_config(config, "c")
    assert [text.partition(" ")[0] for text in model.not_expressed] == [key] * is_named
    assert (f"not read, though it changes the model: {key}" in model.notes[0]) == is_named
    assert "add-qkv-bias" not in model.megatron


def test_an_unknown_family_has_its_text_part_and_its_scores() -> None:
    text = {**CONFIGS["mixtral_8x7b"], "model_type": "newcomer_text", "scoring_func": "sigmoid"}
    model = model_of_config({"model_type": "newcomer", "text_config": text}, "c")
    assert model.num_experts == 8
    assert model.megatron["moe-router-score-function"] == "sigmoid"
    assert "; norms as most models have them" in model.notes[0]


@pytest.mark.parametrize("values", [[8] * 31 + [4], [64, 64]])
def test_layers_that_differ_are_refused(values: list[int]) -> None:
    for model_type in ("hunyuan_v1_moe", "newcomer"):
        config = {**CONFIGS["hunyuan_v1_moe"], "model_type": model_type, "moe_topk": values}
        with pytest.raises(ValueError, match=rf"^c: moe_topk: got a list of {len(values)} values"):
            model_of_config(config, "c")


def test_an_unknown_family_is_read_by_common_names() -> None:
    config = {**CONFIGS["mixtral_8x7b"], "model_type": "newcomer"}
    model, known = model_of_config(config, "c"), model_of_config(CONFIGS["mixtral_8x7b"], "c")
    assert model.num_parameters_billions == known.num_parameters_billions
    assert (model.num_experts, model.moe_router_topk) == (8, 2)
    note = model.notes[0]
    assert note.startswith("the family newcomer is not known; taken from its keys: ")
    assert "experts num_local_experts, experts of a token num_experts_per_tok" in note
    assert "FFN size of an expert intermediate_size" in note
    assert "not told, taken as none: shared experts, dense layers first" in note


def test_a_model_without_experts_is_told_so() -> None:
    config = {**CONFIGS["mixtral_8x7b"], "model_type": "llama"}
    del config["num_local_experts"]
    with pytest.raises(ValueError, match=r"^c: model_type: got llama, has no experts .* no exch"):
        model_of_config(config, "c")


def test_a_file_and_its_folder_are_the_same(tmp_path: Path) -> None:
    path = written(tmp_path, CONFIGS["mixtral_8x7b"])
    assert load_model(path) == load_model(tmp_path)
    assert load_model(path).name == "mixtral 46.7B"
    # A folder of this name is no preset, because it holds a model.
    with pytest.raises(ValueError, match=r"cannot be read: is a folder without config.json$"):
        load_model(tmp_path.parent)


def test_what_is_assumed_is_noted_until_it_is_given() -> None:
    model = model_of_config({**CONFIGS["olmoe_1b_7b"], "max_position_embeddings": 1024}, "c")
    assert (model.seq_length, model.micro_batch_size) == (1024, 1)
    (note,) = model.notes
    assert "seq_length 1024, micro_batch_size 1, dtype bf16, probs_dtype fp32" in note
    assert note.endswith("; --seq-length, --micro-batch-size for others")
    (note,) = with_batch(model, 8192, 2).notes
    assert note.endswith("assumed: dtype bf16, probs_dtype fp32")
    assert load_model("olmoe_1b_7b").notes == ()


@pytest.mark.parametrize(
    ("changes", "num_moe_layers"),
    [
        ({"decoder_sparse_step": 2}, 24),
        ({"mlp_only_layers": [0, 1, 47, 99]}, 45),
        # Layers 1, 3, 5 and so on, of which 1 and 47 are dense.
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1, 47]}, 22),
    ],
)
def test_dense_layers_of_qwen(changes: dict[str, Any], num_moe_layers: int) -> None:
    model = model_of_config({**CONFIGS["qwen3_30b_a3b"], **changes}, "c")
    assert model.num_moe_layers == num_moe_layers


@pytest.mark.parametrize(
    ("first", "freq", "num_moe_layers"), [(0, 1, 27), (1, 1, 26), (1, 2, 13), (4, 3, 7)]
)
def test_dense_layers_of_deepseek(first: int, freq: int, num_moe_layers: int) -> None:
    changes = {"first_k_dense_replace": first, "moe_layer_freq": freq}
    model = model_of_config({**CONFIGS["deepseek_v2_lite"], **changes}, "c")
    assert model.num_moe_layers == num_moe_layers
    assert num_moe_layers == sum(layer >= first and layer % freq == 0 for layer in range(27))


def test_what_is_null_or_missing_means_what_it_means_there() -> None:
    mixtral = {**CONFIGS["mixtral_8x7b"], "num_key_value_heads": None}
    assert model_of_config(mixtral, "c").num_query_groups == 32
    # DeepSeek-V2's router has groups only where the file says so, that of V3 always.
    for name, groups in (("deepseek_v2_lite", (None, None)), ("deepseek_v3", (8, 4))):
        config = {**CONFIGS[name], "n_group": 8, "topk_group": 4}
        del config["topk_method"]
        model = model_of_config(config, "c")
        assert (model.moe_router_num_groups, model.moe_router_group_topk) == groups


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("mixtral_8x7b", {"num_key_value_heads": 5}, "must divide num_attention_heads (32)"),
        ("mixtral_8x7b", {"num_attention_heads": 24}, "must divide hidden_size (4096)"),
        ("mixtral_8x7b", {"num_experts_per_tok": 9}, "must be at most num_local_experts (8)"),
        ("mixtral_8x7b", {"num_local_experts": 99_999}, "must be at most 65536"),
        ("dbrx", {"n_heads": 100}, "must divide d_model (6144)"),
        ("qwen3_30b_a3b", {"decoder_sparse_step": 49}, "of num_hidden_layers (48)"),
        ("deepseek_v3", {"first_k_dense_replace": 62}, "of num_hidden_layers (61)"),
        ("deepseek_v3", {"n_group": 7}, "must divide n_routed_experts (256)"),
        ("deepseek_v3", {"topk_group": 9}, "must be from 1 to n_group (8)"),
        ("deepseek_v3", {"topk_group": None}, "must be from 1 to n_group (8)"),
        ("deepseek_v3", {"n_group": 64, "topk_group": 1}, "num_experts_per_tok (8) experts"),
    ],
)
def test_errors_name_the_fields_of_the_file(
    name: str, changes: dict[str, Any], expected: str
) -> None:
    (field, value) = list(changes.items())[-1]
    with pytest.raises(ValueError) as error:
        model_of_config({**CONFIGS[name], **changes}, "c")
    assert str(error.value).startswith(f"c: {field}: got {value}, must "), error.value
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": None}, "model_type: missing, must be the name of a family"),
        ({"model_type": 3}, "model_type: got 3, must be the name of a family"),
        ({"num_local_experts": "8"}, "num_local_experts: got '8', must be an integer >= 1"),
        (
            {"num_key_value_heads": MISSING, "intermediate_size": MISSING},
            "num_key_value_heads, intermediate_size: missing, must be given",
        ),
    ],
)
def test_a_bad_config(changes: dict[str, Any], expected: str) -> None:
    config = {**CONFIGS["mixtral_8x7b"], **changes}
    config = {name: value for name, value in config.items() if value is not MISSING}
    with pytest.raises(ValueError) as error:
        model_of_config(config, "c")
    assert str(error.value).startswith(f"c: {expected}")
    with pytest.raises(ValueError, match=r"^c: must be a mapping, as a config"):
        model_of_config([config], "c")


def test_heads_of_dbrx_share_keys() -> None:
    config = CONFIGS["dbrx"]
    attention = {**config["attn_config"], "kv_n_heads": 7}
    with pytest.raises(ValueError, match=r"^c: attn_config.kv_n_heads: got 7, must divide n_heads"):
        model_of_config({**config, "attn_config": attention}, "c")


def test_a_config_of_another_editor(tmp_path: Path) -> None:
    path = tmp_path / "MIXTRAL.JSON"
    path.write_text("\ufeff" + json.dumps(CONFIGS["mixtral_8x7b"]), encoding="utf-8")
    assert load_model(path).num_experts == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1,}', "config.json: is no JSON in line 1: "),
        ('{"a": 1234567890123456789}', "an integer of 19 characters, must have at most 18"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": 1, "a": 2}', "key 'a' is written twice"),
        (f'"{"x" * 1_000_001}"', "is too large, must hold at most 1,000,000 bytes"),
    ],
)
def test_a_bad_document_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        files.read(path)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{path}: ") and expected in line and len(line) < 300
