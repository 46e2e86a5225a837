"""Load a model by its name, its file, or the config.json of Hugging Face.

No config.json holds the settings of a training: `SEQ_LENGTH` and `ASSUMED` give them.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from monta_megatron.common import files, presets, strict_yaml
from monta_megatron.common.text import shown
from monta_megatron.planner.models.arguments import (
    BIASED_SIGMOID,
    TRAITS,
    Details,
    Traits,
    arguments_of,
    unexpressed,
)
from monta_megatron.planner.models.families import FAMILIES, DeepseekV3, Glm4Moe
from monta_megatron.planner.models.model import Model

# The sequence length, if the model has so many positions; and the rest.
SEQ_LENGTH = 4096
ASSUMED = {"micro_batch_size": 1, "dtype": "bf16", "probs_dtype": "fp32"}

# Our reading of an unknown family: name in GLM-4.5 -> names elsewhere, the first that is there.
COMMON_NAMES = {
    "n_routed_experts": (
        *("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
        *("num_moe_experts", "num_routed_experts"),
    ),
    "num_experts_per_tok": (
        *("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "experts_per_token"),
        *("num_experts_per_token", "top_k_experts"),
    ),
    "moe_intermediate_size": (
        *("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
        *("expert_intermediate_size", "intermediate_size"),
    ),
    "intermediate_size": ("intermediate_size", "ffn_hidden_size", "moe_intermediate_size"),
    "n_shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "first_k_dense_replace": (
        *("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
    ),
}
# Keys that may be a list of a number for each layer.
PER_LAYER = {name for names in COMMON_NAMES.values() for name in names} | {"num_shared_expert"}
PER_LAYER |= {"hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"}
# Keys of an unknown family that make another model of it than the sizes say, unless they are
# null, false, 0 or 1; and beginnings of such keys.
NOT_READ = (
    *("layer_types", "layers_block_type", "hybrid_override_pattern", "hybrid_layer_pattern"),
    *("attn_type_list", "linear_attn_config", "full_attention_interval", "attn_layer_period"),
    *("sliding_window", "attention_chunk_size", "index_topk", "compress_ratios", "use_cla"),
    *("attention_bias", "qkv_bias", "use_bias", "mlp_bias", "clip_qkv", "zero_expert_num"),
    *("moe_layers", "interleave_moe_layer_step", "decoder_sparse_step", "mlp_only_layers"),
    *("moe_layer_interval", "mlp_layer_types", "shared_expert_intermediate_size"),
    *("shared_intermediate_size", "no_rope_layers", "logits_scaling", "vision_config"),
)
NOT_READ_BEGINNINGS = ("linear_", "mamba_", "ssm_", "embedding_mult", "residual_mult")
MEANINGS = {
    "n_routed_experts": "experts",
    "num_experts_per_tok": "experts of a token",
    "moe_intermediate_size": "FFN size of an expert",
    "intermediate_size": "FFN size of a dense layer",
    "n_shared_experts": "shared experts",
    "first_k_dense_replace": "dense layers first",
}


def model_of_config(data: Any, file: str) -> Model:
    """The model of a config.json.

    Args:
        data: its plain data.
        file: for messages, and as the model's source.

    Raises:
        ValueError: one line that names the file, the field, its value and the rule; all fields
            that are missing together.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{file}: must be a mapping, as a config.json of Hugging Face is")
    model_type = data.get("model_type")
    if not isinstance(model_type, str) or not model_type.strip():
        given = "missing" if model_type is None else f"got {shown(repr(model_type)[:60])}"
        raise ValueError(
            f"{file}: model_type: {given}, must be the name of a family; for a model without one "
            "write a file of its own, see docs/files.md"
        )
    model_type = model_type[:60]
    if isinstance(data.get("text_config"), Mapping):
        data = {**data, **data["text_config"], "model_type": model_type}
    data = of_all_layers(data, file)
    taken: list[str] = []
    is_known = model_type in FAMILIES
    traits = TRAITS[model_type] if is_known else _traits_of_unknown(data)
    if not is_known:
        data, taken = in_common_names(data, file)
    family = FAMILIES.get(model_type) or (DeepseekV3 if "kv_lora_rank" in data else Glm4Moe)
    sizes = strict_yaml.build(family, _known(family, data), file).dimensions()
    # DBRX has its attention and its experts in mappings of their own.
    inner = [data[name] for name in ("attn_config", "ffn_config") if name in data]
    flat = {name: value for part in (*inner, data) for name, value in part.items()}
    details = strict_yaml.build(Details, _known(Details, flat), file)
    if is_known and data.get("vision_config") is not None:
        traits = replace(traits, not_expressed=(*traits.not_expressed, "vision_config"))
    billions = sizes.num_parameters / 1e9
    seq_length = min(SEQ_LENGTH, sizes.max_positions or SEQ_LENGTH)
    assumed = {"seq_length": seq_length, **ASSUMED}
    values = {
        "name": f"{model_type} {billions:.3g}B",
        "source": f"{shown(file)}; parameters: counted from its sizes, norms and biases left out",
        "hidden_size": sizes.hidden_size,
        "num_layers": sizes.num_layers,
        "num_moe_layers": sizes.num_moe_layers,
        "num_attention_heads": sizes.num_attention_heads,
        "num_query_groups": sizes.num_query_groups,
        "num_experts": sizes.num_experts,
        "moe_router_topk": sizes.topk,
        "moe_ffn_hidden_size": sizes.expert_ffn_size,
        "num_parameters_billions": float(f"{billions:.4g}"),
        "moe_router_num_groups": sizes.num_groups,
        "moe_router_group_topk": sizes.group_topk,
        "taken": taken,
        "megatron": arguments_of(traits, details, sizes),
        "not_expressed": list(unexpressed(traits, details)),
        **assumed,
        "assumed": list(assumed),
    }
    return strict_yaml.build(Model, values, file)


