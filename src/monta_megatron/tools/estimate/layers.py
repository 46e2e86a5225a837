"""Layers of a model on one rank: dimensions, training settings, FLOPs and bytes by part.

Attention takes 2 FLOPs per query value and key and 2 per key and value; its backward pass
recomputes the scores, 5 products in place of 2. Matrices and all else: `planner.experts`.

Notation: t = tokens of the micro-batch on the rank; with tensor parallelism all t x TP tokens meet
1/TP of a matrix. A layer is the mean of the model's layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from monta_megatron.common.flags import whole
from monta_megatron.common.rules import NonNegativeInt, PositiveInt, require
from monta_megatron.planner.assumptions import Assumptions
from monta_megatron.planner.experts import VALUE_BYTES, Work, experts_work, matrix, passes
from monta_megatron.planner.layout import ParallelLayout
from monta_megatron.planner.routing.expected import UniformRouting
from monta_megatron.tools.launch.arguments import SIZE, Arguments
from monta_megatron.tools.launch.exchanges import LAST_STAGE, linear_layers, moe_layers

Recompute = Literal["none", "selective", "full"]
# alltoall is stock's; deepep and hybridep are backends of stock's `flex`.
Dispatcher = Literal["alltoall", "deepep", "hybridep"]


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """One training.

    Attributes:
        world_size: all ranks.
        tp, cp, pp, ep, etp: sizes of Megatron's parallel groups.
        seq_length: tokens of a sequence.
        micro_batch_size: sequences of a micro-batch.
        global_batch_size: sequences of an iteration.
        virtual_stages: parts that each pipeline stage is cut into.
        last_stage_layers: of the last pipeline stage, which has the loss too; None for as many as
            of the others, rounded down.
        recompute: selective computes norms and activation functions again, full whole layers.
        overlap: whether the exchange of one micro-batch runs beside another one's computation
            (Megatron's 1F1B overlap).
        graphs: whether CUDA graphs start most of a layer.
        permute_fusion: whether stock's permutation is one kernel.
        dispatcher: who exchanges the tokens.
        device_connections: CUDA_DEVICE_MAX_CONNECTIONS; kept for the record, it has no price.
        value_bytes: bytes of an activation's value.
        overlap_gradients: whether the backward pass hides part of their reduction.
    """

    world_size: PositiveInt
    tp: PositiveInt = 1
    cp: PositiveInt = 1
    pp: PositiveInt = 1
    ep: PositiveInt = 1
    etp: PositiveInt = 1
    seq_length: PositiveInt = 4096
    micro_batch_size: PositiveInt = 1
    global_batch_size: PositiveInt
    virtual_stages: PositiveInt = 1
    last_stage_layers: NonNegativeInt | None = None
    recompute: Recompute = "none"
    overlap: bool = False
    graphs: bool = False
    permute_fusion: bool = True
    dispatcher: Dispatcher = "alltoall"
    device_connections: PositiveInt | None = None
    value_bytes: PositiveInt = VALUE_BYTES
    overlap_gradients: bool = True

    def __post_init__(self) -> None:
        step = self.micro_batch_size * self.layout.dp
        require(
            self.global_batch_size % step == 0,
            "global_batch_size",
            self.global_batch_size,
            f"be a multiple of micro_batch_size x data parallel size ({step})",
        )

    @property
    def layout(self) -> ParallelLayout:
        """The layout in the planner's form."""
        return ParallelLayout(
            world_size=self.world_size, tp=self.tp, cp=self.cp, pp=self.pp, ep=self.ep, etp=self.etp
        )

    @property
    def num_micro_batches(self) -> int:
        """Of an iteration, on every data parallel rank."""
        return self.global_batch_size // (self.micro_batch_size * self.layout.dp)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that a rank brings to an exchange."""
        return self.seq_length * self.micro_batch_size // (self.tp * self.cp)


def settings_of(
    arguments: Arguments, layout: ParallelLayout, batch: Mapping[str, int] | None = None
) -> TrainingSettings:
    """Training settings from Megatron's arguments.

    Args:
        arguments: of a run.
        layout: how its ranks are grouped.
        batch: sizes of the batch in place of those of the arguments, by their fields.

    Raises:
        ValueError: an argument is no number.
    """

    changes = {} if batch is None else batch

    def size(name: str, default: int) -> int:
        if name.replace("-", "_") in changes:
            return changes[name.replace("-", "_")]
        return arguments[name].read(SIZE) if name in arguments else default

    micro_batch_size = size("micro-batch-size", 1)
    granularity = arguments.get("recompute-granularity")
    recompute: Recompute = "none"
    if granularity is not None:
        recompute = "full" if granularity.value == "full" else "selective"
    virtual = size("num-virtual-stages-per-pipeline-rank", 1)
    if "num-layers-per-virtual-pipeline-stage" in arguments:
        slots = size("num-layers", 1) // layout.pp
        virtual = max(slots // size("num-layers-per-virtual-pipeline-stage", 1), 1)
    # Only logs have it: Megatron derives it from --bf16 and --fp16.
    dtype = arguments.get("params-dtype")
    is_fp32 = dtype is not None and dtype.value == "torch.float32"
    return TrainingSettings(
        world_size=layout.world_size,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        ep=layout.ep,
        etp=layout.etp,
        seq_length=size("seq-length", 4096),
        micro_batch_size=micro_batch_size,
        global_batch_size=size("global-batch-size", micro_batch_size * layout.dp),
        virtual_stages=virtual,
        last_stage_layers=arguments[LAST_STAGE].read(whole(0)) if LAST_STAGE in arguments else None,
        recompute=recompute,
        overlap="overlap-moe-expert-parallel-comm" in arguments,
        graphs="enable-cuda-graph" in arguments or "cuda-graph-impl" in arguments,
        permute_fusion="moe-permute-fusion" in arguments,
        value_bytes=4 if is_fp32 else VALUE_BYTES,
    )


NOT_NEGATIVE = whole(0)


# Of --experimental-attention-variant.
GATED_DELTA_NET = ("gated_delta_net", "gdn")


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """Gated delta net, the attention of some layers.

    Attributes:
        share: of the layers.
        key_size: of all heads of queries, and of keys.
        num_value_heads: heads of values.
        value_dim: values of such a head.
        conv_size: tokens that its convolution sees.
    """

    share: float
    key_size: PositiveInt
    num_value_heads: PositiveInt
    value_dim: PositiveInt
    conv_size: PositiveInt

    @property
    def value_size(self) -> int:
        """Values of all heads."""
        return self.num_value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Queries, keys and values, which the convolution mixes."""
        return 2 * self.key_size + self.value_size

    def matrices(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """(rows in, rows out): queries, keys, values, gate and two numbers of each head; output."""
        inner = self.mixed_size + self.value_size + 2 * self.num_value_heads
        return ((hidden_size, inner), (self.value_size, hidden_size))

    @property
    def state_products(self) -> int:
        """Multiplications of a token with the state, as Megatron counts them: four of its size."""
        return 4 * self.value_size * self.value_dim


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
        linear: linear attention of some layers; None where all have the attention above.
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
    linear: LinearAttention | None = None

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
    def attention_parameters(self) -> float:
        """Weights of a layer's attention."""
        full = sum(rows_in * rows_out for rows_in, rows_out in self.attention_matrices)
        if self.linear is None:
            return full
        weights = sum(a * b for a, b in self.linear.matrices(self.hidden_size))
        weights += self.linear.conv_size * self.linear.mixed_size
        return full + self.linear_share * (weights - full)

    @property
    def linear_share(self) -> float:
        """Share of the layers that have linear attention."""
        return 0.0 if self.linear is None else self.linear.share

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
        core = (1 - self.linear_share) * self.core_attention_values * self.seen_keys(seq_length)
        if self.linear is not None:
            core += self.linear_share * self.linear.state_products
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
        linear=_linear_attention(arguments, size),
    )


def _linear_attention(
    arguments: Arguments, size: Callable[[str, int], int]
) -> LinearAttention | None:
    """The gated delta net of Megatron's arguments; None for none, or another variant."""
    variant = arguments.get("experimental-attention-variant")
    layers = linear_layers(arguments)
    if variant is None or variant.value not in GATED_DELTA_NET or not layers or not any(layers):
        return None
    # With Megatron's own defaults.
    return LinearAttention(
        share=sum(layers) / len(layers),
        key_size=size("linear-num-key-heads", 16) * size("linear-key-head-dim", 128),
        num_value_heads=size("linear-num-value-heads", 32),
        value_dim=size("linear-value-head-dim", 128),
        conv_size=size("linear-conv-kernel-dim", 4),
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


# Of the loss, in fp32.
LOSS_BYTES = 4


def attention(
    model: Architecture, settings: TrainingSettings, assumed: Assumptions
) -> tuple[Work, ...]:
    """One layer's attention with its norm and residual, in the mean over its types."""
    tp, tokens = settings.tp, settings.tokens_per_rank * settings.tp
    core = model.core_attention_values / tp
    full = (
        # Factors of a low rank are not split by tensor parallelism, but their tokens are.
        *(matrix(tokens, rows_in, rows_out / tp) for rows_in, rows_out in model.attention_matrices),
        Work(
            kind="attention",
            flops=2 * tokens * core * model.seen_keys(settings.seq_length),
            num_bytes=VALUE_BYTES * tokens * 2 * core,
        ),
    )
    rows = passes(tokens / tp, model.hidden_size, assumed["attention_row_passes"])
    linear = model.linear
    if linear is None:
        return (*full, rows)
    delta_net = (
        *(matrix(tokens, a, b / tp) for a, b in linear.matrices(model.hidden_size)),
        # The convolution reads and writes what it mixes.
        passes(tokens, linear.mixed_size / tp, 2),
        Work(
            kind="attention",
            flops=2 * tokens * linear.state_products / tp,
            num_bytes=VALUE_BYTES * tokens * (linear.mixed_size + linear.value_size) / tp,
        ),
    )
    shares = ((full, 1 - linear.share), (delta_net, linear.share))
    return (
        *(
            replace(work, flops=share * work.flops, num_bytes=share * work.num_bytes)
            for works, share in shares
            for work in works
        ),
        rows,
    )


def feed_forward(
    model: Architecture, settings: TrainingSettings, ffn_size: int, assumed: Assumptions
) -> tuple[Work, ...]:
    """A gated feed-forward layer on all tokens: dense, or the shared experts."""
    tp, tokens = settings.tp, settings.tokens_per_rank * settings.tp
    size = ffn_size / tp
    return (
        matrix(tokens, model.hidden_size, 2 * size),
        matrix(tokens, size, model.hidden_size),
        passes(tokens, size, assumed["activation_passes"]),
        passes(tokens / tp, model.hidden_size, assumed["feed_forward_row_passes"]),
    )


def experts(
    model: Architecture, settings: TrainingSettings, assumed: Assumptions
) -> tuple[Work, ...]:
    """The routed experts of a rank, with balanced routing."""
    etp, local = settings.etp, model.num_experts // settings.ep
    # Every rank of an expert's ETP group computes all of its tokens, on its part of the weights.
    tokens = settings.tokens_per_rank * model.router_topk * etp
    size = model.expert_ffn_size / etp
    return experts_work(tokens, model.hidden_size, size, local, assumed)


def router(
    model: Architecture, settings: TrainingSettings, assumed: Assumptions
) -> tuple[Work, ...]:
    """The router in fp32, with the norm and residual of its layer."""
    tokens = settings.tokens_per_rank
    return (
        matrix(tokens, model.hidden_size, model.num_experts),
        passes(tokens, model.num_experts, assumed["router_passes"]),
        passes(tokens, model.hidden_size, assumed["feed_forward_row_passes"]),
    )


def embedding_and_loss(
    model: Architecture, settings: TrainingSettings, assumed: Assumptions
) -> tuple[Work, ...]:
    """Embedding, output layer and cross entropy, each once for every predicted token."""
    tokens = settings.tokens_per_rank * settings.tp
    share = model.vocab_size / settings.tp
    times = 1 + model.mtp_layers
    logits = Work(
        kind="memory", num_bytes=LOSS_BYTES * tokens * share * assumed["loss_passes"] * times
    )
    return (matrix(times * tokens, model.hidden_size, share), logits)
