"""Experts that take a given time and no processor: compute on a device of its own, emulated.

CPU ranks share their cores with the exchange, which experts on a GPU do not. These keep a serial
timer busy, forward and backward, while the host goes on.
"""

import time
from collections import deque
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class TimedExperts:
    """Returns the rows once the timer has come to the end of their work.

    Args:
        full_ms: time of one direction for as many rows as a rank gets on average.
        full_rows: as many rows.
    """

    def __init__(self, full_ms: float, full_rows: float) -> None:
        self._row_s = full_ms / 1e3 / full_rows
        self._free_at_s = 0.0
        # Started and not waited for.
        self._calls: deque[dict[str, float]] = deque()

    def __call__(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        """Start to compute: [N, H] -> [N, H]."""
        call: dict[str, float] = {}
        self._calls.append(call)
        outputs: torch.Tensor = _Start.apply(self, call, rows, probs)
        return outputs

    def wait(self, outputs: torch.Tensor) -> torch.Tensor:
        """Wait for the outputs of the first call that was not waited for."""
        waited: torch.Tensor = _Wait.apply(self, self._calls.popleft(), outputs)
        return waited

    def start(self, num_rows: int) -> float:
        """Put work on the timer; returns when it ends."""
        self._free_at_s = max(time.perf_counter(), self._free_at_s) + num_rows * self._row_s
        return self._free_at_s


def _sleep_until(end_s: float) -> None:
    time.sleep(max(end_s - time.perf_counter(), 0))


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        experts: TimedExperts,
        call: dict[str, float],
        rows: torch.Tensor,
        probs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call, ctx.num_probs = call, len(probs)
        call["forward"] = experts.start(len(rows))
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor, torch.Tensor]:
        _sleep_until(ctx.call["backward"])
        # Experts give their probabilities a gradient, which travels back.
        return None, None, gradient, torch.ones(ctx.num_probs, device=gradient.device)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, experts: TimedExperts, call: dict[str, float], outputs: torch.Tensor
    ) -> torch.Tensor:
        ctx.experts, ctx.call = experts, call
        _sleep_until(call["forward"])
        return outputs.view_as(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        ctx.call["backward"] = ctx.experts.start(len(gradient))
        return None, None, gradient
