"""Functions that run on the ranks of a pool: the dispatcher, on any routing map, against stock's.

All six phases run, with experts that compute each value of a row by itself. So a rank knows the
terms of its tokens' sums, which bound what their order may change.

Notation: T = tokens of this rank, W = width of a row, E = experts, L = local experts, N = rows for
them.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from typing import Any
from unittest import mock

import exchanges
import pytest
import torch
import torch.distributed as dist
from equal import assert_equal, difference
from layers import Batch, Case, build_layer, build_pair, capturing_preprocess, make_batch
from torch.utils.checkpoint import checkpoint

from monta_megatron.chains import CHAINS

DROP = {"moe_expert_capacity_factor": 1.0}
PAD = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}

# What a dispatcher gave, by name: "rows", "probs" and "tokens_per_expert" at the experts ([N, W],
# [N] and [L]) and "expert_gradient" ([N, W], of what the experts handed back), but for experts
# inside the pipeline; "output" and "token_gradient" ([T, W]), and "prob_gradient" ([T, E]).
Passes = dict[str, torch.Tensor]
SUMS = ("output", "token_gradient", "prob_gradient")
# Rows, tokens per expert and probabilities -> rows.
Experts = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]


def factors_of(experts: torch.Tensor, etp_rank: int) -> torch.Tensor:
    """What each expert multiplies rows by: exact in any dtype."""
    return 1 + (3 * experts + etp_rank) % 4 / 4


def compute(rows: torch.Tensor, factors: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Run experts: [N, W], [N], [N] -> [N, W], value by value."""
    outputs = rows * factors.to(rows.dtype)[:, None] + rows * rows / 2
    return (outputs * probs[:, None]).to(rows.dtype)


def after_preprocess(
    dispatcher: Any, experts: Experts, rows: torch.Tensor, probs: torch.Tensor
) -> torch.Tensor:
    """The five phases behind the first, with experts between them or inside: the output."""
    sent = dispatcher.token_dispatch(rows, probs)
    if getattr(dispatcher, "computes", False):
        computed = dispatcher.compute(experts, *sent)
    else:
        at_experts = experts(*dispatcher.dispatch_postprocess(*sent))
        computed = dispatcher.combine_preprocess(at_experts)
    return dispatcher.combine_postprocess(dispatcher.token_combine(computed))


