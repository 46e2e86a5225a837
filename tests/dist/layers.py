"""Functions that run on the ranks of a pool: one MoE layer, stock against ours.

Every function takes plain data and returns plain data; `Case` says what is built.
"""

import contextlib
import copy
import dataclasses
import gc
import io
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from equal import assert_equal
from step_list import StepList

from monta_megatron.common import first_rank
from monta_megatron.core import Choice

HIDDEN = 16
DEFAULT_CHAIN = "alltoall_allgather"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layer and its data.

    `routing`: "router" lets Megatron's router choose. The others force a choice:
    "uniform" is random; "rank0_empty" gives rank 0 no token; "expert0_empty" spares expert 0;
    "one_expert" sends every token to the last expert (top-1); "few_tokens" has 2 tokens a rank.
    Not top-k for each token: every third has one expert ("fewer") or none ("none"); no token has
    one, on rank 1 ("rank1_unrouted") or any ("unrouted").
    `config` goes to both dispatchers, `options` to ours.
    """

    tp: int = 1
    ep: int = 4
    etp: int = 1
    num_local_experts: int = 2
    topk: int = 2
    hidden: int = HIDDEN
    num_tokens: int = 24
    dtype: str = "float32"
    routing: str = "uniform"
    seed: int = 0
    cp: int = 1
    pp: int = 1
    order: str = "tp-cp-ep-dp-pp"
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_experts(self) -> int:
        return self.ep * self.num_local_experts

    @property
    def exact_sums(self) -> bool:
        """Whether our sums have stock's order, so that they are equal to the bit."""
        from monta_megatron.chains import CHAINS

        chain = CHAINS.get(self.options.get("moe_monta_chain", DEFAULT_CHAIN))
        return self.etp <= 2 and chain is not None and chain.rows == "permuted tokens"


def case_of_chain(chain: str, etp: int, **options: Any) -> Case:
    """2 nodes of 2 ranks; with expert tensor parallelism where the chain can have it."""
    named = {"moe_monta_chain": chain, "moe_monta_ranks_per_node": 2, **options}
    return Case(tp=2, ep=2 if etp == 2 else 4, etp=etp, options=named)


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


def transformer_config(case: Case, dispatcher: str, **options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch_dtype = getattr(torch, case.dtype)
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
        pipeline_dtype=torch_dtype,
        sequence_parallel=case.tp > 1,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=False,
        params_dtype=torch_dtype,
        bf16=case.dtype == "bfloat16",
        moe_router_pre_softmax=case.topk == 1,
        **{
            "num_layers": 1,
            "moe_router_dtype": "fp32",
            "gradient_accumulation_fusion": False,
            **case.config,
        },
        **(case.options if dispatcher == "monta" else {}),
        **options,
    )


def build_layer(case: Case, dispatcher: str, **options: Any) -> Any:
    """A Megatron MoE layer with the same weights for the same case, whatever the dispatcher."""
    from megatron.core.models.gpt import gpt_layer_specs

    initialize(case)
    if dispatcher == "monta" and "moe_monta_chain" not in case.options:
        options.setdefault("moe_monta_chain", DEFAULT_CHAIN)
    config = transformer_config(case, dispatcher, **options)
    if config.moe_grouped_gemm:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=case.num_experts, moe_grouped_gemm=True
        )
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=case.num_experts, moe_grouped_gemm=False
        )
    return build_moe(spec.submodules.mlp, config)


def build_pair(case: Case, num_chunks: int | None) -> tuple[Any, Any]:
    """Stock's layer, and ours in so many chunks."""
    stock = build_layer(case, "alltoall")
    return stock, build_layer(case, "monta", moe_monta_num_chunks=num_chunks)


