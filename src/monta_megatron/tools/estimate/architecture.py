"""What a model computes: the dimensions of its layers, from the Megatron arguments of a run."""

from dataclasses import dataclass

from monta_megatron.common.flags import whole
from monta_megatron.common.rules import NonNegativeInt, PositiveInt, require
from monta_megatron.planner.routing.expected import UniformRouting
from monta_megatron.tools.launch.arguments import SIZE, Arguments
from monta_megatron.tools.launch.iteration import moe_layers

NOT_NEGATIVE = whole(0)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder with experts.

    Attributes:
        num_layers: transformer layers.
        num_dense_layers: those of them without experts.
        hidden_size: H.
        num_attention_heads: query heads.
        num_query_groups: key and value heads; not used by multi-latent attention.
        head_dim: values of a head; with multi-latent attention those without positions.
        query_rank: rank of the queries' factors; None where they are not factored.
        key_value_rank: rank of the keys' and values' factors; None without multi-latent attention.
        rotary_dim: values of a head that carry positions, with multi-latent attention.
        value_dim: values of a head's value, with multi-latent attention.
        window_size: keys that a sliding-window layer sees; None where no layer is one.
        window_every: one layer of so many sees all keys, the others a window.
        num_experts: routed experts of a layer.
        router_topk: experts of a token.
        router_num_groups: groups of a group-limited router, 1 for none.
        router_group_topk: groups that a token may use.
        expert_ffn_size: FFN size of one expert; all feed-forward layers have a gate.
        shared_ffn_size: of the shared experts together.
        dense_ffn_size: of the layers without experts.
        vocab_size: rows of the embedding and of the output layer.
        mtp_layers: layers that predict further tokens, each with a loss.
    """

    num_layers: PositiveInt
    num_dense_layers: NonNegativeInt = 0
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt
    head_dim: PositiveInt
    query_rank: PositiveInt | None = None
    key_value_rank: PositiveInt | None = None
    rotary_dim: NonNegativeInt = 0
    value_dim: PositiveInt | None = None
    window_size: PositiveInt | None = None
    window_every: PositiveInt = 1
    num_experts: PositiveInt
    router_topk: PositiveInt
    router_num_groups: PositiveInt = 1
    router_group_topk: PositiveInt = 1
    expert_ffn_size: PositiveInt
    shared_ffn_size: NonNegativeInt = 0
    dense_ffn_size: PositiveInt
    vocab_size: PositiveInt
    mtp_layers: NonNegativeInt = 0

    def __post_init__(self) -> None:
        dense, layers = self.num_dense_layers, self.num_layers
        require(dense < layers, "num_dense_layers", dense, f"be less than num_layers ({layers})")

    @property
    def is_latent(self) -> bool:
        """Whether its attention is multi-latent (MLA)."""
        return self.key_value_rank is not None

    @property
    def attention_name(self) -> str:
        """The type of its attention, as a part of the iteration."""
        if self.is_latent:
            return "attention (MLA)"
        whole_heads = self.num_query_groups == self.num_attention_heads
        return "attention (MHA)" if whole_heads else "attention (GQA)"

    @property
    def windowed_share(self) -> float:
        """Share of the layers whose attention sees a window."""
        return 0.0 if self.window_size is None else 1 - 1 / self.window_every

    @property
    def attention_matrices(self) -> tuple[tuple[int, int], ...]:
        """(rows in, rows out) of every weight of a layer's attention."""
        hidden, heads = self.hidden_size, self.num_attention_heads
        if self.key_value_rank is None:
            query = heads * self.head_dim
            key_value = 2 * self.num_query_groups * self.head_dim
            return ((hidden, query + key_value), (query, hidden))
        value_dim = self.value_dim or self.head_dim
        query = heads * (self.head_dim + self.rotary_dim)
        if self.query_rank is None:
            queries: tuple[tuple[int, int], ...] = ((hidden, query),)
        else:
            queries = ((hidden, self.query_rank), (self.query_rank, query))
        return (
            *queries,
            (hidden, self.key_value_rank + self.rotary_dim),
            (self.key_value_rank, heads * (self.head_dim + value_dim)),
            (heads * value_dim, hidden),
        )

    @property
    def core_attention_values(self) -> int:
        """Values of queries and values that meet every key: [heads x (key dim + value dim)]."""
        value_dim = self.value_dim or self.head_dim
        return self.num_attention_heads * (self.head_dim + self.rotary_dim + value_dim)

    @property
    def attention_parameters(self) -> int:
        """Weights of a layer's attention."""
        return sum(rows_in * rows_out for rows_in, rows_out in self.attention_matrices)

    @property
    def routing(self) -> UniformRouting:
        """Its router with every expert as likely as any other."""
        return UniformRouting(
            num_experts=self.num_experts,
            topk=self.router_topk,
            num_groups=self.router_num_groups,
            group_topk=self.router_group_topk,
        )

    def seen_keys(self, seq_length: int) -> float:
        """Keys that a token sees in the mean: of the causal half, or of a window."""
        window = min(self.window_size or seq_length, seq_length)
        # The first tokens of a sequence see fewer keys than the window holds.
        windowed = window - window * window / (2 * seq_length)
        share = self.windowed_share
        return (1 - share) * seq_length / 2 + share * windowed

    def model_flops_per_token(self, seq_length: int) -> float:
        """FLOPs of a token, forward and backward, as Megatron counts them for its TFLOP/s."""
        per_ffn = 3 * self.hidden_size
        active = self.router_topk * self.expert_ffn_size + self.shared_ffn_size
        moe = per_ffn * active + self.hidden_size * self.num_experts
        dense = per_ffn * self.dense_ffn_size
        num_moe = self.num_layers - self.num_dense_layers
        weights = (
            (self.num_layers + self.mtp_layers) * self.attention_parameters
            + (num_moe + self.mtp_layers) * moe
            + self.num_dense_layers * dense
            + (1 + self.mtp_layers) * self.vocab_size * self.hidden_size
        )
        core = self.core_attention_values * self.seen_keys(seq_length)
        return 6 * (weights + (self.num_layers + self.mtp_layers) * core)


