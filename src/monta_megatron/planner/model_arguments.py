"""Megatron's arguments of a model from its config.json, beyond the sizes that `Model` has.

`Details` are keys that most families share; `TRAITS` says for each family what its config.json
leaves to the code of the family: Megatron's arguments as they are, and what Megatron cannot
express. Both follow `transformers` (5.23).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from monta_megatron.common.rules import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from monta_megatron.planner.model_dimensions import Dimensions

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
    initializer_range: PositiveFloat | None = None
    router_aux_loss_coef: NonNegativeFloat | None = None
    moe_loss_weight: NonNegativeFloat | None = None
    aux_loss_alpha: NonNegativeFloat | None = None
    norm_topk_prob: bool | None = None
    routed_scaling_factor: PositiveFloat | None = None
    use_qk_norm: bool | None = None
    attention_bias: bool | None = None
    q_lora_rank: PositiveInt | None = None
    kv_lora_rank: PositiveInt | None = None
    qk_nope_head_dim: PositiveInt | None = None
    qk_rope_head_dim: PositiveInt | None = None
    v_head_dim: PositiveInt | None = None
    num_nextn_predict_layers: NonNegativeInt | None = None

    @property
    def scaling(self) -> RotaryScaling:
        """How positions are scaled."""
        return self.rope_parameters or self.rope_scaling or RotaryScaling()


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the code of a family says.

    Attributes:
        arguments: Megatron's arguments, over those that follow from the keys.
        rotary_base: where the config.json has none.
        norm_topk_prob: the same, whether the chosen scores are scaled to a sum of 1.
        not_expressed: what Megatron's arguments cannot say.
    """

    arguments: Mapping[str, Any] = field(default_factory=dict)
    rotary_base: float = 10_000
    norm_topk_prob: bool = True
    not_expressed: tuple[str, ...] = ()


TRAITS: dict[str, Traits] = {
    "dbrx": Traits(
        arguments={"normalization": "LayerNorm", "norm-epsilon": 1.0e-5},
        not_expressed=("clip_qkv (queries, keys and values are not clipped)",),
    ),
    "deepseek_v2": Traits(norm_topk_prob=False),
    "deepseek_v3": Traits(arguments=BIASED_SIGMOID),
    "deepseek_v32": Traits(
        arguments=BIASED_SIGMOID,
        not_expressed=("the indexer of sparse attention (attention is to all keys)",),
    ),
    "dots1": Traits(arguments={**QK_NORM, **BIASED_SIGMOID}),
    "ernie4_5_moe": Traits(
        rotary_base=500_000,
        not_expressed=("the router's bias beside softmax scores (Megatron's needs sigmoid)",),
    ),
    "glm4_moe": Traits(arguments=BIASED_SIGMOID),
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
        }
    ),
    "granitemoe": Traits(
        not_expressed=("the multipliers of embedding, residual, attention and logits",)
    ),
    "kimi_k2": Traits(arguments=BIASED_SIGMOID),
    "minimax_m2": Traits(
        rotary_base=5_000_000,
        arguments={**QK_NORM, **BIASED_SIGMOID},
        not_expressed=("norms over all heads of queries and keys (Megatron's are per head)",),
    ),
    "mixtral": Traits(rotary_base=1_000_000),
    "olmoe": Traits(arguments=QK_NORM, norm_topk_prob=False),
    "phimoe": Traits(
        arguments={"normalization": "LayerNorm"},
        not_expressed=("the sparse mixer of the router", "longrope", "a bias of the output layer"),
    ),
    "qwen2_moe": Traits(
        arguments={"add-qkv-bias": True, "moe-shared-expert-gate": True}, norm_topk_prob=False
    ),
    "qwen3_moe": Traits(arguments=QK_NORM),
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
        "disable-bias-linear": True,
        "untie-embeddings-and-output-weights": not sizes.is_tied,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "init-method-std": details.initializer_range or 0.02,
        "vocab-size": sizes.vocab_size,
        **scores,
        **traits.arguments,
    }
    if details.use_qk_norm is not None:
        arguments["qk-layernorm"] = details.use_qk_norm
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
    }


def _positions(traits: Traits, details: Details, sizes: Dimensions) -> dict[str, Any]:
    scaling = details.scaling
    most = sizes.max_positions
    base = scaling.rope_theta or details.rope_theta or traits.rotary_base
    positions: dict[str, Any] = {
        "position-embedding-type": "rope",
        "rotary-base": int(base),
    }
    partial = scaling.partial_rotary_factor or details.partial_rotary_factor
    if partial is not None and partial != 1:
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
    normed = details.norm_topk_prob
    normed = traits.norm_topk_prob if normed is None else normed
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
    """What of the model Megatron's arguments here do not say, of its family and its keys."""
    texts = list(traits.not_expressed)
    if details.num_nextn_predict_layers:
        texts.append("num_nextn_predict_layers (no multi-token prediction)")
    if details.scaling.kind not in ("default", "yarn"):
        texts.append(f"rotary scaling {details.scaling.kind[:20]!r}")
    return tuple(texts)
