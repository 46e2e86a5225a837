"""One MoE layer on the ranks of a pool, stock against ours.

Notation: T = tokens of this rank, W = width of a row, E = experts.
"""

import contextlib
import copy
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, cycle, islice
from typing import Any, TypeVar
from unittest import mock

import exchanges
import torch
import torch.distributed as dist
from equal import difference
from patches import rows_counted_from_the_map
from torch.utils.checkpoint import checkpoint

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
    Rank r has `tokens[r + step]` tokens, cyclically, as wide as `hidden`, unless `width` says it.
    `routing` is as in `exchanges.Case`, or "no_expert" (no token has any), "empty_rank" (none of a
    rank's has), "mixed" (ranks have fewer than top-k, any number, or none, in turn), or "router":
    Megatron's. `params_dtype` is the rows' dtype unless given; `by_value` has `ValueExperts`, which
    take rows of any dtype and width.

    An optimizer makes a step after each of `num_steps` micro-batches, or after `micro_batches` of
    them, cyclically. `log_probs` has a pass without gradients in training mode before each, and the
    layer of the rank `evaluating` is in eval mode where the others' are in training mode. Rows are
    [T / B, B, W], B = `batch`, or [T, W] where that is 0; `strided` ones have gaps between them,
    and lists lie transposed. Where a case is not of training, every other step trains all the same.
    `recompute` is "reentrant" or "not reentrant" where backward runs our layer again.
    """

    chain: str = "alltoall_allgather"
    ranks_per_node: int | None = 2  # type: ignore[assignment]
    num_chunks: int | None = None  # type: ignore[assignment]
    tokens: Sequence[int] = (24,)
    hidden: int = 16
    width: int = 0
    params_dtype: str = ""
    by_value: bool = False
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
    strided: bool = False
    is_training: bool = True
    recompute: str = ""
    micro_batches: Sequence[int] = (1,)
    log_probs: bool = False
    evaluating: int | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether a chain is named whose rows are tokens."""
        return self.chain in CHAINS and CHAINS[self.chain].rows == "tokens"

    @property
    def exact_sums(self) -> bool:
        """Whether our sums have stock's order, so that they are equal to the bit."""
        return self.etp <= 2 and self.chain in CHAINS and not self.has_tokens

    @property
    def monta_options(self) -> dict[str, Any]:
        """The options of our dispatcher, as a TransformerConfig has them."""
        is_serial = self.chain in CHAINS and CHAINS[self.chain].serial
        options = {
            "chain": self.chain,
            "num_chunks": None if is_serial else self.num_chunks,
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
    router_dtypes = {"float32": "fp32", "float64": "fp64"}
    fields = {
        "num_layers": 1,
        "hidden_size": case.hidden,
        "num_attention_heads": 4,
        "num_moe_experts": case.num_experts,
        "moe_router_topk": case.topk,
        "moe_ffn_hidden_size": 16,
        "moe_token_dispatcher_type": dispatcher,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": router_dtypes.get(case.probs_dtype),
        "moe_router_pre_softmax": case.topk == 1,
        "moe_aux_loss_coeff": 0.0,
        "tensor_model_parallel_size": case.tp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "context_parallel_size": case.cp,
        "pipeline_model_parallel_size": case.pp,
        "pipeline_dtype": params_dtype,
        "sequence_parallel": case.tp > 1,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "params_dtype": params_dtype,
        "bf16": params_dtype == torch.bfloat16,
    }
    options = case.monta_options if dispatcher == "monta" else {}
    return TransformerConfig(**(fields | case.config | options))


def build_layer(case: Case, dispatcher: str = "monta") -> Any:
    """A Megatron MoE layer with the same weights for the same case, whatever the dispatcher."""
    initialize(case)
    config = transformer_config(case, dispatcher)
    with no_experts() if case.by_value else contextlib.nullcontext():
        layer = build_moe(layer_spec(case, config.moe_grouped_gemm), config)
    if case.by_value:
        layer.experts = ValueExperts(layer)
    return layer


def build_pair(case: Case) -> tuple[Any, Any]:
    """Stock's layer, and ours."""
    return build_layer(case, "alltoall"), build_layer(case)


def layer_spec(case: Case, is_grouped: bool = False) -> Any:
    """The spec of a transformer layer with the experts of a case."""
    from megatron.core.models.gpt import gpt_layer_specs

    kind = "with_transformer_engine" if is_grouped else "local"
    of_kind = getattr(gpt_layer_specs, f"get_gpt_layer_{kind}_spec")
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
        routing_map: [T, E] bool; the router's own is another.
        gradient: [T, W], of the output.
    """

    tokens: torch.Tensor
    routing_map: torch.Tensor
    gradient: torch.Tensor


def make_batch(case: Case, step: int = 0) -> Batch:
    """What this rank has in a step."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1009 * case.seed + 101 * step + rank)
    num_tokens = case.tokens[(rank + step) % len(case.tokens)]

    def normal() -> torch.Tensor:
        shape = num_tokens, case.width or case.hidden
        # "cuda" is the CPU on CPU ranks.
        return torch.randn(shape, generator=generator).to("cuda", case.torch_dtype)

    routing_map = routing_of_rank(case, num_tokens, generator)
    if case.strided:
        routing_map = routing_map.T.contiguous().T
    return Batch(tokens=normal(), routing_map=routing_map, gradient=normal())


def routing_of_rank(case: Case, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """[T, E] bool; see `Case`."""
    rank, routing = dist.get_rank(), case.routing
    if routing == "mixed":
        routing = ("capacity", "any_number", "no_expert")[rank % 3]
    if routing == "empty_rank":
        routing = "no_expert" if rank == case.seed % dist.get_world_size() else "uniform"
    routing_map = exchanges.make_routing(replace(case, routing=routing), num_tokens, generator)
    return (torch.zeros_like(routing_map) if routing == "no_expert" else routing_map).to("cuda")


def force(router: Any, routing_map: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Let the router compute its probabilities for a given choice, gradient included."""

    def forward(hidden: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden.float().reshape(-1, hidden.shape[-1])
        logits = torch.nn.functional.linear(rows, router.weight[:, : rows.shape[1]].float())
        return (logits.sigmoid() * routing_map).to(dtype), routing_map.clone()

    router.forward = forward


@contextlib.contextmanager
def no_experts() -> Iterator[None]:
    """Let Megatron build no experts where they would be replaced: they take most of its time."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    build = SequentialMLP.__init__

    def build_none(experts: Any, num_local_experts: int, *args: Any, **settings: Any) -> None:
        build(experts, 0, *args, **settings)

    with mock.patch.object(SequentialMLP, "__init__", build_none):
        yield


class ValueExperts(torch.nn.Module):
    """Experts that compute each value of a row by itself, to the same bits in any order of rows."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        numbers = 3 * torch.tensor(layer.local_expert_indices) + layer.token_dispatcher.tp_rank
        # Exact in any dtype.
        self.factors = 1 + numbers % 4 / 4

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        factors = self.factors.repeat_interleave(torch.as_tensor(tokens_per_expert))
        outputs = rows * factors.to(rows.dtype)[:, None] + rows * rows / 2
        return (outputs * probs[:, None]).to(rows.dtype), None


@dataclass(frozen=True)
class Result:
    """Everything by which two dispatchers are compared.

    Attributes:
        values: the output [T, W] and, in training, all gradients by name, that of the probabilities
            [T, E] too. Those of `MOVED` only where the experts are not in the pipeline.
        calls: [L] tokens per expert, for each call of the experts in forward.
    """

    values: dict[str, torch.Tensor]
    calls: list[torch.Tensor]


# What the experts receive, and the gradient of what they return.
MOVED = ("rows", "tokens_per_expert", "probs", "expert_gradient")


def forward_backward(
    case: Case, layer: Any, step: int = 0, with_input_gradient: bool = True
) -> Result:
    """One step of the layer on this rank's data; only forward where that is not of training."""
    batch, dispatcher = make_batch(case, step), layer.token_dispatcher
    is_training = case.is_training or step % 2 == 1
    num_tokens, width = batch.tokens.shape
    shape = (num_tokens // case.batch, case.batch, width) if case.batch else (num_tokens, width)

    def given(rows: torch.Tensor) -> torch.Tensor:
        """[T, W] -> `shape`."""
        if case.strided:
            gaps = torch.full_like(rows, torch.nan)
            rows = torch.cat([rows, gaps], dim=1)[:, :width]
        return rows.view(shape)

    calls: list[list[torch.Tensor]] = []
    gradients: dict[str, torch.Tensor] = {}

    def note_call(_: Any, args: tuple[Any, ...]) -> None:
        calls.append([torch.as_tensor(each).detach().clone() for each in args])

    def note_gradient(name: str) -> Any:
        def note(_: Any, args: Any, results: tuple[torch.Tensor, Any]) -> None:
            if results[0].requires_grad:
                results[0].register_hook(lambda value: gradients.update({name: value.clone()}))

        return note

    if case.routing != "router":
        force(layer.router, batch.routing_map, getattr(torch, case.probs_dtype))
    hooks = [
        layer.experts.register_forward_pre_hook(note_call),
        layer.experts.register_forward_hook(note_gradient("expert_gradient")),
        layer.router.register_forward_hook(note_gradient("prob_gradient")),
    ]
    rows = batch.tokens.requires_grad_(with_input_gradient)
    layer.train(is_training).zero_grad()
    is_ours = hasattr(dispatcher, "chooser")
    if is_ours and case.evaluating == dist.get_rank():
        layer.eval()
    if is_ours and case.log_probs and is_training:
        with torch.no_grad():
            layer(given(rows.detach()))
        calls.clear()
    with torch.set_grad_enabled(is_training):
        if case.recompute and is_ours:
            is_reentrant = case.recompute == "reentrant"
            output, _ = checkpoint(layer, given(rows), use_reentrant=is_reentrant)
        else:
            output, _ = layer(given(rows))
    assert output.shape == shape, f"an output of {tuple(output.shape)} for {shape}"
    assert output.requires_grad == is_training
    # As Megatron's branch dev does, before it recomputes a layer.
    dispatcher.probs = dispatcher.routing_map = dispatcher.hidden_shape = None
    dispatcher.reversed_local_input_permutation_mapping = None
    num_calls = len(calls)
    if is_training:
        torch.autograd.backward(output, given(batch.gradient))
        assert (rows.grad is not None) == with_input_gradient
    for first, again in zip(calls, calls[num_calls:], strict=False):
        assert all(map(torch.equal, first, again)), "recomputed otherwise"
    for hook in hooks:
        hook.remove()
    named = [("input", rows), *layer.named_parameters()]
    gradients |= {name: each.grad.clone() for name, each in named if each.grad is not None}
    values = {"output": output.detach().reshape(num_tokens, width).clone(), **gradients}
    values |= zip(MOVED, calls[0], strict=False)
    if getattr(dispatcher, "computes", False):
        values = {name: value for name, value in values.items() if name not in MOVED}
    return Result(values, [call[1] for call in calls[:num_calls]])


def differences(
    ours: Result,
    stock: Result,
    exact: bool = False,
    num_terms: int = 0,
    moved: Sequence[str] = MOVED,
) -> Iterator[str]:
    """What differs: equal to the bit, or where sums have another order within their rounding."""
    if differ := (ours.values.keys() ^ stock.values.keys()) - set(MOVED):
        yield f"gradients of {sorted(differ)}"
    for name, mine in ours.values.items():
        if name not in stock.values:
            continue
        theirs, bound = stock.values[name], None
        if not exact and name not in moved and theirs.numel():
            # The terms summed in another order, through up to three roundings of partial sums that
            # may be larger than the result.
            largest = theirs.abs().max().item()
            bound = (8 + num_terms / 2) * torch.finfo(theirs.dtype).eps * largest
        if mine.dtype != theirs.dtype:
            yield f"{name}: {mine.dtype}, expected {theirs.dtype}"
        elif line := difference(mine, theirs, bound):
            yield f"{name}: {line}"


def assert_same_results(ours: Result, stock: Result, exact: bool, what: str) -> None:
    """See `differences`."""
    found = list(differences(ours, stock, exact))
    assert not found, f"rank {dist.get_rank()}: {what}: {found}"


def run_beside_stock(
    case: Case, chunks: Sequence[int | None] = ()
) -> tuple[list[str], list[Choice]]:
    """Our layer against stock's, perhaps in several numbers of chunks.

    Returns:
        what differs, one line each; what ran in each step.
    """
    from monta_megatron.integration import auto

    # Of other cases, which some ranks may have collected already.
    auto._shared.clear()
    # Frameworks patch how Megatron counts rows, and have to where a token has more than top-k.
    holds_more = case.routing in ("any_number", "every_expert", "mixed")
    is_patched = (holds_more and not case.has_tokens) or case.seed % 2 == 1
    num_terms = case.etp * (case.num_experts if holds_more else case.topk)
    moved = (*MOVED, "prob_gradient") if case.by_value and case.etp == 1 else MOVED
    found, choices, expected = [], [], stock_results(case)
    for num_chunks in chunks or (case.num_chunks,):
        each = replace(case, num_chunks=num_chunks)
        layer, optimizer = build_layer(each), idle_optimizer()
        steps_end_after = set(accumulate(islice(cycle(case.micro_batches), case.num_steps)))
        dispatcher = layer.token_dispatcher
        assert type(dispatcher).__name__ == "MontaTokenDispatcher"
        for step, theirs in enumerate(expected):
            patched = rows_counted_from_the_map() if is_patched else contextlib.nullcontext()
            with entering(dispatcher) as waited, patched:
                ours = forward_backward(each, layer, step)
            if step + 1 in steps_end_after:
                optimizer.step()
            choices.append(dispatcher.choice)
            rows = CHAINS[dispatcher.choice.chain].rows
            if is_patched and case.chain != "auto" and not case.config:
                # The host has to know how many rows there are before it permutes them.
                assert waited[-1] == (rows == "permuted tokens")
            if case.pipelined and case.chain != "auto" and num_chunks is not None:
                # The experts are called for every chunk.
                assert len(ours.calls) == num_chunks, f"{each}: {ours.calls}"
            # Two terms have one sum, in any order.
            has_order = rows == "permuted tokens" and case.etp <= 2
            exact = has_order or (num_terms <= 2 and (case.by_value or not case.pipelined))
            what = f"rank {dist.get_rank()}, step {step}, {dispatcher.choice.name}"
            lines = differences(ours, theirs, exact, num_terms, moved)
            found += [f"{what}: {line}" for line in lines]
    return found, choices


# Kept for other chains on the same data, by the fields that reach stock.
_stock_results: dict[str, list[Result]] = {}


def stock_results(case: Case) -> list[Result]:
    """What stock gives in each step of a case."""
    ours: dict[str, Any] = {"num_chunks": None, "ranks_per_node": None, "options": {}}
    ours |= {"pipelined": False, "checked": True, "recompute": "", "micro_batches": (1,)}
    ours |= {"log_probs": False, "evaluating": None}
    key = repr(replace(case, chain="alltoall", **ours))
    if key not in _stock_results:
        stock = build_layer(case, "alltoall")
        with rows_counted_from_the_map():
            results = [forward_backward(case, stock, step) for step in range(case.num_steps)]
        _stock_results[key] = results
    return _stock_results[key]


@contextlib.contextmanager
def entering(dispatcher: Any) -> Iterator[list[bool]]:
    """Whether each micro-batch has its counts as its rows enter the chain."""
    waited, enter = [], dispatcher._enter

    def noted(*args: Any) -> Any:
        waited.append(dispatcher.micro_batch is not None)
        return enter(*args)

    with mock.patch.object(dispatcher, "_enter", noted):
        yield waited


def compare(case: Case, chunks: Sequence[int | None] = ()) -> list[Choice]:
    """Our dispatcher against stock's; what ran in each step, on all ranks alike."""
    found, choices = run_beside_stock(case, chunks)
    assert not found, "\n".join([str(case), *found])
    return same_on_all_ranks(choices)


def check(case: Case) -> list[str]:
    """What differs from stock, one line each; a case that is checked is checked anew."""
    from monta_megatron.integration import first_use

    if case.checked:
        first_use._passed.clear()
    with exchanges.uninitialised_memory_is_nan():
        return run_beside_stock(case)[0]


def idle_optimizer() -> torch.optim.Optimizer:
    """Its steps end iterations without changing a weight."""
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)


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
    from monta_megatron.integration.first_use import SelfCheckError

    try:
        function(*args)
    except (ValueError, AssertionError, SelfCheckError) as error:
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
