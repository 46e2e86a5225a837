"""The dispatchers to compare and how one of them runs, around Megatron's experts or none.

Notation: T = tokens of a rank, H = hidden size, E = experts, N = rows for the local experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe import token_dispatcher as stock
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.autograd.function import once_differentiable

from monta_megatron.chains import program
from monta_megatron.common.errors import UserError
from monta_megatron.common.nodes import consecutive_nodes
from monta_megatron.core import Choice, Layout
from monta_megatron.emulation.cluster import EmulatedCluster, default_costs
from monta_megatron.exchange.pipeline import Experts
from monta_megatron.integration.dispatcher import MontaTokenDispatcher
from monta_megatron.integration.options import AUTO
from monta_megatron.planner.cluster import Cluster
from monta_megatron.tools.bench.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs of one rank's dispatcher.

    Attributes:
        hidden: [T, 1, H] hidden values.
        routing_map: [T, E] bool, whether a token goes to an expert.
        probs: [T, E] fp32 routing probabilities, 0 where not routed.
        output_gradient: [T, 1, H] gradient of the output.
    """

    hidden: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor
    output_gradient: torch.Tensor


def make_batch(settings: Settings, rank: int, device: torch.device) -> Batch:
    """The batch of any rank of the launch."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + rank)
    hidden, output_gradient = (
        torch.randn(settings.tokens, 1, settings.hidden, generator=generator) for _ in range(2)
    )
    chosen = draw_experts(settings, generator)
    weights = chosen * torch.rand(chosen.shape, generator=generator)
    dtype = getattr(torch, settings.dtype)
    return Batch(
        hidden=hidden.to(device, dtype),
        routing_map=chosen.to(device),
        probs=(weights / weights.sum(dim=1, keepdim=True)).to(device),
        output_gradient=output_gradient.to(device, dtype),
    )


def draw_experts(settings: Settings, generator: torch.Generator) -> torch.Tensor:
    """[T, E] bool, the experts of a rank's tokens.

    uniform     all experts are equally likely
    skewed      the i-th most popular expert is drawn with weight 1/i, in the seed's order
    """
    weights = torch.ones(settings.experts)
    if settings.routing == "skewed":
        shared_generator = torch.Generator().manual_seed(settings.seed)
        weights /= 1 + torch.randperm(settings.experts, generator=shared_generator)
    drawn = torch.multinomial(
        weights.expand(settings.tokens, -1), settings.top_k, generator=generator
    )
    return torch.zeros(settings.tokens, settings.experts, dtype=torch.bool).scatter(1, drawn, True)


@dataclass(frozen=True, kw_only=True)
class BenchCandidate:
    """One dispatcher, with the data that it runs on.

    Attributes:
        kind: project that the dispatcher belongs to.
        requested: requested choice, for stock its dispatcher in 1 chunk; None for `auto`.
        dispatcher: object with Megatron's six phases.
        batch: inputs of the dispatcher.
        tokens_here: positions of this rank's tokens in the batch.
    """

    kind: Literal["megatron", "monta"]
    requested: Choice | None
    dispatcher: Any
    batch: Batch
    tokens_here: slice = slice(None)

    @property
    def choice(self) -> Choice:
        """The choice that ran last, or that was asked for."""
        choice: Choice = self.requested or self.dispatcher.choice
        return choice


@dataclass(frozen=True, kw_only=True)
class Bench:
    """An exchange, its data, and the dispatchers on them, as this rank sees them.

    Attributes:
        settings: settings of the benchmark.
        cluster: costs for predictions, or None.
        emulated: emulated cluster that the benchmark runs on, or None.
        nodes: node of every rank of the launch.
        layout: the exchange as this rank sees it; nodes have their numbers in the launch.
        batch: this rank's data.
        candidates: stock's dispatchers, alltoall first, then at least one of ours.
        skipped: chain -> reason why it was left out.
    """

    settings: Settings
    cluster: Cluster | None
    emulated: EmulatedCluster | None
    nodes: tuple[int, ...]
    layout: Layout
    batch: Batch
    candidates: Sequence[BenchCandidate] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks_per_node(self) -> int | None:
        """Consecutive ranks on each node of the launch; None where nodes are uneven."""
        number = self.nodes.count(self.nodes[0])
        is_even = consecutive_nodes(range(len(self.nodes)), number) == self.nodes
        return number if is_even else None


def with_candidates(bench: Bench) -> Bench:
    """Add stock's dispatchers, then ours.

    Raises:
        UserError: a chain that was asked for by name, or `auto` that is tuned, cannot run here.
    """
    settings = bench.settings
    candidates = [stock_candidate(bench, name) for name in settings.stock]
    skipped: dict[str, str] = {}
    for choice in settings.choices:
        try:
            candidates.append(monta_candidate(bench, choice))
        except UserError as error:
            if not settings.skip_incompatible or (choice is None and settings.tune_steps):
                raise
            skipped[AUTO if choice is None else choice.chain] = str(error)
    return replace(bench, candidates=candidates, skipped=skipped)


def stock_candidate(bench: Bench, name: str) -> BenchCandidate:
    """One of Megatron's dispatchers."""
    return BenchCandidate(
        kind="megatron",
        requested=Choice(chain=name, num_chunks=1),
        dispatcher=build_dispatcher(STOCK_DISPATCHERS[name], bench.settings),
        batch=bench.batch,
    )


