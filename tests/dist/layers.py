"""One MoE layer on the ranks of a pool, stock against ours.

Notation: T = tokens of this rank, W = width of a row, E = experts.
"""

import contextlib
import copy
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from unittest import mock

import exchanges
import torch
import torch.distributed as dist
from equal import assert_equal

from monta_megatron.chains import CHAINS
from monta_megatron.common import ranks
from monta_megatron.core import Choice

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Case(exchanges.Case):
    """A layer with its dispatcher, and the micro-batches that go through it.

    `chain` may be "auto". `num_chunks` and `ranks_per_node` are not said where they are None.
    `config` goes to both dispatchers, `options` (without their prefix) to ours; `pipelined` has the
    experts inside the pipeline, `checked` the check of the first use.
    Rank r has `tokens[r + step]` tokens, cyclically, as wide as `hidden`, or as `width` where they
    go through the dispatcher alone. `routing` is as in `exchanges.Case`, or "no_expert" (no token
    has any), "empty_rank" (none of a rank's has), "mixed" (ranks have fewer than top-k, any number,
    or none, in turn), or "router": Megatron's. `params_dtype` is the rows' dtype unless given.

    Of the dispatcher alone: an optimizer makes a step after each of `num_steps` micro-batches.
    Rows are [T / B, B, W] for B = `batch`, or [T, W] where they are `flat`; `strided` ones have
    gaps between them, and lists lie transposed. `fused` is Triton's interpreter. Where a case is
    not of training, every other step trains all the same. `recompute` is "reentrant" or "not
    reentrant" where backward runs our phases again.
    """

    chain: str = "alltoall_allgather"
    ranks_per_node: int | None = 2  # type: ignore[assignment]
    num_chunks: int | None = None  # type: ignore[assignment]
    tokens: tuple[int, ...] = (24,)
    hidden: int = 16
    width: int = 0
    params_dtype: str = ""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    order: str = "tp-cp-ep-dp-pp"
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    pipelined: bool = False
    checked: bool = True
    batch: int = 1
    num_steps: int = 1
    fused: bool = False
    flat: bool = False
    strided: bool = False
    is_training: bool = True
    recompute: str = ""

    @property
    def exact_sums(self) -> bool:
        """Whether our sums have stock's order, so that they are equal to the bit."""
        chain = CHAINS.get(self.chain)
        return self.etp <= 2 and chain is not None and chain.rows == "permuted tokens"

    @property
    def monta_options(self) -> dict[str, Any]:
        """The options of our dispatcher, as a TransformerConfig has them."""
        options = {
            "chain": self.chain,
            "num_chunks": self.num_chunks,
            "ranks_per_node": self.ranks_per_node,
            "overlap_experts": self.pipelined or None,
            "check": int(self.checked),
        }
        return {f"moe_monta_{name}": value for name, value in (options | self.options).items()}


# Megatron's process groups by layout. They are kept, not made anew: every Gloo group has threads
# of its own, which nothing ends before the process does.
_parallel_states: dict[tuple[Any, ...] | None, dict[str, Any]] = {}


def initialize(case: Case) -> None:
    """Put Megatron into a layout, and its random numbers at their start."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    def state() -> dict[str, Any]:
        return {
            name: copy.copy(value) if isinstance(value, dict | list) else value
            for name, value in vars(parallel_state).items()
            if name.isupper() and name.startswith("_")
        }

    layout = (case.tp, case.ep, case.etp, case.cp, case.pp, case.order)
    _parallel_states.setdefault(None, state())
    if layout not in _parallel_states:
        vars(parallel_state).update(_parallel_states[None])
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.etp,
            context_parallel_size=case.cp,
            pipeline_model_parallel_size=case.pp,
            order=case.order,
            distributed_timeout_minutes=float(os.environ["POOL_GROUP_LIMIT_S"]) / 60,
        )
        _parallel_states[layout] = state()
    vars(parallel_state).update(_parallel_states[layout])
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)


def transformer_config(case: Case, dispatcher: str = "monta") -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    params_dtype = getattr(torch, case.params_dtype or case.dtype)
    router_dtypes = {torch.float32: "fp32", torch.float64: "fp64"}
    return TransformerConfig(
        hidden_size=case.hidden,
        num_attention_heads=4,
        num_moe_experts=case.num_experts,
        moe_router_topk=case.topk,
        moe_ffn_hidden_size=16,
        moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        tensor_model_parallel_size=case.tp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        context_parallel_size=case.cp,
        pipeline_model_parallel_size=case.pp,
        pipeline_dtype=params_dtype,
        sequence_parallel=case.tp > 1,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        params_dtype=params_dtype,
        bf16=params_dtype == torch.bfloat16,
        moe_router_pre_softmax=case.topk == 1,
        **{
            "num_layers": 1,
            "moe_router_dtype": router_dtypes.get(getattr(torch, case.probs_dtype)),
            "gradient_accumulation_fusion": False,
            **case.config,
        },
        **(case.monta_options if dispatcher == "monta" else {}),
    )


def build_layer(case: Case, dispatcher: str = "monta") -> Any:
    """A Megatron MoE layer with the same weights for the same case, whatever the dispatcher."""
    initialize(case)
    config = transformer_config(case, dispatcher)
    return build_moe(layer_spec(case, config.moe_grouped_gemm), config)


def build_pair(case: Case) -> tuple[Any, Any]:
    """Stock's layer, and ours."""
    return build_layer(case, "alltoall"), build_layer(case)