def run_phases(case: Case, dispatcher: Any, batch: Batch, is_training: bool = True) -> Passes:
    """All six phases and, in training, their backward passes."""
    num_tokens, width = batch.tokens.shape
    shape = (num_tokens,) if case.flat else (num_tokens // case.batch, case.batch)
    shape = (*shape, width)

    def given(rows: torch.Tensor) -> torch.Tensor:
        """[T, W] -> `shape`."""
        if case.strided:
            gaps = torch.full_like(rows, torch.nan)
            rows = torch.cat([rows, gaps], dim=1)[:, :width]
        return rows.view(shape)

    seen: list[tuple[torch.Tensor, ...]] = []
    gradients: list[torch.Tensor] = []
    local_experts = torch.tensor(dispatcher.local_expert_indices)

    def experts(
        rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        tokens_per_expert = torch.as_tensor(tokens_per_expert)
        seen.append((rows.detach().clone(), probs.detach().clone(), tokens_per_expert.clone()))
        factors = factors_of(local_experts, dispatcher.tp_rank)
        outputs = compute(rows, factors.repeat_interleave(tokens_per_expert), probs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: gradients.append(gradient.clone()))
        return outputs

    def phases(tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        entered = dispatcher.dispatch_preprocess(tokens, batch.routing_map.clone(), probs)
        return after_preprocess(dispatcher, experts, *entered)

    tokens, probs = batch.tokens.clone().requires_grad_(), batch.probs.clone().requires_grad_()
    is_ours = hasattr(dispatcher, "chooser")
    with torch.set_grad_enabled(is_training):
        if case.recompute and is_ours:
            is_reentrant = case.recompute == "reentrant"
            output = checkpoint(phases, given(tokens), probs, use_reentrant=is_reentrant)
        else:
            output = phases(given(tokens), probs)
    assert output.shape == shape, f"an output of {tuple(output.shape)} for {shape}"
    assert output.requires_grad == is_training
    # As Megatron's branch dev does, before it recomputes a layer.
    dispatcher.probs = dispatcher.routing_map = dispatcher.hidden_shape = None
    dispatcher.reversed_local_input_permutation_mapping = None
    if is_training:
        torch.autograd.backward(output, given(batch.gradient))
    number = len(seen) // (2 if case.recompute and is_ours else 1)
    for first, again in zip(seen[:number], seen[number:], strict=False):
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one, other), "recomputed otherwise"
    found = {"output": output.detach().reshape(num_tokens, width)}
    if is_training:
        found |= {"token_gradient": tokens.grad, "prob_gradient": probs.grad}
    if not getattr(dispatcher, "computes", False):
        found |= zip(("rows", "probs", "tokens_per_expert"), seen[0], strict=True)
        found |= {"expert_gradient": gradients[0]} if is_training else {}
    return found


def bounds_of(case: Case, batch: Batch) -> dict[str, torch.Tensor]:
    """How far two sums of the same terms may be apart, in other orders; by name, in fp64.

    Every partial sum is at most the sum of the terms' absolute values, and a rounding moves it by
    at most half an eps. Stock adds in the rows' dtype, over ETP ranks and then over experts; ours
    round to it 4 times at most and add in at least fp32. A probability's gradient is a sum over ETP
    ranks.
    """
    pairs = batch.routing_map
    if case.config == PAD:
        # Any pair may fill an expert up: with probability 0, but with a gradient.
        pairs = torch.ones_like(pairs)
    token, expert = pairs.nonzero(as_tuple=True)
    magnitudes = {
        name: torch.zeros(like.shape, dtype=torch.float64)
        for name, like in zip(SUMS, (batch.tokens, batch.tokens, batch.probs), strict=True)
    }
    for etp_rank in range(case.etp):
        rows = batch.tokens[token].requires_grad_()
        probs = batch.probs[token, expert].requires_grad_()
        outputs = compute(rows, factors_of(expert, etp_rank), probs)
        torch.autograd.backward(outputs, batch.gradient[token])
        assert rows.grad is not None and probs.grad is not None
        for name, terms in (("output", outputs.detach()), ("token_gradient", rows.grad)):
            magnitudes[name].index_add_(0, token, terms.double().abs())
        magnitudes["prob_gradient"][token, expert] += probs.grad.double().abs()
    # [T, 1], and one number for probabilities.
    num_terms = case.etp * pairs.sum(dim=1, keepdim=True)
    roundings = dict.fromkeys(SUMS[:2], num_terms + 6) | {"prob_gradient": 2 * case.etp + 2}
    bounds = {}
    for name, magnitude in magnitudes.items():
        dtype = getattr(torch, case.probs_dtype if name == "prob_gradient" else case.dtype)
        eps, sum_eps = (
            torch.finfo(each).eps for each in (dtype, torch.promote_types(dtype, torch.float32))
        )
        # 1%: errors on top of errors.
        bounds[name] = 1.01 / 2 * (roundings[name] * eps + num_terms * sum_eps) * magnitude
    return bounds


def check(case: Case) -> list[str]:
    """Our dispatcher against stock's: what differs, one line each."""
    from monta_megatron.integration import auto, first_use

    # Of other cases, which some ranks may have collected already.
    auto._shared.clear()
    if case.checked:
        first_use._passed.clear()
    layer = build_layer(case)
    stock, dispatcher = build_layer(case, "alltoall").token_dispatcher, layer.token_dispatcher
    # Frameworks patch how Megatron counts rows, and have to where a token has more than top-k.
    holds_more = case.routing in ("any_number", "every_expert", "mixed")
    of_tokens = case.chain != "auto" and CHAINS[case.chain].rows == "tokens"
    is_patched = (holds_more and not of_tokens) or case.seed % 2 == 1
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    found = []
    for step in range(case.num_steps):
        batch = make_batch(case, layer, step)
        is_training = case.is_training or step % 2 == 1
        with exchanges.uninitialised_memory_is_nan():
            with contextlib.ExitStack() as stack:
                if case.fused:
                    stack.enter_context(in_interpreter(dispatcher))
                if is_patched:
                    stack.enter_context(rows_counted_from_the_map())
                enters = mock.patch.object(dispatcher, "_enter", wraps=dispatcher._enter)
                enter = stack.enter_context(enters)
                ours = run_phases(case, dispatcher, batch, is_training)
            with rows_counted_from_the_map():
                theirs = run_phases(case, stock, batch, is_training)
        what = f"rank {dist.get_rank()}, step {step}, chain {dispatcher.choice.chain}"
        rows = CHAINS[dispatcher.choice.chain].rows
        if is_patched and case.chain != "auto" and not case.config:
            # The host has to know how many rows there are before it permutes them.
            is_bound = enter.call_args.args[0].exchanges != ()
            assert is_bound == (rows == "permuted tokens")
        keeps_order = rows == "permuted tokens" and case.etp <= 2
        bounds = {} if keeps_order else bounds_of(case, batch)
        if case.etp == 1:
            # Probabilities only move.
            bounds.pop("prob_gradient", None)
        found += [f"{what}: {line}" for line in differences(ours, theirs, bounds)]
        optimizer.step()
    return found


def differences(ours: Passes, theirs: Passes, bounds: dict[str, torch.Tensor]) -> Iterator[str]:
    """What differs: equal to the bit, but for sums that have bounds."""
    for name, mine in ours.items():
        other = theirs[name]
        if name in bounds and mine.dtype != other.dtype:
            yield f"{name}: {mine.dtype}, expected {other.dtype}"
        elif line := difference(mine, other, bounds.get(name)):
            yield f"{name}: {line}"


@contextlib.contextmanager
def rows_counted_from_the_map() -> Iterator[None]:
    """Let stock's dispatcher take tokens with any number of experts, as frameworks patch it.

    Without capacity it assumes top-k of them.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    original = MoEAlltoAllTokenDispatcher.preprocess

    def preprocess(self: Any, routing_map: torch.Tensor) -> Any:
        result = original(self, routing_map)
        if not self.drop_and_pad:
            self.num_out_tokens = int(routing_map.sum())
        return result

    with mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", preprocess):
        yield


@contextlib.contextmanager
def in_interpreter(dispatcher: Any) -> Iterator[None]:
    """Run a dispatcher's Triton kernels on the host, see `Pool`."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "kernels would be launched on a GPU"
    from monta_megatron.exchange import count_messages
    from monta_megatron.integration import first_use

    dispatcher.setup = replace(dispatcher.setup, is_fused=True)
    with (
        mock.patch.object(count_messages, "is_fused", lambda *_: True),
        # It takes 20 s for 256 tokens.
        mock.patch.object(first_use, "NUM_TOKENS", 16),
    ):
        yield


def check_many(cases: list[Case]) -> list[tuple[int, str]]:
    """`check` for many cases in one call, see `exchanges.check_many`."""
    return exchanges.each_checked(check, cases)


def scale(rows: torch.Tensor, _: Any, probs: torch.Tensor) -> torch.Tensor:
    """Experts that all do the same."""
    return (rows * probs[:, None]).to(rows.dtype)


def compare_batch_invariant(case: Case) -> None:
    """Sums by EP rank, then by expert: stock's bits, which are not those of its usual sums.

    Without the kernels that Megatron's mode puts in place of torch's.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "is_batch_invariant_mode_enabled"):
        pytest.skip("needs Megatron-Core >= 0.20, which orders a token's sum in this mode")
    from megatron.core.transformer.custom_layers import batch_invariant_kernels
    from megatron.core.transformer.enums import AttnBackend

    layer = build_layer(case, "alltoall")
    batch = make_batch(case, layer)
    usual = run_phases(case, layer.token_dispatcher, batch)
    demanded = {
        "batch_invariant_mode": True,
        "batch_invariant_backend": "te_native",
        "attention_backend": AttnBackend.flash,
        "flash_attention_version": 3,
        "attention_dropout": 0.0,
    }
    case = replace(case, params_dtype="bfloat16", config=case.config | demanded)
    with mock.patch.object(batch_invariant_kernels, "_batch_invariant_MODE", True):
        stock, ours = (layer.token_dispatcher for layer in build_pair(case))
        # In fp32 the order shows in the last bits, in bf16 every rounding does.
        for dtype in ("float32", "bfloat16"):
            each = replace(case, dtype=dtype)
            rows, gradient = (
                values.to(getattr(torch, dtype)) for values in (batch.tokens, batch.gradient)
            )
            of_dtype = replace(batch, tokens=rows, gradient=gradient)
            found, expected = (run_phases(each, one, of_dtype) for one in (ours, stock))
            assert not torch.equal(expected["output"], usual["output"]), "the order does not matter"
            bounds = {} if case.exact_sums else bounds_of(each, of_dtype)
            bounds.pop("output", None)
            assert not list(differences(found, expected, bounds))


def replay_cuda_graph_attributes(case: Case, num_steps: int = 1) -> list[str]:
    """Megatron replays a captured preprocess by setting the listed attributes: do that.

    Batch A is preprocessed and its attributes are kept; batch B is preprocessed after it; then
    A's attributes come back in every step, and the rest of the phases must belong to A. A name with
    dots is that of an attribute of the shared experts.

    Returns:
        what ran in each step.
    """
    from monta_megatron.integration import auto

    auto._shared.clear()
    with capturing_preprocess():
        layer = build_layer(case)
    dispatcher = layer.token_dispatcher
    batches = [make_batch(case, layer, step) for step in range(2)]
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def preprocess(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = batch.tokens.unsqueeze(1)
        return dispatcher.dispatch_preprocess(tokens, batch.routing_map.clone(), batch.probs)

    expected = after_preprocess(dispatcher, scale, *preprocess(batches[0]))
    # Overlapped shared experts refuse a second preprocess while the first is under way.
    idle = getattr(dispatcher.shared_experts, "_overlap_state", None)
    kept = []
    for batch in batches:
        if idle is not None:
            dispatcher.shared_experts._overlap_state = idle
        outputs = preprocess(batch)
        attributes = {
            name: value.clone()
            for name in dispatcher.cudagraph_attrs
            if isinstance(value := attrgetter(name)(dispatcher), torch.Tensor)
        }
        kept.append((outputs, attributes))
    captured, attributes = kept[0]
    if dispatcher.shared_experts is not None:
        assert "shared_experts.cached_fc1_input" in attributes
    assert "joined_counts" in attributes
    seen = []
    for _ in range(num_steps):
        for name, value in attributes.items():
            *path, last = name.split(".")
            value = value.clone()
            setattr(attrgetter(path[0])(dispatcher) if path else dispatcher, last, value)
            if hasattr(dispatcher, "get_cudagraph_attr"):
                assert dispatcher.get_cudagraph_attr(name) is value
        rows, probs = (each.detach().clone() for each in captured)
        output = after_preprocess(dispatcher, scale, rows * weight, probs)
        assert_equal(output.detach(), expected, "the replayed batch")
        output.sum().backward()
        optimizer.step()
        seen.append(dispatcher.choice.name)
    return seen
