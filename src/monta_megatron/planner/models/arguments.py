"""Megatron's arguments of a model from its config.json, beyond the sizes that `Model` has.

`Details` are keys that most families share; `TRAITS` says for each family what its config.json
leaves to the code of the family: Megatron's arguments as they are, and what Megatron (0.19.2)
cannot express. Families follow their code in `transformers` (5.24), Kimi K2 that of DeepSeek-V3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from monta_megatron.common.rules import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from monta_megatron.planner.models.dimensions import Dimensions

QK_NORM = {"qk-layernorm": True}
# Scores by sigmoid, with a bias of each expert that balances the load.
BIASED_SIGMOID = {
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": True,
    "moe-router-bias-update-rate": 1.0e-3,
}


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """`rope_scaling` or `rope_parameters` of a config.json."""

    type: str | None = None
    rope_type: str | None = None
    rope_theta: PositiveFloat | None = None
    factor: PositiveFloat | None = None
    mscale: PositiveFloat | None = None
    mscale_all_dim: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    partial_rotary_factor: PositiveFloat | None = None
    truncate: bool = True

    @property
    def kind(self) -> str:
        """The way of scaling; `default` for none."""
        return self.rope_type or self.type or "default"


@dataclass(frozen=True, kw_only=True)
class Details:
    """Keys of a config.json beside the sizes; a family without one leaves it out."""

    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat | None = None
    rope_theta: PositiveFloat | None = None
    rope_scaling: RotaryScaling | None = None
    rope_parameters: RotaryScaling | None = None
    partial_rotary_factor: PositiveFloat | None = None
    rotary_dim: PositiveInt | None = None
    initializer_range: PositiveFloat | None = None
    router_aux_loss_coef: NonNegativeFloat | None = None
    moe_loss_weight: NonNegativeFloat | None = None
    aux_loss_alpha: NonNegativeFloat | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: PositiveFloat | None = None
    use_qk_norm: bool | None = None
    attention_bias: bool | None = None
    use_bias: bool | None = None
    lm_head_bias: bool | None = None
    use_cla: bool | None = None
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt | None = None
    qk_nope_head_dim: PositiveInt | None = None
    qk_rope_head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None
    num_nextn_predict_layers: NonNegativeInt | None = None
    mtp_num_hidden_layers: NonNegativeInt | None = None
    num_mtp_modules: NonNegativeInt | None = None
    linear_conv_kernel_dim: PositiveInt | None = None
    linear_key_head_dim: PositiveInt | None = None
    linear_value_head_dim: PositiveInt | None = None
    linear_num_key_heads: PositiveInt | None = None
    linear_num_value_heads: PositiveInt | None = None

    @property
    def scaling(self) -> RotaryScaling:
        """Arguments for the scaling of positions."""
        return self.rope_parameters or self.rope_scaling or RotaryScaling()


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Facts of a family that only its code holds.

    Attributes:
        arguments: Megatron's arguments, over those that follow from the keys.
        rotary_base: where the config.json has none.
        rotary_part: the same, part of a head that is rotated.
        norm_topk_prob: the same, whether the chosen scores are scaled to a sum of 1.
        has_output_bias: whether `attention_bias` is one of the attention's output as well.
        not_expressed: what Megatron's arguments cannot say.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    rotary_base: float = 10_000
    rotary_part: float = 1.0
    norm_topk_prob: bool = True
    has_output_bias: bool = True
    not_expressed: tuple[str, ...] = ()


LLAMA4 = Traits(
    rotary_base=500_000,
    arguments={
        "rotary-interleaved": True,
        "qk-l2-norm": True,
        "moe-router-score-function": "sigmoid",
        "moe-apply-probs-on-input": True,
    },
    not_expressed=(
        "attention in chunks (attention is to all keys)",
        "attention's temperature by position",
    ),
)
QWEN3_NEXT = Traits(
    rotary_part=0.25,
    arguments={
        **QK_NORM,
        "apply-layernorm-1p": True,
        "attention-output-gate": True,
        "experimental-attention-variant": "gated_delta_net",
        "moe-shared-expert-gate": True,
    },
)
TRAITS: dict[str, Traits] = {
    "dbrx": Traits(
        arguments={"normalization": "LayerNorm", "norm-epsilon": 1.0e-5},
        not_expressed=("clip_qkv (queries, keys and values are not clipped)",),
    ),
    "deepseek_v2": Traits(norm_topk_prob=False),
    "deepseek_v3": Traits(arguments=BIASED_SIGMOID),
    "deepseek_v32": Traits(
        arguments=BIASED_SIGMOID,
        not_expressed=(
            "the indexer of sparse attention (attention is to all keys, without Megatron's "
            "--experimental-attention-variant dsa)",
        ),
    ),
    "dots1": Traits(arguments={**QK_NORM, **BIASED_SIGMOID}, norm_topk_prob=False),
    "ernie4_5_moe": Traits(
        rotary_base=500_000,
        arguments={"rotary-interleaved": True},
        not_expressed=("the router's bias beside softmax scores (Megatron's needs sigmoid)",),
    ),
    "glm4_moe": Traits(arguments=BIASED_SIGMOID, rotary_part=0.5, has_output_bias=False),
    "gpt_oss": Traits(
        arguments={
            "quick-geglu": True,
            "glu-linear-offset": 1.0,
            "activation-func-clamp-value": 7.0,
            "no-bias-dropout-fusion": True,
            "softmax-type": "learnable",
            "window-size": "127,0",
            "window-attn-skip-freq": 2,
            "swiglu": False,
            # Biases are everywhere, not of queries, keys and values alone.
            "add-qkv-bias": False,
            "disable-bias-linear": False,
        },
        has_output_bias=False,
    ),
    "granitemoe": Traits(
        not_expressed=("the multipliers of embedding, residual, attention and logits",)
    ),
    "hunyuan_v1_moe": Traits(
        arguments=QK_NORM,
        not_expressed=("norms of queries and keys after their rotation (Megatron's are before)",),
    ),
    "kimi_k2": Traits(arguments=BIASED_SIGMOID),
    "llama4": LLAMA4,
    "llama4_text": LLAMA4,
    "minimax_m2": Traits(
        rotary_base=5_000_000,
        arguments={**QK_NORM, **BIASED_SIGMOID},
        not_expressed=("norms over all heads of queries and keys (Megatron's are per head)",),
    ),
    "mixtral": Traits(rotary_base=1_000_000),
    "olmoe": Traits(arguments=QK_NORM, norm_topk_prob=False),
    "phimoe": Traits(
        rotary_base=1_000_000,
        arguments={"normalization": "LayerNorm"},
        not_expressed=("the sparse mixer of the router",),
    ),
    "qwen2_moe": Traits(
        arguments={"add-qkv-bias": True, "moe-shared-expert-gate": True}, norm_topk_prob=False
    ),
    "qwen3_5_moe": QWEN3_NEXT,
    "qwen3_5_moe_text": QWEN3_NEXT,
    "qwen3_moe": Traits(arguments=QK_NORM, norm_topk_prob=False),
    "qwen3_next": QWEN3_NEXT,
}


def arguments_of(traits: Traits, details: Details, sizes: Dimensions) -> dict[str, Any]:
    """Megatron's arguments by their names; true is a flag, false leaves one out."""
    scores = {**_scores(traits, details), **_experts(sizes)}
    arguments = {
        "ffn-hidden-size": sizes.dense_ffn_size or sizes.expert_ffn_size,
        **_attention(details, sizes),
        **_positions(traits, details, sizes),
        "normalization": "RMSNorm",
        **({} if details.rms_norm_eps is None else {"norm-epsilon": details.rms_norm_eps}),
        "swiglu": True,
        "disable-bias-linear": not details.use_bias,
        "untie-embeddings-and-output-weights": not sizes.is_tied,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "init-method-std": details.initializer_range or 0.02,
        "vocab-size": sizes.vocab_size,
        **scores,
        **_further_tokens(details),
        **traits.arguments,
    }
    if details.use_qk_norm is not None:
        name = "qk-l2-norm" if "qk-l2-norm" in traits.arguments else "qk-layernorm"
        arguments[name] = details.use_qk_norm
    return {name: value for name, value in arguments.items() if value is not False}