def layer_spec(case: Case, is_grouped: bool = False) -> Any:
    """The spec of a transformer layer with the experts of a case."""
    from megatron.core.models.gpt import gpt_layer_specs

    if is_grouped:
        of_kind = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    else:
        of_kind = gpt_layer_specs.get_gpt_layer_local_spec
    return of_kind(num_experts=case.num_experts, moe_grouped_gemm=is_grouped)


def build_moe(spec: Any, config: Any) -> Any:
    """An MoE layer from the `mlp` of a layer spec: a ModuleSpec or a partial, by release."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    mlp, groups = spec.submodules.mlp, get_default_pg_collection()
    if isinstance(mlp, ModuleSpec):
        layer = build_module(mlp, config=config, pg_collection=groups)
    else:
        layer = mlp(config=config, pg_collection=groups)
    layer.set_layer_number(1)
    return layer.to("cuda")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch of this rank.

    Attributes:
        tokens: [T, W].
        routing_map: [T, E] bool.
        probs: [T, E], 0 outside of the map.
        gradient: [T, W], of the output.
    """

    tokens: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor
    gradient: torch.Tensor


def make_batch(case: Case, layer: Any, step: int = 0) -> Batch:
    """What this rank has in a step; `layer` has the router."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1009 * case.seed + 101 * step + rank)
    num_tokens = case.tokens[(rank + step) % len(case.tokens)]

    def normal(width: int, dtype: str) -> torch.Tensor:
        values = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
        # "cuda" is the CPU on CPU ranks.
        return values.to("cuda", getattr(torch, dtype))

    if case.routing == "router":
        hidden = normal(case.hidden, case.params_dtype or case.dtype)
        with torch.no_grad():
            _, routing_map = layer.router(hidden.unsqueeze(1))
    else:
        routing_map = routing_of_rank(case, num_tokens, generator)
    if case.strided:
        routing_map = routing_map.T.contiguous().T
    return Batch(
        tokens=normal(case.width or case.hidden, case.dtype),
        routing_map=routing_map,
        probs=normal(case.num_experts, case.probs_dtype) * routing_map,
        gradient=normal(case.width or case.hidden, case.dtype),
    )


def routing_of_rank(case: Case, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """[T, E] bool; see `Case`."""
    rank, routing = dist.get_rank(), case.routing
    if routing == "mixed":
        routing = ("capacity", "any_number", "no_expert")[rank % 3]
    if routing == "empty_rank":
        routing = "no_expert" if rank == case.seed % dist.get_world_size() else "uniform"
    routing_map = exchanges.make_routing(replace(case, routing=routing), num_tokens, generator)
    return (torch.zeros_like(routing_map) if routing == "no_expert" else routing_map).to("cuda")


def force(router: Any, routing_map: torch.Tensor) -> None:
    """Let the router compute its probabilities for a given choice, gradient included."""

    def forward(hidden: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden.float().flatten(0, 1), router.weight.float())
        return logits.sigmoid() * routing_map, routing_map.clone()

    router.forward = forward


@dataclass(frozen=True)
class Result:
    """Everything by which two dispatchers are compared.

    Attributes:
        sums: the output, and all gradients by name.
        calls: [L] tokens per expert, for each call of the experts in forward.
    """

    sums: dict[str, torch.Tensor]
    calls: list[torch.Tensor]


def forward_backward(case: Case, layer: Any, with_input_gradient: bool = True) -> Result:
    """One step of the layer on this rank's data."""
    batch = make_batch(case, layer)
    if case.routing != "router":
        force(layer.router, batch.routing_map)
    # [T, H] -> [T, 1, H]
    hidden = batch.tokens.unsqueeze(1).requires_grad_(with_input_gradient)
    calls: list[torch.Tensor] = []
    noting = layer.experts.register_forward_pre_hook(
        lambda _, args: calls.append(torch.as_tensor(args[1]).clone())
    )
    layer.zero_grad()
    output, _ = layer(hidden)
    noting.remove()
    torch.autograd.backward(output, batch.gradient.unsqueeze(1))
    assert (hidden.grad is not None) == with_input_gradient
    named = [("input", hidden), *layer.named_parameters()]
    gradients = {name: each.grad.clone() for name, each in named if each.grad is not None}
    return Result({"output": output.detach().clone(), **gradients}, calls)


