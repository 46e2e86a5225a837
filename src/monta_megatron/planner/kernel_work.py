"""What kernels compute, move and take, by a GPU's datasheet: matrix products, attention, copies.

A matrix of [rows_in, rows_out] on t tokens takes 2 t rows_in rows_out FLOPs, and reads and writes
t rows_in + rows_in rows_out + t rows_out values. Its backward pass is two such products. What is
not a product reads and writes memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from monta_megatron.planner.assumptions import Assumptions

Kind = Literal["gemm", "attention", "memory"]
VALUE_BYTES = 2
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


def experts_work(
    tokens: float, hidden_size: float, ffn_size: float, num_experts: float, assumed: Assumptions
) -> tuple[Work, ...]:
    """Gated feed-forward layers that share some tokens.

    Args:
        tokens: rows of all of them.
        hidden_size: H.
        ffn_size: of each, as far as it lies on the rank.
        num_experts: their number.
        assumed: what is assumed.
    """
    return (
        matrix(tokens, hidden_size, 2 * ffn_size, num_experts),
        matrix(tokens, ffn_size, hidden_size, num_experts),
        passes(tokens, ffn_size, assumed["activation_passes"]),
    )


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


def passes(tokens: float, size: float, passes: float) -> Work:
    """Kernels that read or write [tokens, size] values so many times."""
    return Work(kind="memory", num_bytes=VALUE_BYTES * tokens * size * passes)