def build_moe(mlp: Any, config: Any) -> Any:
    """An MoE layer from the `mlp` of a layer spec: a ModuleSpec or a partial, by release."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module

    groups = get_default_pg_collection()
    if isinstance(mlp, ModuleSpec):
        layer = build_module(mlp, config=config, pg_collection=groups)
    else:
        layer = mlp(config=config, pg_collection=groups)
    layer.set_layer_number(1)
    return layer.to("cuda")


@dataclass(frozen=True)
class Result:
    """Everything by which two dispatchers are compared."""

    expert_rows: torch.Tensor
    expert_probs: torch.Tensor
    tokens_per_expert: torch.Tensor
    output: torch.Tensor
    input_gradient: torch.Tensor
    weight_gradients: dict[str, torch.Tensor]


def forced_routing(case: Case, num_tokens: int, generator: torch.Generator) -> torch.Tensor | None:
    """[num_tokens, E] bool with exactly top-k experts each, or None to let the router choose."""
    if case.routing == "router":
        return None
    scores = torch.rand(num_tokens, case.num_experts, generator=generator)
    if case.routing == "expert0_empty":
        scores[:, 0] = -1.0
    if case.routing == "one_expert":
        scores[:, -1] = 2.0
    chosen = scores.topk(case.topk, dim=1).indices
    routing_map = torch.zeros(num_tokens, case.num_experts, dtype=torch.bool)
    routing_map.scatter_(1, chosen, True)
    if case.routing in ("fewer", "none"):
        routing_map[::3] = False
        routing_map[::3, 1] = case.routing == "fewer"
    if case.routing == "unrouted" or (case.routing == "rank1_unrouted" and dist.get_rank() == 1):
        routing_map[:] = False
    return routing_map.to("cuda")


def force(router: Any, routing_map: torch.Tensor | None) -> None:
    """Let the router compute its probabilities for a given choice, gradient included."""
    if routing_map is None:
        return

    def forward(hidden: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(hidden.float().flatten(0, 1), router.weight.float())
        return logits.sigmoid() * routing_map, routing_map.clone()

    router.forward = forward


def num_tokens_here(case: Case) -> int:
    if case.routing == "few_tokens":
        return 2
    return 0 if case.routing == "rank0_empty" and dist.get_rank() == 0 else case.num_tokens


def forward_backward(case: Case, layer: Any, with_input_gradient: bool = True) -> Result:
    """One step of the layer on this rank's data."""
    generator = torch.Generator().manual_seed(1000 * case.seed + dist.get_rank())
    num_tokens = num_tokens_here(case)
    hidden = torch.randn(num_tokens, 1, HIDDEN, generator=generator)
    gradient = torch.randn(num_tokens, 1, HIDDEN, generator=generator)
    # "cuda" is the CPU on CPU ranks.
    device_and_dtype = {"device": "cuda", "dtype": getattr(torch, case.dtype)}
    hidden = hidden.to(**device_and_dtype).requires_grad_(with_input_gradient)
    force(layer.router, forced_routing(case, num_tokens, generator))

    seen: list[Any] = []
    postprocess = layer.token_dispatcher.dispatch_postprocess

    def recording(*args: Any, **kwargs: Any) -> Any:
        result = postprocess(*args, **kwargs)
        seen[:] = result
        return result

    layer.token_dispatcher.dispatch_postprocess = recording
    layer.zero_grad()
    output, _ = layer(hidden)
    torch.autograd.backward(output, gradient.to(**device_and_dtype))
    layer.token_dispatcher.dispatch_postprocess = postprocess
    assert (hidden.grad is not None) == with_input_gradient
    # Chunks that are computed one by one have an order of their own.
    at_experts = seen or [torch.empty(0)] * 3
    return Result(
        expert_rows=at_experts[0].detach().clone(),
        tokens_per_expert=torch.as_tensor(at_experts[1]).clone(),
        expert_probs=at_experts[2].detach().clone(),
        output=output.detach().clone(),
        input_gradient=torch.empty(0) if hidden.grad is None else hidden.grad.clone(),
        weight_gradients={
            name: parameter.grad.clone()
            for name, parameter in layer.named_parameters()
            if parameter.grad is not None
        },
    )


