"""Megatron's side of a benchmark: its groups, dispatchers and experts, or timed experts."""

import time
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable

from monta_megatron.exchange.pipeline import Experts
from monta_megatron.tools.bench.settings import Settings


class TimedExperts:
    """Experts that return their rows after a time, without a processor: an emulated device.

    The gradient of the probabilities is 1.

    Args:
        full_ms: time of one direction for as many rows as a rank gets on average; 0 to time the
            exchange alone.
        full_rows: as many rows.
    """

    def __init__(self, full_ms: float, full_rows: float) -> None:
        self._row_s = full_ms / 1e3 / full_rows
        self._free_at_s = 0.0

    def __call__(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        """Start to compute: [N, H] -> [N, H]."""
        outputs: torch.Tensor = _StartedExperts.apply(self._start(rows), rows, probs)
        return outputs

    def wait(self, outputs: torch.Tensor) -> torch.Tensor:
        """Wait for the outputs of a call."""
        started: Any = outputs.grad_fn
        _sleep_until(started.end_s)
        # A node of its own: its backward starts the work that the call's backward waits for.
        waited = outputs.view_as(outputs)
        waited.register_hook(lambda gradient: setattr(started, "end_s", self._start(gradient)))
        return waited

    def _start(self, rows: torch.Tensor) -> float:
        """Put the work for rows on the timer; returns when it ends."""
        self._free_at_s = max(time.perf_counter(), self._free_at_s) + len(rows) * self._row_s
        return self._free_at_s


def _sleep_until(end_s: float) -> None:
    left_s = end_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


class _StartedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, end_s: float, rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        ctx.end_s, ctx.num_probs = end_s, len(probs)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        _sleep_until(ctx.end_s)
        return None, gradient, torch.ones(ctx.num_probs, device=gradient.device)


NO_EXPERTS = TimedExperts(full_ms=0, full_rows=1)
STOCK_DISPATCHERS = {
    "alltoall": stock.MoEAlltoAllTokenDispatcher,
    "allgather": stock.MoEAllGatherTokenDispatcher,
}


def layer_config(settings: Settings) -> Any:
    """A TransformerConfig for one such layer, with the alltoall dispatcher."""
    dtype = getattr(torch, settings.dtype)
    return TransformerConfig(
        num_layers=1,
        hidden_size=settings.hidden,
        num_attention_heads=settings.tp,
        num_moe_experts=settings.experts,
        moe_router_topk=settings.top_k,
        moe_ffn_hidden_size=settings.ffn_hidden,
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp32",
        moe_router_pre_softmax=settings.top_k == 1,
        moe_grouped_gemm=find_spec("transformer_engine") is not None,
        tensor_model_parallel_size=settings.tp,
        expert_model_parallel_size=settings.ep,
        expert_tensor_parallel_size=settings.etp,
        sequence_parallel=settings.tp > 1,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
    )


def initialize_groups(settings: Settings) -> None:
    """Make Megatron's process groups, unless those that exist have these sizes."""
    if parallel_state.model_parallel_is_initialized() and (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    ) == (settings.tp, settings.ep, settings.etp):
        return
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.tp,
        expert_model_parallel_size=settings.ep,
        expert_tensor_parallel_size=settings.etp,
    )


def build_dispatcher(
    dispatcher_class: Any, settings: Settings, groups: Any = None, **options: Any
) -> Any:
    """A token dispatcher of the layer.

    Args:
        dispatcher_class: one of `STOCK_DISPATCHERS`, or ours.
        settings: of the benchmark.
        groups: its process groups; Megatron's where None.
        options: of ours, named without "moe_monta_"; None means not given.

    Raises:
        ValueError: an option is wrong, or the chain cannot run on this layout.
    """
    config, groups = layer_config(settings), groups or get_default_pg_collection()
    for name, value in options.items():
        setattr(config, f"moe_monta_{name}", value)
    num_local_experts = settings.experts // settings.ep
    first = dist.get_rank(groups.ep) * num_local_experts
    experts = list(range(first, first + num_local_experts))
    return dispatcher_class(num_local_experts, experts, config=config, pg_collection=groups)


def build_experts(settings: Settings) -> Experts:
    """Megatron's experts on this rank; grouped GEMM if Transformer Engine is installed."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    model_parallel_cuda_manual_seed(1)
    config = layer_config(settings)
    grouped = config.moe_grouped_gemm
    spec = get_moe_module_spec(grouped, settings.experts, grouped)
    # megatron-core >= 0.18 builds the MoE layer from a partial, earlier releases from a spec.
    make = partial(build_module, spec) if isinstance(spec, ModuleSpec) else spec
    layer = make(config=config, pg_collection=get_default_pg_collection()).to("cuda")
    # They return their outputs and a bias, which is None here.
    return lambda rows, tokens_per_expert, probs: layer.experts(rows, tokens_per_expert, probs)[0]
