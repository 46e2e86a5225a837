"""The config.json of Hugging Face as Megatron's arguments, by one table of aliases.

It tells sizes and layers, which a plan needs. Notes of the model name what it does not tell, as a
family leaves it to its code, and keys that are not read.
"""

import re
from collections.abc import Mapping
from typing import Any

from monta_megatron.common.errors import UserError

# Parts of a config.json that hold keys of the text model, the outer ones first.
PARTS = (
    *("thinker_config", "llm_config", "language_config", "text_config"),
    *("attn_config", "ffn_config"),
)
# Megatron's argument -> keys, of which the first that is there and not null is taken.
ALIASES = {
    "num-layers": "num_hidden_layers n_layers num_layers n_layer",
    "hidden-size": "hidden_size d_model n_embd",
    "num-attention-heads": "num_attention_heads n_heads n_head",
    "num-query-groups": "num_key_value_heads kv_n_heads num_kv_heads",
    "kv-channels": "head_dim attention_head_dim",
    "num-experts": "n_routed_experts num_experts num_local_experts moe_num_experts num_moe_experts "
    "num_routed_experts",
    "moe-router-topk": "num_experts_per_tok moe_topk moe_top_k moe_k experts_per_token "
    "num_experts_per_token top_k_experts",
    "moe-ffn-hidden-size": "moe_intermediate_size expert_ffn_hidden_size moe_ffn_hidden_size "
    "expert_intermediate_size intermediate_size ffn_hidden_size",
    "ffn-hidden-size": "intermediate_size_mlp intermediate_size ffn_hidden_size",
    "moe-shared-expert-intermediate-size": "shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size",
    "moe-latent-size": "moe_latent_size",
    "moe-router-num-groups": "n_group num_expert_group",
    "moe-router-group-topk": "topk_group num_limited_groups",
    "moe-router-topk-scaling-factor": "routed_scaling_factor route_scale router_scaling_factor",
    "moe-router-score-function": "scoring_func score_function score_func "
    "moe_router_activation_func",
    "moe-aux-loss-coeff": "router_aux_loss_coef moe_loss_weight aux_loss_alpha",
    "hybrid-layer-pattern": "hybrid_override_pattern",
    "max-position-embeddings": "max_position_embeddings max_seq_len n_positions",
    "vocab-size": "vocab_size",
    "q-lora-rank": "q_lora_rank",
    "kv-lora-rank": "kv_lora_rank",
    "qk-head-dim": "qk_nope_head_dim",
    "qk-pos-emb-head-dim": "qk_rope_head_dim",
    "v-head-dim": "v_head_dim",
    "linear-attention-freq": "full_attention_interval",
    "linear-conv-kernel-dim": "linear_conv_kernel_dim",
    "linear-key-head-dim": "linear_key_head_dim",
    "linear-value-head-dim": "linear_value_head_dim",
    "linear-num-key-heads": "linear_num_key_heads",
    "linear-num-value-heads": "linear_num_value_heads",
    "mtp-num-layers": "num_nextn_predict_layers mtp_num_hidden_layers",
    "norm-epsilon": "rms_norm_eps layer_norm_eps norm_eps",
    "init-method-std": "initializer_range",
    "rotary-base": "rope_theta",
    "rotary-percent": "partial_rotary_factor",
}
NUM_SHARED = "n_shared_experts num_shared_experts moe_num_shared_experts num_shared_expert"
# Dense layers before the first with experts, and one layer with experts of so many.
FIRST_DENSE = "first_k_dense_replace num_dense_layers moe_layer_num_skipped moe_layer_start_index"
STEPS = "decoder_sparse_step interleave_moe_layer_step moe_layer_interval"
OTHERS = "mlp_layer_types moe_layer_freq topk_method norm_topk_prob tie_word_embeddings"
READ = {*PARTS, *" ".join([*ALIASES.values(), NUM_SHARED, FIRST_DENSE, STEPS, OTHERS]).split()}
# Other keys with these words say nothing of what is planned or trained.
HARMLESS = re.compile(
    "token|version|architectures|dtype|cache|auto_map|model_type|vision|output|norm|loss|aux|"
    "dropout|jitter|max_window|^moe_layers$|init|quant|_eps$|_path$|ep_size"
)
# No config.json says how a model is trained.
ASSUMED = {
    "moe-aux-loss-coeff": 1.0e-3,
    "seq-length": 4096,
    "micro-batch-size": 1,
    "bf16": True,
    "moe-router-dtype": "fp32",
}
ALIKE = {
    "position-embedding-type": "rope",
    "swiglu": True,
    "disable-bias-linear": True,
    "attention-dropout": 0.0,
    "hidden-dropout": 0.0,
    "moe-router-load-balancing-type": "aux_loss",
}
UNTOLD = "told by no config.json: norms of queries and keys, biases (none), activation (SwiGLU)"


