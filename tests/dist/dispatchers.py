"""Functions that run on the ranks of a pool: the dispatcher, on any routing map, against stock's.

All six phases run, with experts that compute each value of a row by itself. So a rank knows the
terms of its tokens' sums, which bound what their order may change.

Notation: T = tokens of this rank, W = width of a row, E = experts, L = local experts, N = rows for
them.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import exchanges
import layers
import torch
import torch.distributed as dist
from equal import difference
from torch.utils.checkpoint import checkpoint

from monta_megatron.chains import CHAINS

# Of a tuning window, with trials of two candidates.
STEPS = 6
ROUTER_WIDTH = 8


@dataclass(frozen=True, kw_only=True)
class Case(exchanges.Case):
    """A dispatcher, and the micro-batches that go through it.

    `chain` may be "auto", which may be tuned; an optimizer makes a step after each micro-batch.
    Rank r has `tokens[r + step]` tokens, cyclically. `routing` is as in `exchanges.Case`, or
    "no_expert" (no token has any), "empty_rank" (none of a rank's has), "mixed" (ranks have fewer
    than top-k, any number, or none, in turn), or "router": Megatron's.
    `capacity`: "" for none; "drop" counts what a router has dropped, "pad" fills the experts up.
    Rows, as wide as `hidden`, are [T / B, B, W] for B = `batch`, or [T, W] where they are `flat`;
    `strided` ones have gaps between them, and lists lie transposed. `params_dtype` is the rows'
    dtype unless given. `fused` is Triton's interpreter, `pipelined` the experts inside the
    pipeline, `checked` the check of the first use. Where a case is not of training, every other
    step trains all the same. `recompute` is "reentrant" or "not reentrant" where backward runs our
    phases again.
    """

    tp: int = 1
    batch: int = 1
    params_dtype: str = ""
    capacity: str = ""
    num_steps: int = 1
    is_tuned: bool = False
    pipelined: bool = False
    fused: bool = False
    flat: bool = False
    strided: bool = False
    is_training: bool = True
    recompute: str = ""
    checked: bool = False

    @property
    def is_patched(self) -> bool:
        """Whether Megatron counts rows by the map, as frameworks patch it.

        They have to where a map holds more experts of a token than top-k.
        """
        holds_more = self.routing in ("any_number", "every_expert", "mixed")
        of_tokens = self.chain != "auto" and CHAINS[self.chain].rows == "tokens"
        return (holds_more and not of_tokens) or self.seed % 2 == 1

    @property
    def layer(self) -> layers.Case:
        """The layer whose dispatcher it is."""
        router_dtypes = {"float32": "fp32", "float64": "fp64"}
        config: dict[str, Any] = {"moe_router_dtype": router_dtypes.get(self.probs_dtype)}
        if self.capacity:
            config["moe_expert_capacity_factor"] = 1.0
            config["moe_pad_expert_input_to_capacity"] = self.capacity == "pad"
        options = {
            "chain": self.chain,
            "ranks_per_node": self.ranks_per_node,
            "num_chunks": None if self.chain == "auto" else self.num_chunks,
            "tune_steps": STEPS if self.is_tuned else 0,
            "overlap_experts": self.pipelined or None,
            "check": int(self.checked),
        }
        return layers.Case(
            tp=self.tp,
            ep=self.ep,
            etp=self.etp,
            num_local_experts=self.num_local_experts,
            topk=self.topk,
            # Of the router, and of experts that are not run.
            hidden=ROUTER_WIDTH,
            dtype=self.params_dtype or self.dtype,
            config=config,
            options={f"moe_monta_{name}": value for name, value in options.items()},
        )


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


def make_batch(case: Case, step: int, layer: Any) -> Batch:
    """What this rank has in a step; `layer` has the router."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1009 * case.seed + 101 * step + rank)
    num_tokens = case.tokens[(rank + step) % len(case.tokens)]

    def normal(width: int, dtype: str) -> torch.Tensor:
        values = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
        return values.to(getattr(torch, dtype))

    if case.routing == "router":
        with torch.no_grad():
            _, routing_map = layer.router(normal(ROUTER_WIDTH, case.dtype).unsqueeze(1))
    else:
        routing = case.routing
        if routing == "mixed":
            routing = ("capacity", "any_number", "no_expert")[rank % 3]
        if routing == "empty_rank" and rank == case.seed % dist.get_world_size():
            routing = "no_expert"
        named = replace(case, routing=routing if routing in exchanges.ROUTINGS else "uniform")
        routing_map = exchanges.make_routing(named, num_tokens, generator)
        if routing == "no_expert":
            routing_map = torch.zeros_like(routing_map)
    if case.strided:
        routing_map = routing_map.T.contiguous().T
    return Batch(
        tokens=normal(case.hidden, case.dtype),
        routing_map=routing_map,
        probs=normal(case.num_experts, case.probs_dtype) * routing_map,
        gradient=normal(case.hidden, case.dtype),
    )


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What a dispatcher gave; None where it did not, as rows at experts inside the pipeline.

    Attributes:
        rows, probs, tokens_per_expert: [N, W], [N] and [L] at the experts.
        expert_gradient: [N, W], of what the experts handed back.
        output: [T, W].
        token_gradient, prob_gradient: [T, W] and [T, E].
    """

    rows: torch.Tensor | None
    probs: torch.Tensor | None
    tokens_per_expert: torch.Tensor | None
    expert_gradient: torch.Tensor | None
    output: torch.Tensor
    token_gradient: torch.Tensor | None
    prob_gradient: torch.Tensor | None


# By their names in `Passes`.
SUMS = ("output", "token_gradient", "prob_gradient")


def factors_of(experts: torch.Tensor, etp_rank: int) -> torch.Tensor:
    """What each expert multiplies rows by: exact in any dtype."""
    return 1 + (3 * experts + etp_rank) % 4 / 4


def compute(rows: torch.Tensor, factors: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Run experts: [N, W], [N], [N] -> [N, W], value by value."""
    outputs = rows * factors.to(rows.dtype)[:, None] + rows * rows / 2
    return (outputs * probs[:, None]).to(rows.dtype)


