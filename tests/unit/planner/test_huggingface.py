"""Models from config.json: published ones are the presets, and bad ones are refused in one line."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from published_configs import CONFIGS, NO_PRESET, NUM_PARAMETERS, ROUNDED

from monta_megatron.common import presets, strict_json
from monta_megatron.planner.huggingface import model_of_config
from monta_megatron.planner.model import Model, load_model, with_batch
from monta_megatron.planner.model_arguments import TRAITS
from monta_megatron.planner.model_families import FAMILIES

# What a preset has from elsewhere: its name, and the number that its paper or model card rounds.
NOT_COMPARED = {"name", "source", "num_parameters_billions", "assumed", "megatron"}
OWN = {"quickstart", "monta_2x70b"}


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
    # Read by the classes of others: DeepSeek-V3, GLM-4.5 and Mixtral.
    others = {"kimi_k2", "deepseek_v32", "dots1", "granitemoe", "phimoe"}
    assert FAMILIES.keys() - compared == others
    assert TRAITS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_counted_parameters_are_the_published_ones(name: str) -> None:
    """To less than a tenth of a percent: norms and biases are not counted."""
    counted = model_of_config(CONFIGS[name], name).num_parameters_billions * 1e9
    assert counted == pytest.approx(NUM_PARAMETERS[name], rel=1e-3)


@pytest.mark.parametrize("name", ROUNDED)
def test_counted_parameters_are_those_of_the_model_card(name: str) -> None:
    """Within 4%: model cards round, and some count the layers of multi-token prediction."""
    counted = model_of_config(CONFIGS[name], name).num_parameters_billions * 1e9
    assert counted == pytest.approx(ROUNDED[name], rel=0.04)


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
        (f'"{"x" * 1_000_001}"', "is too large, must hold at most 1,000,000 bytes"),
    ],
)
def test_a_bad_document_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        strict_json.read(path)
    (line,) = str(error.value).splitlines()
    assert line.startswith(f"{path}: ") and expected in line and len(line) < 300
