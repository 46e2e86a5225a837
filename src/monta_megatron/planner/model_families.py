"""Families of models: where the config.json of each has the sizes that are needed.

A family is a dataclass with fields of its config.json, under their names there. A field without a
default must be there, though it may be null where the annotation says so; a default is that of the
family's class in `transformers` (5.23), which writes all fields.
"""

from dataclasses import dataclass

from monta_megatron.common.rules import NonNegativeInt, PositiveInt, require
from monta_megatron.planner.model_dimensions import (
    Decoder,
    Dimensions,
    check_divides,
    check_experts,
    grouped_query_attention,
)


@dataclass(frozen=True, kw_only=True)
class Mixtral(Decoder):
    """Mixtral: experts in every layer, each as large as a dense feed-forward layer."""

    EXPERTS = "num_local_experts"

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
class Olmoe(Decoder):
    """OLMoE: as Mixtral, with another name for the number of experts."""

    num_experts: PositiveInt
    intermediate_size: PositiveInt

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        return self._with(num_experts=self.num_experts, expert_ffn_size=self.intermediate_size)


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Decoder):
    """Qwen3-MoE: some layers may be dense."""

    num_experts: PositiveInt
    moe_intermediate_size: PositiveInt
    intermediate_size: PositiveInt
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_moe_layers > 0,
            "decoder_sparse_step",
            self.decoder_sparse_step,
            f"leave a layer with experts, of num_hidden_layers ({self.num_hidden_layers}) without "
            "mlp_only_layers",
        )

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        layers, step = self.num_hidden_layers, self.decoder_sparse_step
        # Layers are counted from 0; every `step`-th one has experts unless it is listed as dense.
        dense = {layer for layer in self.mlp_only_layers or () if 0 <= layer < layers}
        return layers // step - sum((layer + 1) % step == 0 for layer in dense)

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        return self._with(
            num_moe_layers=self.num_moe_layers,
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
class DeepseekV3(Decoder):
    """DeepSeek-V3 and Kimi K2: latent attention, dense layers first, groups of experts."""

    EXPERTS = "n_routed_experts"

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

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_moe_layers > 0,
            "first_k_dense_replace",
            self.first_k_dense_replace,
            f"leave a layer with experts, of num_hidden_layers ({self.num_hidden_layers}) and at "
            f"every moe_layer_freq ({self.moe_layer_freq})",
        )
        if self.is_grouped:
            self._check_groups()

    def _check_head_dim(self) -> None:
        """The dimensions of latent attention are all given."""

    def _check_groups(self) -> None:
        check_divides(self, "n_group", "n_routed_experts")
        groups, chosen, topk = self.n_group or 1, self.topk_group or 0, self.num_experts_per_tok
        for holds, rule in (
            (1 <= chosen <= groups, f"be from 1 to n_group ({groups})"),
            (
                chosen * (self.n_routed_experts // groups) >= topk,
                f"leave at least num_experts_per_tok ({topk}) experts to choose from",
            ),
        ):
            require(holds, "topk_group", self.topk_group, rule)

    @property
    def is_grouped(self) -> bool:
        """Whether a token may use some groups of experts only."""
        return (self.n_group or 1) > 1 and self.topk_method != "greedy"

    @property
    def num_moe_layers(self) -> int:
        """The multiples of moe_layer_freq from the first layers, which are dense, to the last."""
        step = self.moe_layer_freq
        return -(-self.num_hidden_layers // step) - -(-self.first_k_dense_replace // step)

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
        return self._with(
            num_moe_layers=self.num_moe_layers,
            num_experts=self.n_routed_experts,
            expert_ffn_size=self.moe_intermediate_size,
            shared_ffn_size=(self.n_shared_experts or 0) * self.moe_intermediate_size,
            dense_ffn_size=self.intermediate_size,
            num_groups=self.n_group if self.is_grouped else None,
            group_topk=self.topk_group if self.is_grouped else None,
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

    def __post_init__(self) -> None:
        check_experts(self, "moe_top_k", "moe_num_experts")


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

    def __post_init__(self) -> None:
        check_divides(self, "n_heads", "d_model")
        heads, groups = self.n_heads, self.attn_config.kv_n_heads
        require(heads % groups == 0, "attn_config.kv_n_heads", groups, f"divide n_heads ({heads})")

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
            attention_parameters=grouped_query_attention(
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
