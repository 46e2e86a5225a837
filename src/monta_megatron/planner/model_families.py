"""Families of models: where the config.json of each has the sizes that are needed.

A family is a dataclass with fields of its config.json, under their names there. A field without a
default must be there, though it may be null where the annotation says so; a default is that of the
family's class in `transformers` (5.23), which writes all fields.
"""

from dataclasses import dataclass
from typing import Any

from monta_megatron.common.rules import NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """What every family comes down to; `Model` explains what is not explained here.

    Attributes:
        attention_parameters: weights of one layer's attention.
        expert_ffn_size: FFN size of one expert.
        shared_ffn_size: FFN size of a layer's shared experts together.
        dense_ffn_size: FFN size of the layers without experts.
        is_tied: whether input and output embeddings are the same weights.
    """

    hidden_size: int
    num_layers: int
    num_moe_layers: int
    num_attention_heads: int
    num_query_groups: int
    num_experts: int
    topk: int
    expert_ffn_size: int
    attention_parameters: int
    vocab_size: int
    max_positions: int | None
    is_tied: bool
    shared_ffn_size: int = 0
    dense_ffn_size: int = 0
    num_groups: int | None = None
    group_topk: int | None = None

    @property
    def num_parameters(self) -> int:
        """Weights of all matrices: norms and biases, less than one in a thousand, are left out."""
        # Every feed-forward layer is gated: two matrices in and one out.
        per_ffn_size = 3 * self.hidden_size
        moe_layer = per_ffn_size * (self.num_experts * self.expert_ffn_size + self.shared_ffn_size)
        moe_layer += self.hidden_size * self.num_experts
        return (
            self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
            + self.num_layers * self.attention_parameters
            + self.num_moe_layers * moe_layer
            + (self.num_layers - self.num_moe_layers) * per_ffn_size * self.dense_ffn_size
        )


def _grouped_query_attention(hidden_size: int, heads: int, groups: int, head_dim: int) -> int:
    """Weights of query, key, value and output."""
    return 2 * hidden_size * head_dim * (heads + groups)


@dataclass(frozen=True, kw_only=True)
class _Decoder:
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_experts_per_tok: PositiveInt
    vocab_size: PositiveInt
    num_key_value_heads: PositiveInt | None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt | None = None
    tie_word_embeddings: bool = False

    @property
    def attention_parameters(self) -> int:
        heads = self.num_attention_heads
        head_dim = self.head_dim or self.hidden_size // heads
        groups = self.num_key_value_heads or heads
        return _grouped_query_attention(self.hidden_size, heads, groups, head_dim)

    def _with(self, **sizes: Any) -> Dimensions:
        """What all of these families name alike, and what each names in its own way."""
        common = {
            "hidden_size": self.hidden_size,
            "num_layers": self.num_hidden_layers,
            "num_moe_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_key_value_heads or self.num_attention_heads,
            "topk": self.num_experts_per_tok,
            "attention_parameters": self.attention_parameters,
            "vocab_size": self.vocab_size,
            "max_positions": self.max_position_embeddings,
            "is_tied": self.tie_word_embeddings,
        }
        return Dimensions(**{**common, **sizes})


@dataclass(frozen=True, kw_only=True)
class Mixtral(_Decoder):
    """Mixtral: experts in every layer, each as large as a dense feed-forward layer."""

    num_local_experts: PositiveInt
    intermediate_size: PositiveInt

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        return self._with(
            num_experts=self.num_local_experts, expert_ffn_size=self.intermediate_size
        )


@dataclass(frozen=True, kw_only=True)
class GptOss(Mixtral):
    """gpt-oss: the same, with heads that do not follow from the hidden size."""

    head_dim: PositiveInt