def run_phases(case: Case, dispatcher: Any, batch: Batch, is_training: bool = True) -> Passes:
    """All six phases and, in training, their backward passes."""
    num_tokens = len(batch.tokens)
    shape = (num_tokens,) if case.flat else (num_tokens // case.batch, case.batch)
    shape = (*shape, case.hidden)

    def given(rows: torch.Tensor) -> torch.Tensor:
        """[T, W] -> `shape`."""
        if case.strided:
            gaps = torch.full_like(rows, torch.nan)
            rows = torch.cat([rows, gaps], dim=1)[:, : case.hidden]
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
        sent = dispatcher.token_dispatch(*entered)
        if in_pipeline():
            computed = dispatcher.compute(experts, *sent)
        else:
            at_experts = experts(*dispatcher.dispatch_postprocess(*sent))
            computed = dispatcher.combine_preprocess(at_experts)
        return dispatcher.combine_postprocess(dispatcher.token_combine(computed))

    def in_pipeline() -> bool:
        return getattr(dispatcher, "computes", False)

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
    if is_training:
        torch.autograd.backward(output, given(batch.gradient))
    number = len(seen) // (2 if case.recompute and is_ours else 1)
    for first, again in zip(seen[:number], seen[number:], strict=False):
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one, other), "recomputed otherwise"
    is_in_pipeline = in_pipeline()
    rows_seen, probs_seen, counts_seen = (None,) * 3 if is_in_pipeline else seen[0]
    return Passes(
        rows=rows_seen,
        probs=probs_seen,
        tokens_per_expert=counts_seen,
        expert_gradient=None if is_in_pipeline or not is_training else gradients[0],
        output=output.detach().reshape(num_tokens, case.hidden),
        token_gradient=tokens.grad,
        prob_gradient=probs.grad,
    )


def bounds_of(case: Case, batch: Batch) -> dict[str, torch.Tensor]:
    """How far two sums of the same terms may be apart, in other orders; by name, in fp64.

    Every partial sum is at most the sum of the terms' absolute values, and a rounding moves it by
    at most half an eps. Stock adds in the rows' dtype, over ETP ranks and then over experts; ours
    round to it 4 times at most and add in at least fp32. A probability's gradient is a sum over ETP
    ranks.
    """
    pairs = batch.routing_map
    if case.capacity == "pad":
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
    layer = layers.build_layer(case.layer, "monta")
    dispatcher, stock = layer.token_dispatcher, stock_dispatcher(case, layer)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
    found = []
    for step in range(case.num_steps):
        batch = make_batch(case, step, layer)
        is_training = case.is_training or step % 2 == 1
        with exchanges.uninitialised_memory_is_nan():
            with contextlib.ExitStack() as stack:
                if case.fused:
                    dispatcher.setup = replace(dispatcher.setup, is_fused=True)
                    stack.enter_context(kernels_in_interpreter())
                if case.is_patched:
                    stack.enter_context(rows_counted_from_the_map())
                ours = run_phases(case, dispatcher, batch, is_training)
            with rows_counted_from_the_map():
                theirs = run_phases(case, stock, batch, is_training)
        what = f"rank {dist.get_rank()}, step {step}, chain {dispatcher.choice.chain}"
        rows = CHAINS[dispatcher.choice.chain].rows
        if case.is_patched and case.chain != "auto" and not case.capacity:
            # The host has to know how many rows there are before it permutes them.
            is_early = dispatcher.cuda_sync_point == "before_permutation_1"
            assert is_early == (rows == "permuted tokens"), dispatcher.cuda_sync_point
        keeps_order = rows == "permuted tokens" and case.etp <= 2
        bounds = {} if keeps_order else bounds_of(case, batch)
        if case.etp == 1:
            # Probabilities only move.
            bounds.pop("prob_gradient", None)
        found += [f"{what}: {line}" for line in differences(ours, theirs, bounds)]
        optimizer.step()
    return found


def stock_dispatcher(case: Case, layer: Any) -> Any:
    """Stock's for the experts of a layer."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    return MoEAlltoAllTokenDispatcher(
        layer.num_local_experts,
        layer.local_expert_indices,
        layers.transformer_config(case.layer, "alltoall"),
        get_default_pg_collection(),
    )


def differences(ours: Passes, theirs: Passes, bounds: dict[str, torch.Tensor]) -> Iterator[str]:
    """What differs: equal to the bit, but for sums that have bounds."""
    for name, mine in vars(ours).items():
        other = getattr(theirs, name)
        if mine is None:
            continue
        assert other is not None, f"stock gave no {name}"
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
def kernels_in_interpreter() -> Iterator[None]:
    """Run Triton's kernels on the host, see `Pool`."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "kernels would be launched on a GPU"
    from monta_megatron.exchange import count_messages
    from monta_megatron.integration import first_use

    with (
        mock.patch.object(count_messages, "is_fused", lambda *_: True),
        mock.patch.object(first_use, "NUM_TOKENS", 16),
    ):
        yield


def check_many(cases: list[Case]) -> list[tuple[int, str]]:
    """`check` for many cases in one call, see `exchanges.check_many`."""
    return exchanges.each_checked(check, cases)