def assert_same_results(ours: Result, stock: Result, exact_sums: bool, what: str) -> None:
    """What moves is equal to the bit; sums are too, unless their order differs (ETP > 2)."""
    is_split = ours.tokens_per_expert.numel() == 0
    for name in () if is_split else ("expert_rows", "tokens_per_expert", "expert_probs"):
        assert_equal(getattr(ours, name), getattr(stock, name), f"{what}: {name}")
    sums, expected = (
        {"output": result.output, "input_gradient": result.input_gradient} | result.weight_gradients
        for result in (ours, stock)
    )
    assert sums.keys() == expected.keys(), f"{what}: gradients of {sums.keys() ^ expected.keys()}"
    for name, mine in sums.items():
        assert_close(mine, expected[name], exact_sums, f"{what}: {name}")


def assert_close(mine: torch.Tensor, theirs: torch.Tensor, exact: bool, what: str) -> None:
    """Equal to the bit, or where sums have another order within their rounding."""
    if exact or theirs.numel() == 0:
        assert_equal(mine, theirs, what)
        return
    assert mine.dtype == theirs.dtype, f"{what}: {mine.dtype}, expected {theirs.dtype}"
    # A few terms summed in another order, through up to three roundings of partial sums that may
    # be larger than the result.
    bound = 8 * torch.finfo(mine.dtype).eps * theirs.abs().max().item()
    assert_equal(mine, theirs, what, bound)


def compare(case: Case, chunks: list[int]) -> dict[str, Any]:
    """Our dispatcher against stock on one case, for several chunk counts.

    Returns:
        what moved: the dispatcher's class and the bytes by resource of the last chunk count.
    """
    stock = forward_backward(case, build_layer(case, "alltoall"))
    overlaps = bool(case.options.get("moe_monta_overlap_experts"))
    report: dict[str, Any] = {}
    for num_chunks in chunks:
        layer = build_layer(case, "monta", moe_monta_num_chunks=num_chunks)
        ours = forward_backward(case, layer)
        # No rows of whole batches come to experts in the pipeline.
        assert (ours.tokens_per_expert.numel() == 0) == (overlaps and num_chunks > 1)
        assert_same_results(ours, stock, case.exact_sums, f"{case}, {num_chunks} chunks")
        report = {
            "dispatcher": type(layer.token_dispatcher).__name__,
            "bytes": layer.token_dispatcher.monitor.bytes_by_resource(),
        }
    return report


def record_of_passes(case: Case, num_chunks: int) -> list[tuple[str, str, str, int]]:
    """Every step of a forward and backward pass, in the order of issue."""
    layer = build_layer(case, "monta", moe_monta_num_chunks=num_chunks)
    layer.token_dispatcher.monitor.recorder = steps = StepList()
    forward_backward(case, layer)
    return [
        (step.action, step.pass_name, step.operation.stage, step.operation.chunk) for step in steps
    ]


