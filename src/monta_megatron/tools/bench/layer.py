"""Megatron's side of a benchmark: its groups, dispatchers and experts, or experts that wait.

Timed experts take a given time and no processor: compute on a device of its own, emulated.
"""

import time
from collections import deque
from collections.abc import Sequence
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
from monta_megatron.integration.dispatcher import MontaTokenDispatcher
from monta_megatron.tools.bench.settings import LayerShape


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
        outputs: torch.Tensor = _StartExperts.apply(self, call, rows, probs)
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


class _StartExperts(torch.autograd.Function):
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


STOCK_DISPATCHERS = {
    "alltoall": stock.MoEAlltoAllTokenDispatcher,
    "allgather": stock.MoEAllGatherTokenDispatcher,
}


def layer_config(shape: LayerShape) -> Any:
    """A TransformerConfig for one such layer, with the alltoall dispatcher."""
    dtype = getattr(torch, shape.dtype)
    return TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden,
        num_attention_heads=shape.tp,
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.topk,
        moe_ffn_hidden_size=shape.ffn_hidden,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        moe_router_pre_softmax=shape.topk == 1,
        moe_grouped_gemm=find_spec("transformer_engine") is not None,
        tensor_model_parallel_size=shape.tp,
        expert_model_parallel_size=shape.ep,
        expert_tensor_parallel_size=shape.etp,
        sequence_parallel=shape.tp > 1,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
    )


def initialize_groups(shape: LayerShape) -> None:
    """Make Megatron's process groups, replacing those of any other layout."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=shape.tp,
        expert_model_parallel_size=shape.ep,
        expert_tensor_parallel_size=shape.etp,
    )


def exchange_layout(shape: LayerShape, nodes: Sequence[int]) -> Layout:
    """The exchange, as this rank sees it.

    Args:
        shape: the layer's shape.
        nodes: node of every rank of the launch; the layout keeps these numbers.
    """
    group = exchange_groups()["tp_ep"]
    return Layout(
        ep=shape.ep,
        etp=shape.etp,
        num_local_experts=shape.num_experts // shape.ep,
        rank=dist.get_group_rank(group, dist.get_rank()),
        nodes=tuple(nodes[rank] for rank in dist.get_process_group_ranks(group)),
    )


def exchange_groups() -> dict[str, dist.ProcessGroup]:
    """Megatron's process groups, by the names that chains use for them."""
    groups = get_default_pg_collection()
    return {"ep": groups.ep, "etp": groups.expt_tp, "tp_ep": groups.tp_ep}


def stock_dispatcher(shape: LayerShape, name: str) -> Any:
    """Megatron's own dispatcher of this name."""
    config = layer_config(shape)
    config.moe_token_dispatcher_type = name
    return dispatcher_on(STOCK_DISPATCHERS[name], shape, config, get_default_pg_collection())


def monta_dispatcher(shape: LayerShape, **options: Any) -> Any:
    """Our dispatcher; options are named without "moe_monta_", and None means not given.

    Raises:
        ValueError: an option is wrong, or the chain cannot run on this layout.
    """
    config = layer_config(shape)
    for name, value in options.items():
        setattr(config, f"moe_monta_{name}", value)
    return dispatcher_on(MontaTokenDispatcher, shape, config, get_default_pg_collection())


def build_experts(shape: LayerShape) -> Experts:
    """Megatron's experts on this rank; grouped GEMM if Transformer Engine is installed."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    model_parallel_cuda_manual_seed(1)
    config = layer_config(shape)
    if config.moe_grouped_gemm:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=shape.num_experts, moe_grouped_gemm=True
        )
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=shape.num_experts, moe_grouped_gemm=False
        )
    mlp, groups = spec.submodules.mlp, get_default_pg_collection()
    # megatron-core >= 0.18 builds the MoE layer from a partial, earlier releases from a spec.
    if isinstance(mlp, ModuleSpec):
        layer = build_module(mlp, config=config, pg_collection=groups)
    else:
        layer = mlp(config=config, pg_collection=groups)
    experts = layer.to("cuda").experts

    def compute(
        rows: torch.Tensor, tokens_per_expert: torch.Tensor, row_probs: torch.Tensor
    ) -> torch.Tensor:
        outputs, bias = experts(rows, tokens_per_expert, row_probs)
        assert bias is None, "built without bias"
        return outputs

    return compute


def dispatcher_on(dispatcher_class: Any, shape: LayerShape, config: Any, groups: Any) -> Any:
    """A dispatcher of this class for the layer, on these process groups."""
    num_local_experts = shape.num_experts // shape.ep
    first = dist.get_rank(groups.ep) * num_local_experts
    return dispatcher_class(
        num_local_experts,
        list(range(first, first + num_local_experts)),
        config=config,
        pg_collection=groups,
    )