def read_config(data: Any, file: str) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """The family of a config.json, Megatron's arguments as far as it tells them, and notes.

    Args:
        data: its plain data.
        file: for messages.

    Raises:
        UserError: one line that names the file, the key, the value and the rule.
    """
    family = data.get("model_type") if isinstance(data, Mapping) else None
    if not isinstance(family, str) or not family.strip():
        raise UserError(f"{file}: model_type: got {family!r:.60}, must be the name of a family")

    # Step 1: sizes, by the table.
    flat = dict(data)
    for part in PARTS:
        flat |= flat[part] if isinstance(flat.get(part), Mapping) else {}
    told = {name: _first(flat, keys, file) for name, keys in ALIASES.items()}
    # Megatron takes no 1e6 for an integer.
    told = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in told.items()
        if value is not None
    }

    if "moe-router-topk" not in told:
        raise UserError(f"{file}: num_experts_per_tok: missing, must be given")

    # Step 2: what follows from several keys.
    num_layers = told.get("num-layers")
    if type(num_layers) is int and num_layers >= 1:
        told |= _moe_layers(flat, num_layers)
    told |= _attention(told) | _router(flat, told)
    shared = _first(flat, NUM_SHARED, file) or int("intermediate_size_mlp" in flat)
    if type(shared) is int and type(told.get("moe-ffn-hidden-size")) is int:
        # Llama 4 has one, as large as the others, and does not say so.
        size = shared * told["moe-ffn-hidden-size"] or False
        told.setdefault("moe-shared-expert-intermediate-size", size)
    told |= {"normalization": "RMSNorm"} if "rms_norm_eps" in flat else {}
    told["untie-embeddings-and-output-weights"] = not flat.get("tie_word_embeddings", False)
    assumed = {name: value for name, value in ASSUMED.items() if name not in told}
    arguments = {**told, **ALIKE, **assumed}

    # Step 3: what cannot be told.
    unread = [
        name
        for name, value in flat.items()
        if name not in READ and not HARMLESS.search(name)
        if value is True or value not in (None, False, 0, 1, -1, "", "silu", [])
    ]
    score = "" if told.get("moe-router-score-function") else ", the router's scores (softmax)"
    values = ", ".join(f"{name} {value}" for name, value in assumed.items())
    notes = [UNTOLD + score, f"not in the config.json, assumed unless given: {values}"]
    if unread:
        notes.append(f"not read: {', '.join(unread)}")
    if isinstance(data.get("vision_config"), Mapping):
        notes.append("the text part alone: vision_config is not counted")
    given = {name: value for name, value in arguments.items() if value is not False}
    return family, given, tuple(notes)


def _first(flat: Mapping[str, Any], keys: str, file: str) -> Any:
    """The first value that is there; one number for a list that repeats it for every layer.

    Raises:
        UserError: layers differ.
    """
    for key in keys.split():
        value = flat.get(key)
        if isinstance(value, list):
            if not value or any(each != value[0] for each in value):
                rule = "must be a number, or the same for each layer: Megatron's layers are alike"
                raise UserError(f"{file}: {key}: got a list of {len(value)} values, {rule}")
            value = value[0]
        if value is not None:
            return value
    return None


def _moe_layers(flat: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Layers with experts, as Megatron says them: ([0]*3+[1]*58)."""

    def integer(names: str, default: int) -> int:
        values = (flat.get(name) for name in names.split())
        return max([default, *(value for value in values if type(value) is int)])

    first, step, every = integer(FIRST_DENSE, 0), integer(STEPS, 1), integer("moe_layer_freq", 1)
    has_experts = [
        layer >= first and (layer + 1) % step == 0 and layer % every == 0
        for layer in range(num_layers)
    ]
    for name, value in (("mlp_layer_types", "sparse"), ("moe_layer_freq", 1)):
        if isinstance(flat.get(name), list):
            has_experts = [entry == value for entry in flat[name]]
    first = has_experts.index(True) if True in has_experts else len(has_experts)
    pattern = f"([0]*{first}+[1]*{len(has_experts) - first})"
    if not all(has_experts[first:]):
        pattern = str(list(map(int, has_experts))).replace(" ", "")
    return {} if all(has_experts) else {"moe-layer-freq": pattern}


def _attention(told: Mapping[str, Any]) -> dict[str, Any]:
    if "kv-lora-rank" in told:
        latent = {"multi-latent-attention": True, "qk-layernorm": True, "num-query-groups": False}
        return latent | ({"kv-channels": told["v-head-dim"]} if "v-head-dim" in told else {})
    attention: dict[str, Any] = {"group-query-attention": True}
    if told.get("num-query-groups") in (None, told.get("num-attention-heads")):
        attention = {"num-query-groups": False}
    if "linear-key-head-dim" in told:
        # Layers of full attention between them are gated, too.
        attention["experimental-attention-variant"] = "gated_delta_net"
        attention["attention-output-gate"] = True
    return attention


def _router(flat: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Scores and groups."""
    router: dict[str, Any] = {}
    scores = str(told.get("moe-router-score-function", "")).lower()
    method = str(flat.get("topk_method", "")).lower()
    if "sigmoid" in scores or "noaux" in scores + method:
        router |= {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True}
    else:
        router["moe-router-score-function"] = "softmax" if scores == "softmax" else False
        # Megatron demands it of top-1.
        is_top_1 = told.get("moe-router-topk") == 1
        router["moe-router-pre-softmax"] = is_top_1 or flat.get("norm_topk_prob") is False
    if told.get("moe-router-topk-scaling-factor") == 1:
        router["moe-router-topk-scaling-factor"] = False
    if told.get("moe-router-num-groups") in (None, 1) or method == "greedy":
        router |= {"moe-router-num-groups": False, "moe-router-group-topk": False}
    return router
