"""Experts inside the pipeline (moe_monta_overlap_experts) in a training.

The experts are called once per chunk. Settings that allow several calls of a module before its
backward, as pipeline schedules make them, work; `supported_settings` refuses the others by name.

Gradient accumulation fusion needs two changes:
- The backward of a matrix product adds the weight's gradient to `main_grad` itself, and returns a
  placeholder of the weight's size only to trigger the weight's hooks. Autograd would hold and sum
  the placeholders of all chunks. A weight without the attribute `grad_added_to_main_grad` gets no
  placeholder, so the attribute is removed until the last backward, which is the first chunk's.
- In the first micro-batch Transformer Engine overwrites `main_grad` instead of adding to it. Only
  one chunk may do so, so no call is told that it belongs to the first micro-batch.
"""

import functools
from typing import Any

import torch

from monta_megatron.common.errors import UserError
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.integration.supported_settings import FREES_WEIGHTS

_MARK = "grad_added_to_main_grad"


def add_in_every_call(experts: torch.nn.Module) -> None:
    """Make the matrix products add to `main_grad` in the first micro-batch too.

    The attribute also makes every call quantize the weights again, so `supported_settings` refuses
    quantized weights here.
    """
    module: Any
    for module in experts.modules():
        if hasattr(module, "is_first_microbatch"):
            module.disable_parameter_transpose_cache = True


def with_one_placeholder(experts: Experts, module: torch.nn.Module) -> Experts:
    """Wrap the experts for one micro-batch so that only their last backward makes placeholders.

    Args:
        experts: called for each chunk in turn.
        module: holds the weights with the attribute `grad_added_to_main_grad`.
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


def check_experts(experts: torch.nn.Module) -> None:
    """Refuse experts that cannot be called once per chunk.

    Raises:
        UserError: an expert has dropout; the message names the module.
    """
    for name, module in experts.named_modules():
        if isinstance(module, torch.nn.Dropout | torch.nn.AlphaDropout) and module.p > 0:
            raise UserError(
                f"experts.{name}: dropout of {module.p:g}, must be 0 with "
                "moe_monta_overlap_experts: random numbers would differ from those of one call"
            )


def prepare_layer(layer: Any) -> None:
    """Prepare an MoE layer under construction for experts inside the pipeline.

    Raises:
        UserError: its experts cannot be called once per chunk.
    """
    check_experts(layer.experts)
    if layer.config.gradient_accumulation_fusion:
        add_in_every_call(layer.experts)
    _patch_layer(layer.__class__)


@functools.cache
def _patch_layer(layer_class: Any) -> None:
    """Make `routed_experts_compute` run the pipeline in micro-batches that split the experts."""
    original = layer_class.routed_experts_compute

    @functools.wraps(original)
    def routed_experts_compute(
        self: Any, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dispatcher = self.token_dispatcher
        if not getattr(dispatcher, "computes", False):
            return original(self, hidden_states, probs)

        def compute(
            rows: torch.Tensor, tokens_per_expert: torch.Tensor, row_probs: torch.Tensor
        ) -> torch.Tensor:
            outputs, bias = self.experts(rows, tokens_per_expert, row_probs)
            assert bias is None, "Megatron's experts add it themselves"
            return outputs

        # A configuration made in code may not name FSDP, which wraps all parameters or none.
        if hasattr(next(self.experts.parameters(), None), "__fsdp_param__"):
            raise UserError(
                "use_megatron_fsdp: not supported with moe_monta_overlap_experts: " + FREES_WEIGHTS
            )
        experts: Experts = compute
        if self.config.gradient_accumulation_fusion:
            experts = with_one_placeholder(compute, self.experts)
        return dispatcher.compute(experts, hidden_states, probs), None

    layer_class.routed_experts_compute = routed_experts_compute