def _attention(details: Details, sizes: Dimensions) -> dict[str, Any]:
    if details.kv_lora_rank is not None:
        return {
            "multi-latent-attention": True,
            "qk-layernorm": True,
            **({} if details.q_lora_rank is None else {"q-lora-rank": details.q_lora_rank}),
            "kv-lora-rank": details.kv_lora_rank,
            "qk-head-dim": details.qk_nope_head_dim,
            "qk-pos-emb-head-dim": details.qk_rope_head_dim,
            "v-head-dim": details.v_head_dim,
            "kv-channels": details.v_head_dim,
        }
    head_dim = details.head_dim
    own = head_dim is not None and head_dim * sizes.num_attention_heads != sizes.hidden_size
    return {
        **({"kv-channels": head_dim} if own else {}),
        **({"add-qkv-bias": True} if details.attention_bias else {}),
        **_linear_attention(details, sizes),
    }


def _linear_attention(details: Details, sizes: Dimensions) -> dict[str, Any]:
    if sizes.linear_freq is None:
        return {}
    names = [entry.name for entry in fields(Details) if entry.name.startswith("linear_")]
    given = {name.replace("_", "-"): getattr(details, name) for name in names}
    return {
        "linear-attention-freq": sizes.linear_freq,
        **{name: value for name, value in given.items() if value is not None},
    }


