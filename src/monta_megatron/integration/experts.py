"""Experts inside the pipeline (moe_monta_overlap_experts) in a training.

The experts are called once for every chunk. Settings that work with several calls of a module in
flight, as pipeline schedules make them, work; those that expect one call in a micro-batch are
refused by name.

Gradient accumulation fusion: a product that adds a weight's gradient to `main_grad` itself returns
a placeholder, memory of the same size, for which the weight's hooks run; it returns none where the
weight lacks the mark that Megatron's DDP has set. Autograd would hold the placeholders of all
chunks and sum them, so the chunks whose backward does not come last run it without the mark. In the
first micro-batch, Transformer Engine's products do not add but overwrite. It is told so in a
module's first call, which here is that of the first chunk, whose backward comes last.
"""

import functools
from typing import Any

import torch

from monta_megatron.common.rules import Unsupported
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.integration.options import etp_size_of

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


_FREES_WEIGHTS = (
    "it frees an expert's weights after each call, of which there is one for every chunk"
)

# Modules inside the experts whose activations Megatron can offload.
_EXPERT_MODULES = {"expert_fc1", "moe_act", "fused_group_mlp"}

# With any of these Megatron says which micro-batch is the first of an iteration.
_QUANTIZES = ("fp8", "fp4", "use_kitchen", "quant_recipe")


def _gathers_experts(config: Any) -> bool:
    # The second is what a user gives; Megatron derives the first from it after our checks.
    shards = getattr(config, "expert_tensor_parallel_num_weight_shards", None)
    return (getattr(config, "expert_gtp_weight_remat_size", None) or 1) > 1 or (
        shards is not None and shards > etp_size_of(config)
    )


# Besides `supported_settings.UNSUPPORTED`.
UNSUPPORTED_WITH_OVERLAP = (
    Unsupported(
        "overlap_moe_expert_parallel_comm",
        "Megatron's schedule hides the exchange behind another micro-batch, and needs dispatch, "
        "experts and combine apart",
    ),
    Unsupported(
        "delay_wgrad_compute",
        "the weight gradients of one call of the experts are delayed, not those of every chunk",
    ),
    Unsupported(
        "fp8_recipe",
        "delayed scaling would take every chunk for a micro-batch; take another recipe",
        lambda config: bool(getattr(config, "fp8", None)) and config.fp8_recipe == "delayed",
    ),
    Unsupported(
        "gradient_accumulation_fusion with fp8 or fp4",
        "where weights are quantized once for all micro-batches, the weight gradients of a first "
        "chunk overwrite those of the others; give --no-gradient-accumulation-fusion",
        lambda config: (
            getattr(config, "gradient_accumulation_fusion", False)
            and any(getattr(config, name, None) for name in _QUANTIZES)
            and not getattr(config, "disable_parameter_transpose_cache", False)
        ),
    ),
    Unsupported(
        "moe_router_padding_for_quantization",
        "it aligns the rows of a micro-batch, not those of a chunk; leave it out, and the experts "
        "pad what they get",
        lambda config: any(
            getattr(config, f"moe_router_padding_for_{what}", False)
            for what in ("quantization", "fp8")
        ),
    ),
    Unsupported("use_megatron_fsdp", _FREES_WEIGHTS),
    Unsupported(
        "expert_gtp_weight_remat_size",
        "ranks gather an expert's weights in each call together, but may have other numbers of "
        "chunks, and would wait for each other for ever",
        _gathers_experts,
    ),
    Unsupported(
        "moe_use_grouped_tensor",
        "every chunk would be padded to 256 rows for each expert, which neither the planner's "
        "prices nor its memory count",
    ),
    Unsupported("use_torch_fsdp2", _FREES_WEIGHTS),
    Unsupported(
        "offload_modules",
        "offloading of the experts' activations expects one call of them in a micro-batch; leave "
        f"out {', '.join(sorted(_EXPERT_MODULES))}",
        lambda config: (
            getattr(config, "fine_grained_activation_offloading", False)
            and not _EXPERT_MODULES.isdisjoint(config.offload_modules or ())
        ),
    ),
    Unsupported(
        "cpu_offloading", "offloading of a whole layer's activations has not been tested with it"
    ),
    Unsupported("moe_paged_stash", "the stash expects one call of the experts in a micro-batch"),
    Unsupported("moe_ncclep_zero_copy", "the experts would write all chunks into one buffer"),
    Unsupported(
        "log_moe_overload_factor",
        "Megatron counts the rows of a micro-batch where its experts are called once; the line "
        "'auto, exchange of ranks ...' says how far the busiest rank is above the mean",
    ),
)


def check_experts(experts: torch.nn.Module) -> None:
    """Check that experts may be called for every chunk.

    Raises:
        ValueError: names the module and the reason.
    """
    for name, module in experts.named_modules():
        if isinstance(module, torch.nn.Dropout | torch.nn.AlphaDropout) and module.p > 0:
            raise ValueError(
                f"experts.{name}: dropout of {module.p:g}, must be 0 with "
                "moe_monta_overlap_experts: random numbers would differ from those of one call"
            )


def prepare_layer(layer: Any) -> None:
    """Let an MoE layer run the pipeline where there is one.

    Raises:
        ValueError: its experts cannot be called for every chunk.
    """
    check_experts(layer.experts)
    if layer.config.gradient_accumulation_fusion:
        add_in_every_call(layer.experts)
    _patch_layer(layer.__class__)


@functools.cache
def _patch_layer(layer_class: Any) -> None:
    """Let `routed_experts_compute` run the pipeline where there is one."""
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

        # Where a configuration made in code does not say so; it takes all parameters, or none.
        if hasattr(next(self.experts.parameters(), None), "__fsdp_param__"):
            raise ValueError(
                "use_megatron_fsdp: not supported with moe_monta_overlap_experts: " + _FREES_WEIGHTS
            )
        experts: Experts = compute
        if self.config.gradient_accumulation_fusion:
            experts = with_one_placeholder(compute, self.experts)
        return dispatcher.compute(experts, hidden_states, probs), None

    layer_class.routed_experts_compute = routed_experts_compute
