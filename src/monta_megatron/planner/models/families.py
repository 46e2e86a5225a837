"""Families of models: where the config.json of each has the sizes that are needed.

A family is a dataclass with fields of its config.json, under their names there. A field without a
default must be there, though it may be null where the annotation says so; a default is that of the
family's class in `transformers` (5.24), which writes all fields.
"""

from dataclasses import dataclass, replace

from monta_megatron.common.rules import NonNegativeInt, PositiveInt, require
from monta_megatron.planner.models.dimensions import (
    Decoder,
    Dimensions,
    check_divides,
    check_experts,
    every,
    grouped_query_attention,
    layer_freq,
)


@dataclass(frozen=True, kw_only=True)
class Mixtral(Decoder):
    """Mixtral: experts in every layer, each as large as a dense feed-forward layer."""

    EXPERTS = "num_local_experts"

    num_local_experts: PositiveInt
    num_experts_per_tok: PositiveInt
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
    num_experts_per_tok: PositiveInt
    intermediate_size: PositiveInt

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        return self._with(num_experts=self.num_experts, expert_ffn_size=self.intermediate_size)


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Decoder):
    """Qwen3-MoE: some layers may be dense."""

    num_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    moe_intermediate_size: PositiveInt
    intermediate_size: PositiveInt
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_layers(self.layers, "decoder_sparse_step", " without mlp_only_layers")

    @property
    def layers(self) -> list[int]:
        """Layers with experts: every `decoder_sparse_step`-th one that is not listed."""
        step, dense = self.decoder_sparse_step, set(self.mlp_only_layers or ())
        # Layers are counted from 0.
        return [
            int((layer + 1) % step == 0 and layer not in dense)
            for layer in range(self.num_hidden_layers)
        ]

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        return self._with(
            num_moe_layers=sum(self.layers),
            layer_freq=layer_freq(self.layers),
            num_experts=self.num_experts,
            expert_ffn_size=self.moe_intermediate_size,
            shared_ffn_size=self.shared_ffn_size,
            dense_ffn_size=self.intermediate_size or 0,
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
class Qwen3Next(Qwen2Moe):
    """Qwen3-Next: most layers have linear attention, and full attention has a gate."""

    head_dim: PositiveInt | None = 256
    layer_types: tuple[str, ...] | None = None
    full_attention_interval: PositiveInt = 4
    linear_conv_kernel_dim: PositiveInt = 4
    linear_key_head_dim: PositiveInt = 128
    linear_value_head_dim: PositiveInt = 128
    linear_num_key_heads: PositiveInt = 16
    linear_num_value_heads: PositiveInt = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        layers, types = self.num_hidden_layers, self.layer_types or ()
        rule = f"be linear_attention or full_attention for each of num_hidden_layers ({layers})"
        are_known = {*types} <= {"linear_attention", "full_attention"}
        is_whole = len(types) == layers or self.layer_types is None
        require(are_known and is_whole, "layer_types", sorted({*types}), rule)

    @property
    def linear_layers(self) -> list[int]:
        """Layers with linear attention."""
        if self.layer_types is not None:
            return [int(kind == "linear_attention") for kind in self.layer_types]
        interval = self.full_attention_interval
        return [int((layer + 1) % interval != 0) for layer in range(self.num_hidden_layers)]

    @property
    def attention_parameters(self) -> int:
        """Weights of a layer's attention, the mean of both kinds."""
        # The gate of full attention has the size of the queries.
        gate = self.hidden_size * self.num_attention_heads * (self.head_dim or 0)
        full = super().attention_parameters + gate
        keys = self.linear_num_key_heads * self.linear_key_head_dim
        values = self.linear_num_value_heads * self.linear_value_head_dim
        # Queries and keys, values, their gate and the output, and two numbers of each head.
        linear = self.hidden_size * (2 * keys + 3 * values + 2 * self.linear_num_value_heads)
        linear += self.linear_conv_kernel_dim * (2 * keys + values)
        num_linear, layers = sum(self.linear_layers), self.num_hidden_layers
        return (num_linear * linear + (layers - num_linear) * full) // layers

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        layers = self.linear_layers
        return replace(super().dimensions(), linear_freq=every(layers, 1) if any(layers) else None)


@dataclass(frozen=True, kw_only=True)
class Qwen35Moe(Qwen3Next):
    """Qwen3.5-MoE: the same without dense layers."""

    intermediate_size: PositiveInt | None = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Llama4(Decoder):
    """Llama 4: a shared expert as large as the others, and layers that rotate nothing."""

    EXPERTS = "num_local_experts"

    num_local_experts: PositiveInt
    num_experts_per_tok: PositiveInt = 1
    intermediate_size: PositiveInt
    intermediate_size_mlp: PositiveInt
    head_dim: PositiveInt | None = 128
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: PositiveInt = 1
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: PositiveInt = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_layers(self.layers, "interleave_moe_layer_step")
        given, layers = self.no_rope_layers, self.num_hidden_layers
        require(
            not given or (len(given) == layers and {*given} <= {0, 1}),
            "no_rope_layers",
            len(given or ()),
            f"be a 0 or 1 for each of num_hidden_layers ({layers})",
        )

    @property
    def layers(self) -> list[int]:
        """Layers with experts: those that are listed, or every so many."""
        step, listed = self.interleave_moe_layer_step, self.moe_layers
        layers = range(self.num_hidden_layers)
        if listed is None:
            return [int((layer + 1) % step == 0) for layer in layers]
        return [int(layer in listed) for layer in layers]

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        interval = self.no_rope_layer_interval
        # Their list has a 1 where a layer rotates.
        rotates = self.no_rope_layers or [
            int((layer + 1) % interval != 0) for layer in range(self.num_hidden_layers)
        ]
        return self._with(
            num_moe_layers=sum(self.layers),
            layer_freq=layer_freq(self.layers),
            num_experts=self.num_local_experts,
            expert_ffn_size=self.intermediate_size,
            shared_ffn_size=self.intermediate_size,
            dense_ffn_size=self.intermediate_size_mlp,
            no_rope_freq=None if all(rotates) else every([1 - each for each in rotates], 0),
        )


@dataclass(frozen=True, kw_only=True)
class Hunyuan(Decoder):
    """Hunyuan-A13B: sizes may be lists of a number for each layer, all alike."""

    TOPK = "moe_topk"

    num_experts: PositiveInt
    moe_topk: PositiveInt
    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt | None = None
    num_shared_expert: NonNegativeInt = 1
    moe_layer_num_skipped: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_layers(self.layers, "moe_layer_num_skipped")

    @property
    def layers(self) -> list[int]:
        """Layers with experts: all after the first ones."""
        skipped = self.moe_layer_num_skipped
        return [int(layer >= skipped) for layer in range(self.num_hidden_layers)]

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        return self._with(
            num_moe_layers=sum(self.layers),
            layer_freq=layer_freq(self.layers),
            num_experts=self.num_experts,
            expert_ffn_size=self.moe_intermediate_size or self.intermediate_size,
            shared_ffn_size=self.num_shared_expert * self.intermediate_size,
            dense_ffn_size=self.intermediate_size,
        )


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(Decoder):
    """GLM-4.5: dense layers first, shared experts, groups of experts."""

    EXPERTS = "n_routed_experts"

    n_routed_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    moe_intermediate_size: PositiveInt
    intermediate_size: PositiveInt
    n_shared_experts: NonNegativeInt | None
    first_k_dense_replace: NonNegativeInt
    n_group: PositiveInt | None
    topk_group: PositiveInt | None
    topk_method: str = "noaux_tc"
    moe_layer_freq: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        also = f" and at every moe_layer_freq ({self.moe_layer_freq})"
        self._check_layers(self.layers, "first_k_dense_replace", also)
        if self.is_grouped:
            self._check_groups()

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
    def layers(self) -> list[int]:
        """Layers with experts: multiples of moe_layer_freq after the first, dense ones."""
        return [
            int(layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0)
            for layer in range(self.num_hidden_layers)
        ]

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        return self._with(
            num_moe_layers=sum(self.layers),
            layer_freq=layer_freq(self.layers),
            num_experts=self.n_routed_experts,
            expert_ffn_size=self.moe_intermediate_size,
            shared_ffn_size=(self.n_shared_experts or 0) * self.moe_intermediate_size,
            dense_ffn_size=self.intermediate_size,
            num_groups=self.n_group if self.is_grouped else None,
            group_topk=self.topk_group if self.is_grouped else None,
        )


@dataclass(frozen=True, kw_only=True)
class Dots1(Glm4Moe):
    """dots.llm1: the same, with one group unless the file says more."""

    n_group: PositiveInt | None = 1
    topk_group: PositiveInt | None = 1


@dataclass(frozen=True, kw_only=True)
class DeepseekV3(Glm4Moe):
    """DeepSeek-V3 and Kimi K2: the same with latent attention."""

    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    q_lora_rank: PositiveInt | None

    def _check_head_dim(self) -> None:
        """The dimensions of latent attention are all given."""

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


@dataclass(frozen=True, kw_only=True)
class DeepseekV2(DeepseekV3):
    """DeepSeek-V2: the same, with another router unless the file says which."""

    topk_method: str = "greedy"


@dataclass(frozen=True, kw_only=True)
class Ernie(Decoder):
    """ERNIE 4.5: dense layers first and last, shared experts."""

    EXPERTS = "moe_num_experts"
    TOPK = "moe_k"

    moe_num_experts: PositiveInt
    moe_k: PositiveInt
    moe_intermediate_size: PositiveInt
    intermediate_size: PositiveInt
    moe_num_shared_experts: NonNegativeInt | None = 2
    moe_layer_start_index: NonNegativeInt = 1
    moe_layer_end_index: int = -1
    moe_layer_interval: PositiveInt = 1
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_layers(self.layers, "moe_layer_start_index")

    @property
    def layers(self) -> list[int]:
        """Layers with experts: every `moe_layer_interval`-th one from start to end."""
        end = self.moe_layer_end_index
        last = self.num_hidden_layers - 1 if end == -1 else end
        return [
            int(
                (layer + 1) % self.moe_layer_interval == 0
                and self.moe_layer_start_index <= layer <= last
            )
            for layer in range(self.num_hidden_layers)
        ]

    def dimensions(self) -> Dimensions:
        """The same by our names."""
        return self._with(
            num_moe_layers=sum(self.layers),
            layer_freq=layer_freq(self.layers),
            num_experts=self.moe_num_experts,
            expert_ffn_size=self.moe_intermediate_size,
            shared_ffn_size=(self.moe_num_shared_experts or 0) * self.moe_intermediate_size,
            dense_ffn_size=self.intermediate_size,
        )


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
FAMILIES: dict[str, type[Decoder | Dbrx]] = {
    "dbrx": Dbrx,
    "deepseek_v2": DeepseekV2,
    "deepseek_v3": DeepseekV3,
    "deepseek_v32": DeepseekV3,
    "dots1": Dots1,
    "ernie4_5_moe": Ernie,
    "glm4_moe": Glm4Moe,
    "gpt_oss": GptOss,
    "granitemoe": Mixtral,
    "hunyuan_v1_moe": Hunyuan,
    "kimi_k2": DeepseekV3,
    "llama4": Llama4,
    "llama4_text": Llama4,
    "minimax_m2": GptOss,
    "mixtral": Mixtral,
    "olmoe": Olmoe,
    "phimoe": Mixtral,
    "qwen2_moe": Qwen2Moe,
    "qwen3_5_moe": Qwen35Moe,
    "qwen3_5_moe_text": Qwen35Moe,
    "qwen3_moe": Qwen3Moe,
    "qwen3_next": Qwen3Next,
}
