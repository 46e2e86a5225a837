"""Megatron's side of a benchmark: its groups, dispatchers and experts, or experts that wait.

Timed experts take a given time and no processor: compute on a device of its own, emulated.
"""

import time
from collections import deque
from collections.abc import Sequence
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

from monta_megatron.core import Layout
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.tools.bench.settings import Settings


class TimedExperts:
    """Returns the rows once the timer has come to the end of their work.

    Args:
        full_ms: time of one direction for as many rows as a rank gets on average.
        full_rows: as many rows.
    """

    def __init__(self, full_ms: float, full_rows: float) -> None:
        self._row_s = full_ms / 1e3 / full_rows
        self._free_at_s = 0.0
        # Started and not waited for: the end of each pass in s.
        self._calls: deque[dict[str, float]] = deque()

    def __call__(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        """Start to compute: [N, H] -> [N, H]."""
        call = {"forward": self.start(rows)}
        self._calls.append(call)
        outputs: torch.Tensor = _StartedExperts.apply(call, rows, probs)
        return outputs

    def wait(self, outputs: torch.Tensor) -> torch.Tensor:
        """Wait for the outputs of the first call that was not waited for."""
        call = self._calls.popleft()
        _sleep_until(call["forward"])
        # A node of its own: its backward starts the work that the call's backward waits for.
        waited = outputs.view_as(outputs)
        waited.register_hook(lambda gradient: call.update(backward=self.start(gradient)))
        return waited

    def start(self, rows: torch.Tensor) -> float:
        """Put the work for rows on the timer; returns when it ends."""
        self._free_at_s = max(time.perf_counter(), self._free_at_s) + len(rows) * self._row_s
        return self._free_at_s


def _sleep_until(end_s: float) -> None:
    time.sleep(max(end_s - time.perf_counter(), 0))


class _StartedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: dict[str, float], rows: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.num_probs = call, len(probs)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        _sleep_until(ctx.call["backward"])
        # Experts give their probabilities a gradient, which travels back.
        return None, gradient, torch.ones(ctx.num_probs, device=gradient.device)


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
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
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
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
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


def exchange_layout(settings: Settings, nodes: Sequence[int]) -> Layout:
    """The exchange, as this rank sees it.

    Args:
        settings: of the benchmark.
        nodes: node of every rank of the launch; the layout keeps these numbers.
    """
    group = get_default_pg_collection().tp_ep
    return Layout(
        ep=settings.ep,
        etp=settings.etp,
        num_local_experts=settings.experts // settings.ep,
        rank=dist.get_group_rank(group, dist.get_rank()),
        nodes=tuple(nodes[rank] for rank in dist.get_process_group_ranks(group)),
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
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    model_parallel_cuda_manual_seed(1)
    config = layer_config(settings)
    grouped = config.moe_grouped_gemm
    layer_spec = (
        specs.get_gpt_layer_with_transformer_engine_spec
        if grouped
        else specs.get_gpt_layer_local_spec
    )
    mlp = layer_spec(num_experts=settings.experts, moe_grouped_gemm=grouped).submodules.mlp
    # megatron-core >= 0.18 builds the MoE layer from a partial, earlier releases from a spec.
    make = partial(build_module, mlp) if isinstance(mlp, ModuleSpec) else mlp
    layer = make(config=config, pg_collection=get_default_pg_collection()).to("cuda")
    # They return their outputs and a bias, which is None here.
    return lambda rows, tokens_per_expert, probs: layer.experts(rows, tokens_per_expert, probs)[0]