@dataclass(frozen=True, kw_only=True)
class Olmoe(_Decoder):
    """OLMoE: as Mixtral, with another name for the number of experts."""

    num_experts: PositiveInt
    intermediate_size: PositiveInt

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        return self._with(num_experts=self.num_experts, expert_ffn_size=self.intermediate_size)


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(_Decoder):
    """Qwen3-MoE: some layers may be dense."""

    num_experts: PositiveInt
    moe_intermediate_size: PositiveInt
    intermediate_size: PositiveInt
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: tuple[int, ...] | None = None

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        layers, step = self.num_hidden_layers, self.decoder_sparse_step
        # Layers are counted from 0; every `step`-th one has experts unless it is listed as dense.
        dense = {layer for layer in self.mlp_only_layers or () if 0 <= layer < layers}
        return self._with(
            num_moe_layers=layers // step - sum((layer + 1) % step == 0 for layer in dense),
            num_experts=self.num_experts,
            expert_ffn_size=self.moe_intermediate_size,
            shared_ffn_size=self.shared_ffn_size,
            dense_ffn_size=self.intermediate_size,
        )

    @property
    def shared_ffn_size(self) -> int:
        """FFN size of the shared expert."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Qwen2Moe(Qwen3Moe):
    """Qwen2-MoE: the same with a shared expert."""

    shared_expert_intermediate_size: PositiveInt

    @property
    def shared_ffn_size(self) -> int:
        """FFN size of the shared expert."""
        return self.shared_expert_intermediate_size


@dataclass(frozen=True, kw_only=True)
class DeepseekV3(_Decoder):
    """DeepSeek-V3 and Kimi K2: latent attention, dense layers first, groups of experts."""

    n_routed_experts: PositiveInt
    moe_intermediate_size: PositiveInt
    intermediate_size: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    q_lora_rank: PositiveInt | None
    n_shared_experts: NonNegativeInt | None
    first_k_dense_replace: NonNegativeInt
    n_group: PositiveInt | None
    topk_group: PositiveInt | None
    topk_method: str = "noaux_tc"
    moe_layer_freq: PositiveInt = 1

    @property
    def attention_parameters(self) -> int:
        """Weights of a layer's projections into and out of the latent space, and of the output."""
        heads, hidden_size = self.num_attention_heads, self.hidden_size
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank = self.q_lora_rank
        query = hidden_size * queries if rank is None else rank * (hidden_size + queries)
        keys_and_values = hidden_size * (self.kv_lora_rank + self.qk_rope_head_dim)
        keys_and_values += self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + keys_and_values + heads * self.v_head_dim * hidden_size

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        is_grouped = (self.n_group or 1) > 1 and self.topk_method != "greedy"
        return self._with(
            # The multiples of moe_layer_freq from the first layers, which are dense, to the last.
            num_moe_layers=-(-self.num_hidden_layers // self.moe_layer_freq)
            - -(-self.first_k_dense_replace // self.moe_layer_freq),
            num_experts=self.n_routed_experts,
            expert_ffn_size=self.moe_intermediate_size,
            shared_ffn_size=(self.n_shared_experts or 0) * self.moe_intermediate_size,
            dense_ffn_size=self.intermediate_size,
            num_groups=self.n_group if is_grouped else None,
            group_topk=self.topk_group if is_grouped else None,
        )


@dataclass(frozen=True, kw_only=True)
class DeepseekV2(DeepseekV3):
    """DeepSeek-V2: the same, with another router unless the file says which."""

    topk_method: str = "greedy"


@dataclass(frozen=True, kw_only=True)
class _DbrxAttention:
    kv_n_heads: PositiveInt


@dataclass(frozen=True, kw_only=True)
class _DbrxFeedForward:
    ffn_hidden_size: PositiveInt
    moe_num_experts: PositiveInt
    moe_top_k: PositiveInt


@dataclass(frozen=True, kw_only=True)
class Dbrx:
    """DBRX."""

    d_model: PositiveInt
    n_layers: PositiveInt
    n_heads: PositiveInt
    vocab_size: PositiveInt
    attn_config: _DbrxAttention
    ffn_config: _DbrxFeedForward
    max_seq_len: PositiveInt | None = None
    tie_word_embeddings: bool = False

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        groups, experts = self.attn_config.kv_n_heads, self.ffn_config
        head_dim = self.d_model // self.n_heads
        return Dimensions(
            hidden_size=self.d_model,
            num_layers=self.n_layers,
            num_moe_layers=self.n_layers,
            num_attention_heads=self.n_heads,
            num_query_groups=groups,
            num_experts=experts.moe_num_experts,
            topk=experts.moe_top_k,
            expert_ffn_size=experts.ffn_hidden_size,
            attention_parameters=_grouped_query_attention(
                self.d_model, self.n_heads, groups, head_dim
            ),
            vocab_size=self.vocab_size,
            max_positions=self.max_seq_len,
            is_tied=self.tie_word_embeddings,
        )


# `model_type` -> the family that is read as this class says.
FAMILIES: dict[str, type[Mixtral | Olmoe | Qwen3Moe | DeepseekV3 | Dbrx]] = {
    "dbrx": Dbrx,
    "deepseek_v2": DeepseekV2,
    "deepseek_v3": DeepseekV3,
    "gpt_oss": GptOss,
    "kimi_k2": DeepseekV3,
    "mixtral": Mixtral,
    "olmoe": Olmoe,
    "qwen2_moe": Qwen2Moe,
    "qwen3_moe": Qwen3Moe,
}
