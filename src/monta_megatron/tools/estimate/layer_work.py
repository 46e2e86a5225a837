"""What the layers of a model compute on one rank for one micro-batch: FLOPs and bytes, by part.

Attention takes 2 FLOPs per query value and key and 2 per key and value; its backward pass
recomputes the scores, 5 products in place of 2. Matrices and all else: `planner.kernel_work`.

Notation: t = tokens of the micro-batch on the rank; with tensor parallelism all t x TP tokens meet
1/TP of a matrix.
"""

from monta_megatron.planner.assumptions import Assumptions
from monta_megatron.planner.experts import VALUE_BYTES, Work, experts_work, matrix, passes
from monta_megatron.tools.estimate.architecture import Architecture
from monta_megatron.tools.estimate.settings import TrainingSettings

# Of the loss, in fp32.
LOSS_BYTES = 4


def attention(
    model: Architecture, settings: TrainingSettings, assumed: Assumptions
) -> tuple[Work, ...]:
    """One layer's attention with its norm and residual, in the mean over its types."""
    tp, tokens = settings.tp, settings.tokens_per_rank * settings.tp
    core = model.core_attention_values / tp
    return (
        # Factors of a low rank are not split by tensor parallelism, but their tokens are.
        *(matrix(tokens, rows_in, rows_out / tp) for rows_in, rows_out in model.attention_matrices),
        Work(
            kind="attention",
            flops=2 * tokens * core * model.seen_keys(settings.seq_length),
            num_bytes=VALUE_BYTES * tokens * 2 * core,
        ),
        passes(tokens / tp, model.hidden_size, assumed["attention_row_passes"]),
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