def _further_tokens(details: Details) -> dict[str, Any]:
    """Layers of multi-token prediction."""
    layers = details.num_nextn_predict_layers or details.mtp_num_hidden_layers
    return {"mtp-num-layers": layers} if layers else {}


def _positions(traits: Traits, details: Details, sizes: Dimensions) -> dict[str, Any]:
    scaling = details.scaling
    most = sizes.max_positions
    base = scaling.rope_theta or details.rope_theta or traits.rotary_base
    positions: dict[str, Any] = {"position-embedding-type": "rope", "rotary-base": int(base)}
    if sizes.no_rope_freq is not None:
        positions["no-rope-freq"] = sizes.no_rope_freq
    partial = scaling.partial_rotary_factor or details.partial_rotary_factor
    if partial is None and details.rotary_dim is not None:
        head_dim = details.head_dim or sizes.hidden_size // sizes.num_attention_heads
        partial = details.rotary_dim / head_dim
    partial = traits.rotary_part if partial is None else partial
    if partial != 1 and details.kv_lora_rank is None:
        positions["rotary-percent"] = partial
    if scaling.kind == "yarn":
        original = scaling.original_max_position_embeddings
        positions["rotary-scaling-factor"] = scaling.factor
        if details.kv_lora_rank is not None:
            # Latent attention scales from the positions of its first training.
            most = original or most
            positions["mscale"] = scaling.mscale
            positions["mscale-all-dim"] = scaling.mscale_all_dim
        else:
            positions["position-embedding-type"] = "yarn"
            positions["yarn-original-max-position-embeddings"] = original
            positions["yarn-beta-fast"] = scaling.beta_fast
            positions["yarn-beta-slow"] = scaling.beta_slow
            positions["no-yarn-correction-range-round-to-int"] = not scaling.truncate
    positions["max-position-embeddings"] = most
    return {name: value for name, value in positions.items() if value is not None}


def _scores(traits: Traits, details: Details) -> dict[str, Any]:
    normed = is_normed(traits, details)
    sigmoid = traits.arguments.get("moe-router-score-function") == "sigmoid"
    factor = details.routed_scaling_factor
    given = (details.router_aux_loss_coef, details.moe_loss_weight, details.aux_loss_alpha)
    alpha = next((value for value in given if value is not None), 1.0e-3)
    return {
        # Softmax over all experts before the choice; without it, over those that are chosen.
        **({} if normed or sigmoid else {"moe-router-pre-softmax": True}),
        **({} if factor in (None, 1) else {"moe-router-topk-scaling-factor": factor}),
        "moe-router-load-balancing-type": "aux_loss"
        if details.kv_lora_rank is None
        else "seq_aux_loss",
        "moe-aux-loss-coeff": alpha,
    }


def _experts(sizes: Dimensions) -> dict[str, Any]:
    shared = sizes.shared_ffn_size
    return {
        **({} if sizes.layer_freq is None else {"moe-layer-freq": sizes.layer_freq}),
        **({"moe-shared-expert-intermediate-size": shared} if shared else {}),
    }


def unexpressed(traits: Traits, details: Details) -> tuple[str, ...]:
    """Properties of the model that Megatron's arguments do not express."""
    texts = list(traits.not_expressed)
    if details.attention_bias and details.kv_lora_rank is not None:
        texts.append("attention_bias (latent attention has none)")
    elif details.attention_bias and traits.has_output_bias:
        texts.append("attention_bias of the output (queries, keys and values have theirs)")
    if details.lm_head_bias or details.use_bias:
        texts.append("a bias of the output layer")
    if details.use_cla:
        texts.append("use_cla (layers do not share keys and values)")
    if details.num_mtp_modules:
        texts.append("num_mtp_modules (no multi-token prediction; published weights have none)")
    is_sigmoid = traits.arguments.get("moe-router-score-function") == "sigmoid"
    if is_sigmoid and not is_normed(traits, details) and "qk-l2-norm" not in traits.arguments:
        texts.append("norm_topk_prob false (Megatron scales sigmoid scores to a sum of 1)")
    if details.scaling.kind not in ("default", "yarn"):
        texts.append(f"rotary scaling {details.scaling.kind[:20]!r}")
    return tuple(texts)


def is_normed(traits: Traits, details: Details) -> bool:
    """Whether the scores of the chosen experts are scaled to a sum of 1."""
    given = details.norm_topk_prob
    return traits.norm_topk_prob if given is None else given
