"""What the layers of a model compute on one rank for one micro-batch: FLOPs and bytes, by part.

A matrix of [rows_in, rows_out] on t tokens takes 2 t rows_in rows_out FLOPs, and reads and writes
t rows_in + rows_in rows_out + t rows_out values. Its backward pass is two such products. Attention
takes 2 FLOPs per query value and key and 2 per key and value; its backward pass recomputes the
scores, 5 products in place of 2. What is not a product reads and writes memory.

Notation: t = tokens of the micro-batch on the rank; with tensor parallelism all t x TP tokens meet
1/TP of a matrix.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from monta_megatron.tools.estimate.architecture import Architecture
from monta_megatron.tools.estimate.assumptions import Assumptions
from monta_megatron.tools.estimate.settings import TrainingSettings

Kind = Literal["gemm", "attention", "memory"]
VALUE_BYTES = 2
# Of the loss, in fp32.
LOSS_BYTES = 4
# Times of the forward pass that the backward pass takes.
BACKWARD: dict[Kind, float] = {"gemm": 2.0, "attention": 2.5, "memory": 2.0}


@dataclass(frozen=True, kw_only=True)
class Work:
    """Some kernels of one kind in a forward pass.

    Attributes:
        kind: what they are.
        flops: that they make.
        num_bytes: that they read and write.
    """

    kind: Kind
    flops: float = 0.0
    num_bytes: float = 0.0

    def forward_us(self, assumed: Assumptions, memory_gbytes_per_s: float) -> float:
        """The longer of the time for the FLOPs and the time for the bytes.

        Args:
            assumed: peak and efficiencies.
            memory_gbytes_per_s: of the GPU, by its datasheet.
        """
        bytes_per_us = memory_gbytes_per_s * 1e3 * assumed["memory_efficiency"]
        memory_us = self.num_bytes / bytes_per_us
        if self.kind == "memory":
            return memory_us
        flops_per_us = assumed.peak_flops_per_us * assumed[f"{self.kind}_efficiency"]
        return max(self.flops / flops_per_us, memory_us)


def matrix(tokens: float, rows_in: float, rows_out: float, copies: float = 1) -> Work:
    """A product of [tokens, rows_in] and [rows_in, rows_out].

    Args:
        tokens: of all copies together.
        rows_in: of one weight.
        rows_out: likewise.
        copies: weights that share the tokens.
    """
    values = tokens * (rows_in + rows_out) + copies * rows_in * rows_out
    return Work(kind="gemm", flops=2 * tokens * rows_in * rows_out, num_bytes=VALUE_BYTES * values)


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
        _passes(tokens / tp, model.hidden_size, assumed["attention_row_passes"]),
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
        _passes(tokens, size, assumed["activation_passes"]),
        _passes(tokens / tp, model.hidden_size, assumed["feed_forward_row_passes"]),
    )


def experts(
    model: Architecture, settings: TrainingSettings, assumed: Assumptions
) -> tuple[Work, ...]:
    """The routed experts of a rank, with balanced routing."""
    etp, local = settings.etp, model.num_experts // settings.ep
    # Every rank of an expert's ETP group computes all of its tokens, on its part of the weights.
    tokens = settings.tokens_per_rank * model.router_topk * etp
    size = model.expert_ffn_size / etp
    return (
        matrix(tokens, model.hidden_size, 2 * size, local),
        matrix(tokens, size, model.hidden_size, local),
        _passes(tokens, size, assumed["activation_passes"]),
    )


def router(
    model: Architecture, settings: TrainingSettings, assumed: Assumptions
) -> tuple[Work, ...]:
    """The router in fp32, with the norm and residual of its layer."""
    tokens = settings.tokens_per_rank
    return (
        matrix(tokens, model.hidden_size, model.num_experts),
        _passes(tokens, model.num_experts, assumed["router_passes"]),
        _passes(tokens, model.hidden_size, assumed["feed_forward_row_passes"]),
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


def times_us(
    works: Iterable[Work], assumed: Assumptions, memory_gbytes_per_s: float
) -> tuple[float, float]:
    """(forward, backward) of some works, one after the other."""
    forward = backward = 0.0
    for work in works:
        time_us = work.forward_us(assumed, memory_gbytes_per_s)
        forward += time_us
        backward += BACKWARD[work.kind] * time_us
    return forward, backward


def _passes(tokens: float, size: float, passes: float) -> Work:
    """Kernels that read or write [tokens, size] values so many times."""
    return Work(kind="memory", num_bytes=VALUE_BYTES * tokens * size * passes)