def of_all_layers(data: Mapping[str, Any], file: str) -> dict[str, Any]:
    """The same with a number for each list that repeats it for every layer.

    Raises:
        ValueError: layers differ, or the list is not one of layers.
    """
    flat = dict(data)
    layers = data.get("num_hidden_layers")
    for name in sorted(PER_LAYER & data.keys()):
        values = data[name]
        if not isinstance(values, list):
            continue
        if len(values) != layers or any(value != values[0] for value in values):
            raise ValueError(
                f"{file}: {name}: got a list of {len(values)} values, must be a number or the same "
                f"number for each of num_hidden_layers ({shown(repr(layers)[:20])}); Megatron's "
                "layers are alike, so write a file of its own, see docs/files.md"
            )
        flat[name] = values[0]
    return flat


def _traits_of_unknown(data: Mapping[str, Any]) -> Traits:
    """Traits of an unknown family's router by its keys, and the keys that cannot be read."""
    is_sigmoid = data.get("scoring_func") == "sigmoid"
    # A bias of each expert comes with sigmoid scores in all families that are known.
    arguments = BIASED_SIGMOID if is_sigmoid else {}
    known = "its meaning in this family is not known"
    texts = [f"{name} ({known})" for name in not_read(data)]
    return Traits(arguments=arguments, not_expressed=tuple(texts))


def not_read(data: Mapping[str, Any]) -> list[str]:
    """Keys of an unknown family that make another model of it than is read."""
    names = [*NOT_READ, *(name for name in data if name.startswith(NOT_READ_BEGINNINGS))]
    if data.get("use_sliding_window") is False:
        names.remove("sliding_window")
    return [name for name in names if _changes(data.get(name))]


def _changes(value: Any) -> bool:
    plain = ("full_attention", "attention", 1)
    if isinstance(value, list):
        return any(each not in plain for each in value)
    return value is True or value not in (None, False, 0, 1, "", {})


def in_common_names(data: Mapping[str, Any], file: str) -> tuple[dict[str, Any], list[str]]:
    """The config.json of an unknown family by the names of GLM-4.5, and a line that says so.

    Raises:
        ValueError: it has no experts.
    """
    taken = {
        name: next((other for other in others if data.get(other) is not None), None)
        for name, others in COMMON_NAMES.items()
    }
    family = shown(str(data["model_type"])[:60])
    if taken["n_routed_experts"] is None:
        raise ValueError(
            f"{file}: model_type: got {family}, has no experts that are known by their key "
            f"({', '.join(COMMON_NAMES['n_routed_experts'])}); a model without experts has no "
            "exchange to plan, one with others needs a file of its own, see docs/files.md"
        )
    renamed = {name: data[other] for name, other in taken.items() if other is not None}
    defaults = {"n_shared_experts": None, "first_k_dense_replace": 0}
    defaults |= {"n_group": None, "topk_group": None, "q_lora_rank": None}
    pairs = ", ".join(f"{MEANINGS[name]} {other}" for name, other in taken.items() if other)
    untold = ", ".join(text for name, text in MEANINGS.items() if taken[name] is None)
    note = f"the family {family} is not known; taken from its keys: {pairs}"
    note += f"; not told, taken as none: {untold}" if untold else ""
    scores = "norms" if "scoring_func" in data else "norms and router scores"
    note += f"; {scores} as most models have them"
    unread = ", ".join(map(shown, not_read(data)))
    note += f"; not read, though it changes the model: {unread}" if unread else ""
    # Which projections have the bias is not told.
    return {**defaults, **data, **renamed, "attention_bias": None, "use_bias": None}, [note]


def _known(kind: Any, data: Any) -> Any:
    """The part of a config.json that a class reads; the rest is no concern of ours."""
    # A class that may be null is annotated as `Class | None`.
    kind = next((each for each in get_args(kind) if is_dataclass(each)), kind)
    if not is_dataclass(kind) or not isinstance(data, Mapping):
        return data
    hints = get_type_hints(kind)
    names = [entry.name for entry in fields(kind) if entry.name in data]
    return {name: _known(hints[name], data[name]) for name in names}


def load_model(path: str | Path) -> Model:
    """Read a model file, a config.json of Hugging Face or its folder, or a preset by its name.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    file = presets.find("models", path)
    if file.suffix.lower() != ".json":
        return strict_yaml.load(Model, file)
    return model_of_config(files.read(file), str(file))
