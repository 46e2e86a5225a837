"""The config.json of Hugging Face as Megatron's arguments, by one table of aliases.

What a family leaves to its code and config.json does not hold is in `FAMILIES`, as arguments; it
follows `transformers` (5.24). What cannot be told, or is not read, is named.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from monta_megatron.common.text import shown
from monta_megatron.planner.models.model import MOST_LAYERS, Model, model_of

# Parts that hold the model of the text, the first that is there; and parts whose keys are its own.
TEXT_PARTS = ("text_config", "thinker_config", "llm_config", "language_config")
INNER_PARTS = ("attn_config", "ffn_config")
# Megatron's argument -> keys, of which the first that is there and not null is taken.
ALIASES: dict[str, tuple[str, ...]] = {
    "num-layers": ("num_hidden_layers", "n_layers", "num_layers", "n_layer"),
    "hidden-size": ("hidden_size", "d_model", "n_embd"),
    "num-attention-heads": ("num_attention_heads", "n_heads", "n_head"),
    "num-query-groups": ("num_key_value_heads", "kv_n_heads", "num_kv_heads"),
    "kv-channels": ("head_dim", "attention_head_dim"),
    "num-experts": (
        *("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
        *("num_moe_experts", "num_routed_experts"),
    ),
    "moe-router-topk": (
        *("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "experts_per_token"),
        *("num_experts_per_token", "top_k_experts"),
    ),
    "moe-ffn-hidden-size": (
        *("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
        *("expert_intermediate_size", "intermediate_size", "ffn_hidden_size"),
    ),
    "ffn-hidden-size": ("intermediate_size_mlp", "intermediate_size", "ffn_hidden_size"),
    "moe-latent-size": ("moe_latent_size",),
    "moe-router-num-groups": ("n_group", "num_expert_group"),
    "moe-router-group-topk": ("topk_group", "num_limited_groups"),
    "moe-router-topk-scaling-factor": (
        *("routed_scaling_factor", "route_scale", "router_scaling_factor"),
    ),
    "max-position-embeddings": ("max_position_embeddings", "max_seq_len", "n_positions"),
    "vocab-size": ("vocab_size",),
    "q-lora-rank": ("q_lora_rank",),
    "kv-lora-rank": ("kv_lora_rank",),
    "qk-head-dim": ("qk_nope_head_dim",),
    "qk-pos-emb-head-dim": ("qk_rope_head_dim",),
    "v-head-dim": ("v_head_dim",),
    "linear-conv-kernel-dim": ("linear_conv_kernel_dim",),
    "linear-key-head-dim": ("linear_key_head_dim",),
    "linear-value-head-dim": ("linear_value_head_dim",),
    "linear-num-key-heads": ("linear_num_key_heads",),
    "linear-num-value-heads": ("linear_num_value_heads",),
    "mtp-num-layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "norm-epsilon": ("rms_norm_eps", "layer_norm_eps", "norm_eps"),
    "init-method-std": ("initializer_range",),
    "moe-aux-loss-coeff": ("router_aux_loss_coef", "moe_loss_weight", "aux_loss_alpha"),
    "rotary-base": ("rope_theta",),
    "rotary-percent": ("partial_rotary_factor",),
}
# Keys of the router's score function, and of the number of shared experts or their FFN size.
SCORES = ("scoring_func", "score_function", "score_func", "moe_router_activation_func")
NUM_SHARED = (
    "n_shared_experts",
    "num_shared_experts",
    "moe_num_shared_experts",
    "num_shared_expert",
)
SHARED_SIZES = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size")
# Dense layers before the first with experts.
FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_num_skipped")
# Keys that are not read and change the number of parameters, unless they are null, false, 0 or 1;
# and beginnings of such keys.
CHANGE_PARAMETERS = (
    *("layers_block_type", "attn_type_list", "linear_attn_config", "attn_layer_period"),
    *("index_topk", "compress_ratios", "zero_expert_num", "use_cla", "shared_intermediate_size"),
)
BEGINNINGS = ("mamba_", "ssm_")
# In a family that is not known, other keys of these words do, too, but for those of the second.
STRUCTURE = re.compile("moe|expert|layer|mlp|residual")
HARMLESS = re.compile("norm|loss|dropout|jitter|window|rope|init|quant|_eps$|_bias$")
ATTENTIONS = {"full_attention", "attention", "sliding_attention", "chunked_attention"}
ATTENTIONS |= {"linear_attention"}
# Keys that are not read and change how the model computes.
CHANGE_MODEL = (
    *("sliding_window", "attention_chunk_size", "clip_qkv", "logits_scaling", "attention_bias"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "lm_head_bias"),
    *("use_bias", "qkv_bias", "mlp_bias", "num_mtp_modules", "rope_scaling"),
)
QK_NORM = {"qk-layernorm": True}
SIGMOID = {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True}
PRE_SOFTMAX = {"moe-router-pre-softmax": True}
NEXT = {
    **QK_NORM,
    "attention-output-gate": True,
    "experimental-attention-variant": "gated_delta_net",
    "moe-shared-expert-gate": True,
    "rotary-percent": 0.25,
}
LLAMA4 = {"moe-router-score-function": "sigmoid", "moe-apply-probs-on-input": True}
# `model_type` -> arguments that only the family's code says.
FAMILIES: dict[str, dict[str, Any]] = {
    "dbrx": {"normalization": "LayerNorm"},
    "deepseek_v2": {},
    "deepseek_v3": SIGMOID,
    "deepseek_v32": SIGMOID,
    "dots1": {**QK_NORM, **SIGMOID},
    "ernie4_5_moe": {"rotary-interleaved": True},
    "glm4_moe": SIGMOID,
    "gpt_oss": {"quick-geglu": True, "swiglu": False, "softmax-type": "learnable"},
    "granitemoe": {},
    "hunyuan_v1_moe": QK_NORM,
    "kimi_k2": SIGMOID,
    "llama4": LLAMA4,
    "llama4_text": LLAMA4,
    "minimax_m2": {**QK_NORM, **SIGMOID},
    "mixtral": {},
    "olmoe": {**QK_NORM, **PRE_SOFTMAX},
    "phimoe": {"normalization": "LayerNorm"},
    "qwen2_moe": {"add-qkv-bias": True, "moe-shared-expert-gate": True, **PRE_SOFTMAX},
    "qwen3_5_moe": NEXT,
    "qwen3_5_moe_text": NEXT,
    "qwen3_moe": QK_NORM,
    "qwen3_next": NEXT,
}
# Of these and of `ALIASES`, the keys that are read.
LAYER_KEYS = (
    *("mlp_only_layers", "moe_layers", "expert_layer_period", "expert_layer_offset"),
    *("moe_layer_start_index", "moe_layer_end_index", "decoder_sparse_step", "layer_types"),
    *("interleave_moe_layer_step", "moe_layer_interval", "moe_layer_freq", "mlp_layer_types"),
    "hybrid_override_pattern",
)
READ = {*SCORES, *NUM_SHARED, *SHARED_SIZES, *FIRST_DENSE, *LAYER_KEYS}
READ.update(key for keys in ALIASES.values() for key in keys)
# No config.json says how a model is trained.
SEQ_LENGTH = 4096
ASSUMED = {"micro-batch-size": 1, "bf16": True, "moe-router-dtype": "fp32"}
AUX_LOSS = 1.0e-3


def model_of_config(data: Any, file: str) -> Model:
    """The model of a config.json, with Megatron's arguments as far as they can be told.

    Args:
        data: its plain data.
        file: for messages.

    Raises:
        ValueError: one line that names the file, the key, the value and the rule.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{file}: must be a mapping, as a config.json of Hugging Face is")
    family = _family_of(data, file)
    flat = _of_all_layers(_flat(data), file)
    arguments: dict[str, Any] = {}
    notes: list[str] = []
    for name, keys in ALIASES.items():
        value = _first(flat, keys)
        if value is not None:
            # Megatron takes no 1e6 for an integer.
            is_whole = isinstance(value, float) and value.is_integer() and name == "rotary-base"
            arguments[name] = int(value) if is_whole else value
    if "num-experts" not in arguments:
        known = ", ".join(ALIASES["num-experts"])
        raise ValueError(
            f"{file}: model_type: got {family}, has no experts that are known by their key "
            f"({known}); a model without experts has no exchange to plan, one with others needs a "
            "file of Megatron's arguments"
        )
    num_layers = arguments.get("num-layers")
    if isinstance(num_layers, str) and num_layers.isdecimal():
        num_layers = int(num_layers)
    if type(num_layers) is int and 1 <= num_layers <= MOST_LAYERS:
        arguments |= _layers(flat, num_layers, file)
    arguments |= _attention(arguments) | _router(flat, arguments, family, notes)
    arguments |= _shared_experts(flat, arguments)
    longest = arguments.get("max-position-embeddings")
    arguments |= {
        "position-embedding-type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable-bias-linear": True,
        "untie-embeddings-and-output-weights": not flat.get("tie_word_embeddings", False),
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        **FAMILIES.get(family, {}),
        "seq-length": min(SEQ_LENGTH, longest) if type(longest) is int else SEQ_LENGTH,
        **ASSUMED,
    }
    assumed = ["seq-length", *ASSUMED]
    if "moe-aux-loss-coeff" not in arguments:
        arguments["moe-aux-loss-coeff"] = AUX_LOSS
        assumed.append("moe-aux-loss-coeff")
    if family not in FAMILIES:
        notes.insert(
            0,
            f"{family}: a family that is not known, read by common keys; activation "
            "(SwiGLU), norms (RMSNorm) and biases (none) as most models have them",
        )
    structure = _unread_structure(flat, family, num_layers)
    unread = [*structure, *(name for name in CHANGE_MODEL if _changes(flat.get(name)))]
    if flat.get("use_sliding_window") is False and "sliding_window" in unread:
        unread.remove("sliding_window")
    if unread:
        notes.append(f"not read, though it changes the model: {', '.join(map(shown, unread))}")
    if _changes(data.get("vision_config")):
        notes.append("the text part alone: vision_config is not counted")
    values = ", ".join(f"{name} {arguments[name]}" for name in assumed)
    notes.append(f"not in the config.json, assumed unless given: {values}")
    given = {name: value for name, value in arguments.items() if value is not False}
    model = model_of(given, family, file, tuple(notes))
    return replace(model, num_parameters=None) if structure else model


