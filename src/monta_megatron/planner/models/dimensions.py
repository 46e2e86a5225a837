"""Dimensions common to all families of models, and keys that most config.json share."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from monta_megatron.common.rules import PositiveInt, require
from monta_megatron.planner.models.model import MOST_EXPERTS

# Layers are listed one by one.
MOST_LAYERS = 10_000


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Dimensions of a model of any family; `Model` explains the others.

    Attributes:
        attention_parameters: weights of one layer's attention, the mean of all layers.
        expert_ffn_size: FFN size of one expert.
        shared_ffn_size: FFN size of a layer's shared experts together.
        dense_ffn_size: FFN size of the layers without experts.
        is_tied: whether input and output embeddings are the same weights.
        layer_freq: which layers have experts, as Megatron's --moe-layer-freq; None for all.
        linear_freq: which layers have linear attention, as --linear-attention-freq; None for none.
        no_rope_freq: which layers rotate nothing, as --no-rope-freq; None for none.
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
    layer_freq: str | None = None
    linear_freq: str | int | None = None
    no_rope_freq: str | int | None = None

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


def grouped_query_attention(hidden_size: int, heads: int, groups: int, head_dim: int) -> int:
    """Weights of query, key, value and output."""
    return 2 * hidden_size * head_dim * (heads + groups)


def layer_freq(pattern: Iterable[int]) -> str | None:
    """Layers with (1) and without (0) experts as Megatron's --moe-layer-freq; None for all 1."""
    layers = list(pattern)
    dense = layers.count(0)
    if not dense:
        return None
    if layers == sorted(layers):
        return f"([0]*{dense}+[1]*{len(layers) - dense})"
    return str(layers).replace(" ", "")


def every(pattern: list[int], most: int) -> str | int:
    """Layers as Megatron takes them: N where all but the last of every N are `most`, or a list."""
    period = (pattern.index(1 - most) if 1 - most in pattern else 0) + 1
    block = [most] * (period - 1) + [1 - most]
    if period > 1 and block * (len(pattern) // period) == pattern:
        return period
    return str(pattern).replace(" ", "")


def check_divides(config: Any, name: str, other: str) -> None:
    """Refuse a field that does not divide another one; null divides all."""
    value, total = getattr(config, name), getattr(config, other)
    require(value is None or total % value == 0, name, value, f"divide {other} ({total})")


def check_experts(config: Any, topk: str, experts: str) -> None:
    """Refuse too many experts, of a layer or of a token; both are named by their fields."""
    number, most = getattr(config, experts), MOST_EXPERTS
    require(number <= most, experts, number, f"be at most {most}")
    value = getattr(config, topk)
    require(value <= number, topk, value, f"be at most {experts} ({number})")


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Fields that all families but DBRX name alike.

    Attributes:
        EXPERTS: what a family calls the number of its experts.
        TOPK: what it calls the experts of a token.
    """

    EXPERTS: ClassVar[str] = "num_experts"
    TOPK: ClassVar[str] = "num_experts_per_tok"

    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    vocab_size: PositiveInt
    num_key_value_heads: PositiveInt | None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        check_experts(self, self.TOPK, self.EXPERTS)
        layers = self.num_hidden_layers
        require(layers <= MOST_LAYERS, "num_hidden_layers", layers, f"be at most {MOST_LAYERS}")
        check_divides(self, "num_key_value_heads", "num_attention_heads")
        self._check_head_dim()

    def _check_head_dim(self) -> None:
        if self.head_dim is None:
            check_divides(self, "num_attention_heads", "hidden_size")

    def _check_layers(self, layers: list[int], name: str, also: str = "") -> None:
        """Refuse a field that leaves no layer with experts."""
        rule = f"leave a layer with experts, of num_hidden_layers ({self.num_hidden_layers}){also}"
        require(any(layers), name, getattr(self, name), rule)

    @property
    def attention_parameters(self) -> int:
        """Weights of a layer's attention."""
        heads = self.num_attention_heads
        head_dim = self.head_dim or self.hidden_size // heads
        groups = self.num_key_value_heads or heads
        return grouped_query_attention(self.hidden_size, heads, groups, head_dim)

    def dimensions(self) -> Dimensions:
        """The sizes by our names, which every family has in its own way."""
        raise NotImplementedError

    def _with(self, **sizes: Any) -> Dimensions:
        """Dimensions from keys that these families share, and from keys of their own."""
        common = {
            "hidden_size": self.hidden_size,
            "num_layers": self.num_hidden_layers,
            "num_moe_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_key_value_heads or self.num_attention_heads,
            "topk": getattr(self, self.TOPK),
            "attention_parameters": self.attention_parameters,
            "vocab_size": self.vocab_size,
            "max_positions": self.max_position_embeddings,
            "is_tied": self.tie_word_embeddings,
        }
        return Dimensions(**{**common, **sizes})