def architecture_of(arguments: Arguments, file: str) -> Architecture:
    """The architecture that Megatron's arguments describe.

    Args:
        arguments: of a run.
        file: the run file, for messages.

    Raises:
        ValueError: one that is needed is missing, or is no number.
    """

    def size(name: str, default: int | None = None) -> int:
        if name in arguments:
            return arguments[name].read(NOT_NEGATIVE if default == 0 else SIZE)
        if default is None:
            raise ValueError(f"{file}: megatron.{name}: missing, must be given for an estimate")
        return default

    hidden, heads = size("hidden-size"), size("num-attention-heads")
    latent = "multi-latent-attention" in arguments
    ffn = size("ffn-hidden-size", 4 * hidden)
    pattern = moe_layers(arguments)
    num_layers = size("num-layers")
    groups = size("moe-router-num-groups", 1)
    grouped = "group-query-attention" in arguments
    return Architecture(
        num_layers=num_layers,
        num_dense_layers=0 if pattern is None else num_layers - sum(pattern),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=size("num-query-groups", heads) if grouped else heads,
        # Megatron's own defaults for multi-latent attention.
        head_dim=size("qk-head-dim", 128) if latent else size("kv-channels", hidden // heads),
        query_rank=size("q-lora-rank") if latent and "q-lora-rank" in arguments else None,
        key_value_rank=size("kv-lora-rank", 32) if latent else None,
        rotary_dim=size("qk-pos-emb-head-dim", 64) if latent else 0,
        value_dim=size("v-head-dim", 128) if latent else None,
        window_size=_window(arguments),
        window_every=size("window-attn-skip-freq", 1) if "window-size" in arguments else 1,
        num_experts=size("num-experts"),
        router_topk=size("moe-router-topk", 2),
        router_num_groups=groups,
        router_group_topk=size("moe-router-group-topk", groups),
        expert_ffn_size=size("moe-ffn-hidden-size", ffn),
        shared_ffn_size=size("moe-shared-expert-intermediate-size", 0),
        dense_ffn_size=ffn,
        vocab_size=size("vocab-size"),
        mtp_layers=size("mtp-num-layers", 0),
    )


def _window(arguments: Arguments) -> int | None:
    """Keys that a sliding window holds: `127,0` is the token itself and 127 before it.

    Raises:
        ValueError: it is no pair of numbers.
    """
    if "window-size" not in arguments:
        return None
    argument = arguments["window-size"]
    first = str(argument.value).strip("()[] ").partition(",")[0]
    if not first.isascii() or not first.isdigit():
        raise ValueError(
            f"{argument.source}: got {argument.value}, must be two numbers, such as 127,0"
        )
    return int(first) + 1