def _unread_structure(flat: Mapping[str, Any], family: str, num_layers: Any) -> list[str]:
    """Keys that are not read and change layers, sizes or the number of parameters."""
    unread = [name for name in CHANGE_PARAMETERS if _changes(flat.get(name))]
    unread += [name for name in flat if name.startswith(BEGINNINGS)]
    if family not in FAMILIES:
        unread += [
            name
            for name, value in flat.items()
            if STRUCTURE.search(name) and not HARMLESS.search(name)
            if name not in READ and not isinstance(value, Mapping) and _changes(value)
        ]
    if str(flat.get("hidden_act", "silu")).lower() not in ("silu", "swish", "swiglu"):
        unread.append("hidden_act")
    types = flat.get("layer_types")
    if isinstance(types, list) and (len(types) != num_layers or not ATTENTIONS.issuperset(types)):
        unread.append("layer_types")
    return list(dict.fromkeys(unread))


def _family_of(data: Mapping[str, Any], file: str) -> str:
    family = data.get("model_type")
    if not isinstance(family, str) or not family.strip():
        given = "missing" if family is None else f"got {shown(repr(family)[:60])}"
        raise ValueError(f"{file}: model_type: {given}, must be the name of a family")
    return shown(family[:60])


def _flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the text model, wherever they lie."""
    flat = dict(data)
    for name in TEXT_PARTS:
        if isinstance(data.get(name), Mapping):
            flat |= _flat(data[name])
            break
    for name in INNER_PARTS:
        if isinstance(data.get(name), Mapping):
            flat = {**data[name], **flat}
    return flat


def _of_all_layers(flat: dict[str, Any], file: str) -> dict[str, Any]:
    """The same with a number for each list that repeats it for every layer.

    Raises:
        ValueError: layers differ, or the list is not one of layers.
    """
    num_layers = _first(flat, ALIASES["num-layers"])
    for name in dict.fromkeys([*(key for keys in ALIASES.values() for key in keys), *NUM_SHARED]):
        values = flat.get(name)
        if isinstance(values, list):
            if len(values) != num_layers or any(value != values[0] for value in values):
                raise ValueError(
                    f"{file}: {name}: got a list of {len(values)} values, must be a number or the "
                    f"same number for each of {shown(repr(num_layers)[:20])} layers: Megatron's "
                    "layers are alike"
                )
            flat[name] = values[0]
    return flat


def _first(flat: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((flat[key] for key in keys if flat.get(key) is not None), None)


def _changes(value: Any) -> bool:
    plain = ("full_attention", "attention", 1)
    if isinstance(value, list):
        return any(each not in plain for each in value)
    return value is True or value not in (None, False, 0, 1, "", {})


def _layers(flat: Mapping[str, Any], num_layers: int, file: str) -> dict[str, Any]:
    """Which layers have experts, and which linear attention."""
    dense = flat.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        got = shown(repr(dense)[:60])
        raise ValueError(f"{file}: mlp_only_layers: got {got}, must be a list of layers")
    if isinstance(flat.get("hybrid_override_pattern"), str):
        return {"hybrid-layer-pattern": flat["hybrid_override_pattern"]}
    has_experts = list(map(_has_experts(flat), range(num_layers)))
    for name, value in (("mlp_layer_types", "sparse"), ("moe_layer_freq", 1)):
        if isinstance(flat.get(name), list):
            has_experts = [entry == value for entry in flat[name]]
    arguments: dict[str, Any] = {}
    if not all(has_experts):
        first = has_experts.index(True) if True in has_experts else num_layers
        in_order = all(has_experts[first:])
        arguments["moe-layer-freq"] = (
            f"([0]*{first}+[1]*{num_layers - first})"
            if in_order
            else str(list(map(int, has_experts))).replace(" ", "")
        )
    types, interval = flat.get("layer_types"), flat.get("full_attention_interval")
    linear = [False] * num_layers
    if isinstance(types, list) and "linear_attention" in types:
        linear = [kind == "linear_attention" for kind in types]
    elif type(interval) is int and interval > 1:
        linear = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if any(linear):
        period = linear.index(False) + 1 if False in linear else 0
        regular = period and linear == [(layer + 1) % period > 0 for layer in range(num_layers)]
        listed = str(list(map(int, linear))).replace(" ", "")
        arguments["linear-attention-freq"] = period if regular else listed
    return arguments


def _has_experts(flat: Mapping[str, Any]) -> Callable[[int], bool]:
    """Whether a layer, counted from 0, has experts, by the keys of its family."""

    def integer(name: str, default: int) -> int:
        value = flat.get(name)
        return value if type(value) is int and value >= 0 else default

    dense, listed = set(flat.get("mlp_only_layers") or ()), flat.get("moe_layers")
    if isinstance(listed, list):
        return lambda layer: layer in listed
    if "expert_layer_period" in flat:
        period, offset = integer("expert_layer_period", 1), integer("expert_layer_offset", 0)
        return lambda layer: layer % max(period, 1) == offset
    last = integer("moe_layer_end_index", MOST_LAYERS)
    steps = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    step = next((integer(name, 1) for name in steps if name in flat), 1)
    first = next((integer(name, 0) for name in FIRST_DENSE if name in flat), 0)
    first = max(first, integer("moe_layer_start_index", 0))
    every = integer("moe_layer_freq", 1)
    return lambda layer: (
        first <= layer <= last
        and (layer + 1) % max(step, 1) == 0
        and layer % max(every, 1) == 0
        and layer not in dense
    )


def _attention(arguments: dict[str, Any]) -> dict[str, Any]:
    if "kv-lora-rank" in arguments:
        value = arguments.get("v-head-dim")
        latent = {"multi-latent-attention": True, "qk-layernorm": True}
        return {
            **latent,
            "num-query-groups": False,
            **({} if value is None else {"kv-channels": value}),
        }
    groups = arguments.get("num-query-groups")
    if groups in (None, arguments.get("num-attention-heads")):
        return {"num-query-groups": False}
    return {"group-query-attention": True}


def _router(
    flat: Mapping[str, Any], arguments: Mapping[str, Any], family: str, notes: list[str]
) -> dict[str, Any]:
    """Scores, groups and balance; what of them is not told is added to the notes."""
    router: dict[str, Any] = {"moe-router-load-balancing-type": "aux_loss"}
    score = _first(flat, SCORES)
    text = str(score).lower()
    if "sigmoid" in text or "noaux" in text:
        router |= SIGMOID
    elif score is not None and "softmax" not in text:
        notes.append(f"the router's score function {shown(str(score)[:20])!r} is not known")
    elif family not in FAMILIES and score is None:
        notes.append("the router's score function is not told, taken as softmax")
    is_sigmoid = {**router, **FAMILIES.get(family, {})}.get("moe-router-score-function")
    if flat.get("norm_topk_prob") is False and is_sigmoid is None:
        router |= PRE_SOFTMAX
    if arguments.get("moe-router-topk-scaling-factor") == 1:
        router["moe-router-topk-scaling-factor"] = False
    # DeepSeek-V2 has groups only where its file says how.
    method = flat.get("topk_method", "greedy" if family == "deepseek_v2" else "")
    if arguments.get("moe-router-num-groups") in (None, 1) or method == "greedy":
        router |= {"moe-router-num-groups": False, "moe-router-group-topk": False}
    return router


def _shared_experts(flat: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    size, number = _first(flat, SHARED_SIZES), _first(flat, NUM_SHARED)
    if size is None and "intermediate_size_mlp" in flat:
        # Llama 4 has one, as large as the others.
        number = 1
    of_one = arguments.get("moe-ffn-hidden-size")
    if size is None and type(number) is int and type(of_one) is int:
        size = number * of_one
    return {"moe-shared-expert-intermediate-size": size} if size else {}