def monta_candidate(bench: Bench, choice: Choice | None) -> BenchCandidate:
    """Our dispatcher, with the benchmark's nodes and costs.

    Args:
        bench: benchmark that the candidate belongs to.
        choice: choice to run; None for `auto`.

    Raises:
        UserError: the chain cannot run here.
    """
    # Without costs nothing is predicted, and auto chooses by a guess.
    emulated = bench.emulated and default_costs(bench.emulated)
    dispatcher = build_dispatcher(
        MontaTokenDispatcher,
        bench.settings,
        chain=choice and choice.chain,
        num_chunks=choice and choice.num_chunks,
        ranks_per_node=bench.ranks_per_node,
        cluster=bench.cluster or emulated,
        tune_steps=bench.settings.tune_steps if choice is None else 0,
        # The benchmark compares more, see `measure`.
        check=0,
    )
    return BenchCandidate(kind="monta", requested=choice, dispatcher=dispatcher, batch=bench.batch)


def run_candidate(
    candidate: BenchCandidate,
    experts: Experts,
    phase: program.Phase = "forward_backward",
    begin: Callable[[str], None] = lambda pass_name: None,
) -> dict[str, Any]:
    """Run the layer's exchange once: dispatch, experts, combine, and their backward passes.

    Args:
        candidate: candidate to run.
        experts: experts between dispatch and combine.
        phase: phase to run, with or without the backward passes.
        begin: called with the name of each pass as it begins.

    Returns:
        Results at the experts and at the tokens, by name.
    """
    dispatcher, batch = candidate.dispatcher, candidate.batch
    hidden = batch.hidden.detach().requires_grad_()
    probs = batch.probs.detach().requires_grad_()

    begin(program.DISPATCH.name)
    rows, row_probs = dispatcher.dispatch_preprocess(hidden, batch.routing_map, probs)
    rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
    rows, tokens_per_expert, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
    for tensor in (rows, row_probs):
        # Called as soon as its gradient is complete, before that of the dispatch begins.
        tensor.register_hook(lambda gradient: begin(program.DISPATCH_BACKWARD.name))
    outputs = experts(rows, tokens_per_expert, row_probs)
    begin(program.COMBINE.name)
    sums = dispatcher.combine_preprocess(outputs)
    output = dispatcher.combine_postprocess(dispatcher.token_combine(sums))

    if phase == "forward_backward":
        begin(program.COMBINE_BACKWARD.name)
        output.backward(batch.output_gradient)
    return {
        "rows at the experts": rows.detach(),
        "counts at the experts": torch.as_tensor(tokens_per_expert),
        "probabilities at the experts": row_probs.detach(),
        "outputs": output.detach(),
        "input gradients": hidden.grad,
        "gradients of the probabilities": probs.grad,
    }


def no_experts(
    rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """Experts that return their rows [N, H], to time the exchange alone."""
    outputs: torch.Tensor = _ReturnRows.apply(rows, probs)
    return outputs


class _ReturnRows(torch.autograd.Function):
    """The rows; the gradient of the probabilities is 1, so that it is sent as in a training."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        ctx.num_probs = len(probs)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.ones(ctx.num_probs, device=gradient.device)


STOCK_DISPATCHERS = {
    "alltoall": stock.MoEAlltoAllTokenDispatcher,
    "allgather": stock.MoEAllGatherTokenDispatcher,
}


def layer_config(settings: Settings) -> Any:
    """A TransformerConfig for one such layer, with the alltoall dispatcher."""
    dtype, has_te = getattr(torch, settings.dtype), find_spec("transformer_engine") is not None
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
        moe_grouped_gemm=has_te,
        moe_permute_fusion=has_te,
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
        settings: settings of the benchmark.
        groups: process groups of the dispatcher; None for Megatron's.
        options: options of monta, named without "moe_monta_"; None means not given.

    Raises:
        UserError: an option is wrong, or the chain cannot run on this layout.
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