def mismatch(case: Case, num_chunks: int) -> str:
    """The error that `compare` leads to, or ""."""
    try:
        compare(case, [num_chunks])
    except (AssertionError, RuntimeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compare_padded_for_quantization(case: Case, num_chunks: int, align_to: int) -> None:
    """Router padding to a multiple of rows: Megatron ties it to fp8, the dispatcher does not."""
    from megatron.core.transformer.moe import token_dispatcher

    align = "get_align_size_for_quantization"
    with mock.patch.object(token_dispatcher, align, lambda config: align_to):
        results = []
        for layer in build_pair(case, num_chunks):
            layer.config.moe_router_padding_for_quantization = True
            results.append(forward_backward(case, layer))
    stock, ours = results
    assert (stock.tokens_per_expert % align_to == 0).all()
    assert_same_results(ours, stock, case.exact_sums, f"{case}, router padding")


def compare_steps(case: Case, num_chunks: int | None, tokens: list[list[int]]) -> list[Choice]:
    """One layer over several steps; step i has tokens[i][rank] tokens on each rank.

    Returns:
        what ran in every step.
    """
    choices = []
    stock = build_layer(case, "alltoall")
    ours = build_layer(case, "monta", moe_monta_num_chunks=num_chunks)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    for seed, by_rank in enumerate(tokens):
        step = dataclasses.replace(case, num_tokens=by_rank[dist.get_rank()], seed=seed)
        expected = forward_backward(step, stock)
        assert_same_results(forward_backward(step, ours), expected, case.exact_sums, f"step {seed}")
        choices.append(ours.token_dispatcher.choice)
        optimizer.step()
    return choices


def make_batch(case: Case, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of this rank, [T, 1, H], and a routing map that is forced."""
    hidden = torch.randn(case.num_tokens, 1, HIDDEN, generator=generator).to("cuda")
    routing_map = forced_routing(case, case.num_tokens, generator)
    assert routing_map is not None
    return hidden, routing_map


def seeded_by_rank() -> torch.Generator:
    return torch.Generator().manual_seed(dist.get_rank())


def phases(dispatcher: Any, hidden: torch.Tensor, routing_map: torch.Tensor) -> list[torch.Tensor]:
    """The six phases with experts that scale each row by its probability.

    Returns:
        the experts' rows, the output, and the gradients of hidden states and probabilities.
    """
    hidden = hidden.clone().requires_grad_()
    probs = (routing_map / routing_map.sum(dim=1, keepdim=True)).requires_grad_()
    rows, row_probs = dispatcher.dispatch_preprocess(hidden, routing_map.clone(), probs)
    rows, output = after_preprocess(dispatcher, rows, row_probs)
    # As Megatron's branch dev does, before it recomputes a layer.
    dispatcher.probs = dispatcher.routing_map = dispatcher.hidden_shape = None
    dispatcher.reversed_local_input_permutation_mapping = None
    torch.autograd.backward(output, torch.ones_like(output) * (dist.get_rank() + 1))
    assert hidden.grad is not None and probs.grad is not None
    return [rows.detach(), output.detach(), hidden.grad, probs.grad]


def after_preprocess(
    dispatcher: Any, rows: torch.Tensor, row_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The other phases: the experts' rows and the output; no rows where experts overlap."""

    def scaled(rows: torch.Tensor, _: Any, probs: torch.Tensor) -> torch.Tensor:
        return (rows * probs[:, None]).to(rows.dtype)

    rows, row_probs = dispatcher.token_dispatch(rows, row_probs)
    if getattr(dispatcher, "computes", False):
        output = dispatcher.compute(scaled, rows, row_probs)
        rows = rows[:0]
    else:
        rows, counts, row_probs = dispatcher.dispatch_postprocess(rows, row_probs)
        output = dispatcher.combine_preprocess(scaled(rows, counts, row_probs))
    return rows, dispatcher.combine_postprocess(dispatcher.token_combine(output))


def knows_batch_invariant_sums() -> bool:
    """Whether Megatron has an order for a token's sum in batch-invariant mode (since 0.20)."""
    from megatron.core.transformer.moe import moe_utils

    return hasattr(moe_utils, "is_batch_invariant_mode_enabled")


def compare_batch_invariant(case: Case, num_chunks: int) -> None:
    """Sums by EP rank, then by expert: stock's bits, which are not those of its usual sums.

    Without the kernels that Megatron's mode puts in place of torch's.
    """
    from megatron.core.transformer.custom_layers import batch_invariant_kernels
    from megatron.core.transformer.enums import AttnBackend

    hidden, routing_map = make_batch(case, seeded_by_rank())
    usual = phases(build_layer(case, "alltoall").token_dispatcher, hidden, routing_map)
    demanded = {
        "batch_invariant_mode": True,
        "batch_invariant_backend": "te_native",
        "attention_backend": AttnBackend.flash,
        "flash_attention_version": 3,
        "attention_dropout": 0.0,
    }
    case = dataclasses.replace(case, dtype="bfloat16", config=case.config | demanded)
    with mock.patch.object(batch_invariant_kernels, "_batch_invariant_MODE", True):
        stock, ours = (layer.token_dispatcher for layer in build_pair(case, num_chunks))
        # In fp32 the order shows in the last bits, in bf16 every rounding does.
        for dtype in (torch.float32, torch.bfloat16):
            batch = hidden.to(dtype), routing_map
            (_, output, *gradients), (_, expected, *others) = (
                phases(dispatcher, *batch) for dispatcher in (ours, stock)
            )
            assert not torch.equal(expected, usual[1]), "the order does not matter here"
            assert_equal(output, expected, f"batch-invariant sums, {dtype}")
            for mine, theirs in zip(gradients, others, strict=True):
                assert_close(mine, theirs, case.exact_sums, "gradient")


def replay_cuda_graph_attributes(case: Case, num_chunks: int) -> None:
    """Megatron replays a captured preprocess by setting the listed attributes: do that.

    Batch A is preprocessed and its attributes are kept; batch B is preprocessed after it; then
    A's attributes come back, and the rest of the phases must belong to A. A name with dots is that
    of an attribute of the shared experts.
    """
    generator = seeded_by_rank()
    dispatcher = build_layer(case, "monta", moe_monta_num_chunks=num_chunks).token_dispatcher
    # Overlapped shared experts refuse a second preprocess while the first is under way.
    idle = getattr(dispatcher.shared_experts, "_overlap_state", None)
    # As Megatron sets it where moe_preprocess is captured: no copy to the host inside the graph.
    dispatcher.cuda_dtoh_point = "before_ep_alltoall"
    batches = [make_batch(case, generator) for _ in range(2)]
    expected = phases(dispatcher, *batches[0])[1]

    kept = []
    for hidden, routing_map in batches:
        probs = routing_map / routing_map.sum(dim=1, keepdim=True)
        outputs = dispatcher.dispatch_preprocess(hidden, routing_map.clone(), probs)
        attributes = {
            name: value.clone()
            for name in dispatcher.cudagraph_attrs
            if isinstance(value := attrgetter(name)(dispatcher), torch.Tensor)
        }
        kept.append((outputs, attributes))
        if idle is not None and len(kept) < len(batches):
            dispatcher.shared_experts._overlap_state = idle
    (rows, row_probs), attributes = kept[0]
    if dispatcher.shared_experts is not None:
        assert "shared_experts.cached_fc1_input" in attributes
    assert "joined_counts" in attributes
    for name, value in attributes.items():
        *path, last = name.split(".")
        setattr(attrgetter(path[0])(dispatcher) if path else dispatcher, last, value)
        if hasattr(dispatcher, "get_cudagraph_attr"):
            assert dispatcher.get_cudagraph_attr(name) is value
    _, output = after_preprocess(dispatcher, rows, row_probs)
    assert_equal(output, expected, "the replayed batch")


def train_under_overlap_schedule(case: Case, dispatcher: str) -> dict[str, torch.Tensor]:
    """Losses and gradients of four micro-batches, each forward beside another one's backward.

    The layers are [MoE, dense, MoE, MoE], so that in the schedule, which pairs the first layer with
    the last, an MoE layer meets itself, another one, and a dense one.
    """
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    initialize(case)
    if hasattr(MoETokenDispatcher, "reset_transient_forward_state"):
        # Megatron's branch dev can recompute whole layers: one of MoE and one that is dense.
        full = {"recompute_granularity": "full", "recompute_method": "block"}
        case = dataclasses.replace(case, config={**case.config, **full, "recompute_num_layers": 2})
    # Without Transformer Engine nothing is delayed; but the schedule is the one that asks for it,
    # where Megatron's own linear layers can be asked (not in 0.16).
    delays = case.num_local_experts > 1 and hasattr(RowParallelLinear, "backward_dw")
    config = transformer_config(case, dispatcher, delay_wgrad_compute=delays)
    spec = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, vocab_size=32, max_sequence_length=8)
    model = model.to(device="cuda", dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(case.seed + dist.get_rank() // case.tp)
    tokens = torch.randint(32, (4, 2, 9), generator=generator).to("cuda")

    def forward_step(batches: Any, model: Any, return_schedule_plan: bool) -> tuple[Any, Any]:
        assert return_schedule_plan
        batch = next(batches)
        plan = model.build_schedule_plan(
            batch[:, :-1], torch.arange(8).expand(2, 8), None, labels=batch[:, 1:]
        )
        return plan, lambda losses: (losses.mean(), {"loss": losses.detach()})

    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(tokens),
        model=[model],
        num_microbatches=len(tokens),
        seq_length=8,
        micro_batch_size=2,
        forward_only=False,
    )
    results = {f"loss {number}": each["loss"] for number, each in enumerate(losses)}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        results[name] = parameter.grad
    return results


def compare_under_overlap_schedule(case: Case, num_chunks: int) -> None:
    """Megatron's 1F1B schedule that hides the exchange behind another micro-batch's work."""
    stock = train_under_overlap_schedule(case, "alltoall")
    options = {**case.options, "moe_monta_num_chunks": num_chunks}
    ours = train_under_overlap_schedule(dataclasses.replace(case, options=options), "monta")
    assert ours.keys() == stock.keys()
    for name, mine in ours.items():
        assert_equal(mine, stock[name], name)


def options_survive_copies(case: Case) -> list[tuple[str, str, int]]:
    """Build a layer from a configuration made in code, and from its copies."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    initialize(case)
    config = transformer_config(case, "monta", moe_monta_num_chunks=3)
    copies = [
        config,
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        dataclasses.replace(config),
    ]
    built = []
    for each in copies:
        spec = get_gpt_layer_local_spec(num_experts=case.num_experts, moe_grouped_gemm=False)
        dispatcher = build_moe(spec.submodules.mlp, each).token_dispatcher
        choice = dispatcher.choice
        built.append((type(dispatcher).__name__, choice.chain, choice.num_chunks))
    return built


def build_from_spec(case: Case) -> tuple[str, str]:
    """The way in that patches nothing: a spec, with the stock name in the configuration."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from monta_megatron.integration.layer import with_monta

    initialize(case)
    spec = get_gpt_layer_local_spec(num_experts=case.num_experts, moe_grouped_gemm=False)
    config = transformer_config(case, "alltoall")
    changed = build_moe(with_monta(spec).submodules.mlp, config)
    unchanged = build_moe(spec.submodules.mlp, config)
    return type(changed.token_dispatcher).__name__, type(unchanged.token_dispatcher).__name__


def compare_many(cases: list[Case], chunks: list[int]) -> list[dict[str, Any]]:
    """`compare` for many cases in one call."""
    return [compare(case, chunks) for case in cases]


def many_steps(case: Case, num_chunks: int, num_steps: int) -> dict[str, list[float]]:
    """What grows over many steps: resident memory, threads, process groups, live tensors."""
    layer = build_layer(case, "monta", moe_monta_num_chunks=num_chunks)
    samples: dict[str, list[float]] = {
        "memory_bytes": [],
        "threads": [],
        "groups": [],
        "tensors": [],
    }
    for step in range(num_steps):
        forward_backward(dataclasses.replace(case, seed=step % 7), layer)
        if (step + 1) % (num_steps // 4) == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            samples["memory_bytes"].append(pages * os.sysconf("SC_PAGE_SIZE"))
            samples["threads"].append(len(os.listdir("/proc/self/task")))
            samples["groups"].append(len(dist.distributed_c10d._world.pg_map))
            samples["tensors"].append(
                sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())
            )
    assert threading.active_count() < 64
    return samples


def failure_of_step(case: Case, layer: Any) -> tuple[str, float]:
    """How a step fails that has lost a rank, and after how many seconds; "" if it does not."""
    from monta_megatron.exchange.errors import ExchangeError

    begin = time.monotonic()
    try:
        forward_backward(case, layer)
    except ExchangeError as error:
        seconds = time.monotonic() - begin
        # Megatron would end with this error, and so close its connections to the other ranks.
        dist.destroy_process_group()
        return str(error), seconds
    return "", time.monotonic() - begin


def die_in_dispatch(case: Case, num_chunks: int, victim: int, stops: bool) -> tuple[str, float]:
    """One rank is killed, or stops, between two chunks; what the others say, and after how long."""
    from monta_megatron.exchange import errors, operations

    layer = build_layer(case, "monta", moe_monta_num_chunks=num_chunks)
    forward_backward(case, layer)
    original = operations.OPERATIONS

    def alltoall(buffers: Any, operation: Any) -> Any:
        if operation.chunk == 1 and dist.get_rank() == victim:
            # What it has started before reaches the others.
            for each in errors.UNDER_WAY:
                for work in chain.from_iterable(each.works.values()):
                    work.wait()
            if stops:
                later_s = float(os.environ["POOL_GROUP_LIMIT_S"]) + 3
                subprocess.Popen(["sh", "-c", f"sleep {later_s}; kill -KILL {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
        return original["alltoall"](buffers, operation)

    with mock.patch.object(operations, "OPERATIONS", {**original, "alltoall": alltoall}):
        return failure_of_step(case, layer)


def end_in_exchange_of_counts(case: Case, victim: int, stops: bool) -> tuple[str, float]:
    """One rank is killed, or stops, before it tells its counts; what the others say, and when."""
    layer = build_layer(case, "monta")
    forward_backward(case, layer)
    limit_s = float(os.environ["POOL_GROUP_LIMIT_S"])
    if dist.get_rank() == victim:
        time.sleep(limit_s + 3 if stops else 0)
        os.kill(os.getpid(), signal.SIGKILL)
    return failure_of_step(case, layer)


def error_of(function: Callable[..., object], *args: Any) -> str:
    """What a function says as it fails on a rank; empty if it does not fail."""
    try:
        function(*args)
    except ValueError as error:
        return str(error)
    return ""


def refusal_of(case_of_rank: list[Case], environment_of_rank: list[dict[str, str]]) -> str:
    """What a dispatcher says as it is built; empty if it says nothing."""
    rank = dist.get_rank()
    with mock.patch.dict(os.environ, environment_of_rank[rank]):
        return error_of(build_layer, case_of_rank[rank], "monta")


def nodes_found(node_of_rank: list[str], variable: str, options: dict[str, Any]) -> tuple[int, ...]:
    """The nodes of a dispatcher's layout, where a variable tells each rank its own node."""
    with mock.patch.dict(os.environ, {variable: node_of_rank[dist.get_rank()]}):
        layer = build_layer(Case(), "monta", **options)
    return layer.token_dispatcher.setup.layout.nodes


def reported(case: Case, runs: bool = False) -> list[str]:
    """What a rank prints as it builds two layers, and perhaps runs each twice."""
    from monta_megatron.integration import auto

    initialize(case)
    auto._shared.clear()
    first_rank._printed.clear()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        layers = [build_layer(case, "monta") for _ in range(2)]
        for layer in [*layers, *layers] if runs else []:
            forward_backward(case, layer)
    return said.getvalue().splitlines()


def statistics_of_layers(case: Case) -> list[tuple[int | None, str, float | None, dict[str, int]]]:
    """Number, choice, imbalance and bytes of two layers that have run; a third is gone."""
    import monta_megatron

    # Those of other tests.
    gc.collect()
    before = len(monta_megatron.statistics())
    first, second, gone = (build_layer(case, "monta") for _ in range(3))
    first.set_layer_number(1001)
    second.set_layer_number(1000)
    del gone
    gc.collect()
    for layer in (first, second, second):
        forward_backward(case, layer)
    layers = monta_megatron.statistics()
    assert len(layers) == before + 2
    sent = [layer.token_dispatcher.monitor.bytes_by_resource() for layer in (second, first)]
    found = [{"inter": layer.inter_bytes, "intra": layer.intra_bytes} for layer in layers[-2:]]
    assert found == sent
    return [
        (layer.layer_number, layer.choice.name, layer.busiest_over_mean, sent_by)
        for layer, sent_by in zip(layers[-2:], sent, strict=True)
    ]


def groups_with_megatrons_time_limit(case: Case) -> list[str]:
    """The groups of a dispatcher whose time limit Megatron changes together with its own's."""
    from megatron.core import parallel_state

    groups = build_layer(case, "monta").token_dispatcher.groups
    changed = parallel_state._global_process_group_list
    # Twice would do no harm, but would grow with the layers.
    return [name for name, group in groups.items() if changed.count(group.process_group) == 1]


def disagree_in_communicators(case: Case, max_ctas_of_rank: list[int]) -> None:
    """Build a layer where ranks were given different files of communicator settings."""
    from monta_megatron.exchange import collectives

    settings: dict[str, Any] = dict.fromkeys(collectives.NCCL_SETTINGS, collectives.UNSET)
    settings |= {"net_name": None, "max_ctas": max_ctas_of_rank[dist.get_rank()]}
    options = SimpleNamespace(config=SimpleNamespace(**settings), is_high_priority_stream=False)
    with mock.patch.object(collectives, "options_of", lambda group: options):
        build_layer(case, "monta")


def disagree_later(case: Case, rank: int) -> None:
    """All ranks agree on two dispatchers; then `rank` runs the first, the others the second."""
    first, second = (
        build_layer(case, "monta", moe_monta_num_chunks=num_chunks).token_dispatcher
        for num_chunks in (3, 2)
    )
    batch = make_batch(case, seeded_by_rank())
    phases(first if dist.get_rank() == rank else second, *batch)


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


def rows_to_choose_from(case: Case, captures_permutation: bool) -> set[str]:
    """The kinds of rows sent by the chains that "auto" chooses from."""
    context = capturing_preprocess() if captures_permutation else contextlib.nullcontext()
    with context:
        planner = build_layer(case, "monta").token_dispatcher.setup.planner
    return {chain.rows for chain in planner.chains}


def tokens_decided_by(case: Case, tokens: list[int]) -> list[int]:
    """For how many tokens a rank chooses that has tokens[rank] of them."""
    layer = build_layer(case, "monta")
    dispatcher = layer.token_dispatcher
    choose, seen = dispatcher.chooser.choose, []

    def recording(counts: Any, *more: Any) -> Any:
        seen.append(counts.max_tokens)
        return choose(counts, *more)

    dispatcher.chooser.choose = recording
    forward_backward(dataclasses.replace(case, num_tokens=tokens[dist.get_rank()]), layer)
    return seen


def second_derivative(case: Case, num_chunks: int) -> str:
    """The error of a gradient's gradient; stock has it, ours does not."""
    layer = build_layer(case, "monta", moe_monta_num_chunks=num_chunks)
    hidden = torch.randn(4, 1, HIDDEN).requires_grad_()
    output, _ = layer(hidden)
    (gradient,) = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def sums_around_a_local_group() -> tuple[int, int]:
    """The sum of the ranks over a group that its members make, and over one that all make next.

    Ranks 2 and 3 make one more group than ranks 0 and 1, so that they have counted otherwise.
    """
    from monta_megatron.exchange.collectives import new_local_group

    rank = dist.get_rank()
    pair = [0, 1] if rank < 2 else [2, 3]
    if rank >= 2:
        new_local_group(pair, "more")
    groups = [new_local_group(pair, "pair"), dist.new_group(range(4))]
    sums = [torch.tensor([rank]) for _ in groups]
    for each, group in zip(sums, groups, strict=True):
        dist.all_reduce(each, group=group)
    return int(sums[0]), int(sums[1])