def assert_same_results(ours: Result, stock: Result, exact: bool, what: str) -> None:
    """Equal to the bit, or where sums have another order within their rounding."""
    differ = ours.sums.keys() ^ stock.sums.keys()
    assert not differ, f"{what}: gradients of {differ}"
    for name, mine in ours.sums.items():
        theirs, bound = stock.sums[name], None
        assert mine.dtype == theirs.dtype, f"{what}: {name}: {mine.dtype}, expected {theirs.dtype}"
        if not exact and theirs.numel():
            # A few terms summed in another order, through up to three roundings of partial sums
            # that may be larger than the result.
            bound = 8 * torch.finfo(mine.dtype).eps * theirs.abs().max().item()
        assert_equal(mine, theirs, f"{what}: {name}", bound)


def compare(case: Case, chunks: Sequence[int | None] = (None,)) -> None:
    """Our dispatcher against stock on one case, for several chunk counts."""
    stock = forward_backward(case, build_layer(case, "alltoall"))
    for num_chunks in chunks:
        each = replace(case, num_chunks=num_chunks)
        layer = build_layer(each)
        assert type(layer.token_dispatcher).__name__ == "MontaTokenDispatcher"
        ours = forward_backward(each, layer)
        # In the pipeline the experts are called for every chunk.
        assert len(ours.calls) == (num_chunks if case.pipelined else 1), f"{each}: {ours.calls}"
        assert_same_results(ours, stock, case.exact_sums, str(each))


def compare_steps(case: Case, tokens: list[list[int]]) -> list[Choice]:
    """One layer over several steps; step i has tokens[i][rank] tokens on each rank.

    Returns:
        what ran in every step, on all ranks alike.
    """
    choices = []
    stock, ours = build_pair(case)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    for seed, by_rank in enumerate(tokens):
        step = replace(case, tokens=tuple(by_rank), seed=seed)
        expected = forward_backward(step, stock)
        assert_same_results(forward_backward(step, ours), expected, case.exact_sums, f"step {seed}")
        choices.append(ours.token_dispatcher.choice)
        optimizer.step()
    return same_on_all_ranks(choices)


def gathered(value: T) -> list[T]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_on_all_ranks(value: T) -> T:
    """The value, checked to be that of every rank."""
    values = gathered(value)
    assert values == values[:1] * len(values), f"ranks differ: {values}"
    return value


def error_of(function: Callable[..., object], *args: Any) -> str:
    """What a function says as it fails on a rank; empty if it does not fail."""
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def variable_of_rank(name: str, values: Sequence[str]) -> Iterator[None]:
    """An environment variable with a value of each rank's own; none where that is empty."""
    value = values[dist.get_rank()]
    with mock.patch.dict(os.environ, {name: value} if value else {}):
        yield


@contextlib.contextmanager
def printed() -> Iterator[io.StringIO]:
    """What this rank prints, whether or not it was printed before."""
    ranks._printed.clear()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        yield said


def reported(case: Case, runs: bool = False) -> list[str]:
    """What a rank prints as it builds two layers, and perhaps runs each twice."""
    from monta_megatron.integration import auto

    initialize(case)
    auto._shared.clear()
    with printed() as said:
        layers = [build_layer(case) for _ in range(2)]
        for layer in [*layers, *layers] if runs else []:
            forward_backward(case, layer)
    return said.getvalue().splitlines()


@contextlib.contextmanager
def capturing_preprocess() -> Iterator[None]:
    """Build dispatchers as Megatron does where it captures moe_preprocess."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    original = MoEAlltoAllTokenDispatcher.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.cuda_dtoh_point = "before_ep_alltoall"

    with mock.patch.object(MoEAlltoAllTokenDispatcher, "__init__", init):
        yield
