"""Gradient accumulation fusion where the experts are called for every chunk.

A product that adds a weight's gradient to `main_grad` itself returns a placeholder, memory of the
same size, for which the weight's hooks run; it returns none where the weight lacks the mark that
Megatron's DDP has set. Autograd would hold the placeholders of all chunks and sum them, so the
chunks whose backward does not come last run it without the mark.

In the first micro-batch, Transformer Engine's products do not add but overwrite. It is told so in a
module's first call, which here is that of the first chunk, whose backward comes last.
"""

from typing import Any

import torch

from monta_megatron.exchange.pipeline import Experts

_MARK = "grad_added_to_main_grad"


def add_in_every_call(experts: torch.nn.Module) -> None:
    """Let no call be told that it belongs to the first micro-batch, so that its products add.

    Quantized weights would be made anew in every call; `UNSUPPORTED_WITH_OVERLAP` refuses them.
    """
    module: Any
    for module in experts.modules():
        if hasattr(module, "is_first_microbatch"):
            module.disable_parameter_transpose_cache = True


def with_one_placeholder(experts: Experts, module: torch.nn.Module) -> Experts:
    """Experts of one micro-batch, whose weights get a placeholder from their last chunk alone.

    Args:
        experts: called for every chunk in turn.
        module: whose weights have the mark.
    """
    marks: list[tuple[torch.nn.Parameter, bool]] = []
    is_first = True

    def unmark(_: torch.Tensor) -> None:
        if marks:
            return
        for parameter in module.parameters():
            if hasattr(parameter, _MARK):
                marks.append((parameter, getattr(parameter, _MARK)))
                delattr(parameter, _MARK)

    def mark(_: torch.Tensor) -> None:
        while marks:
            parameter, value = marks.pop()
            setattr(parameter, _MARK, value)

    def compute(
        rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        nonlocal is_first
        outputs = experts(rows, tokens_per_expert, probs)
        if outputs.requires_grad:
            # Backward goes from the last chunk to the first.
            outputs.register_hook(mark if is_first else unmark)
        is_first = False
        return outputs

    return compute
