"""What a layer holds at most where its experts are in the pipeline."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_stream_safety import TOKEN_CASES, Layer

from monta_megatron.exchange.executor import combine, dispatch
from monta_megatron.exchange.pipeline import Experts, run_pipeline
from monta_megatron.integration.experts import (
    add_in_every_call,
    with_one_placeholder,
)

# Rows are most of the memory beside the weights.
HIDDEN = 256
NUM_CHUNKS = 3
MARK = "grad_added_to_main_grad"


class Product(torch.autograd.Function):
    """A linear layer that keeps to the rules of gradient accumulation fusion.

    They are Megatron's, and Transformer Engine's of the first micro-batch.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, module: Any) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.module = module
        ctx.adds = module.disable_parameter_transpose_cache or not module.is_first_microbatch
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        rows, weight = ctx.saved_tensors
        rows_gradient = gradient @ weight
        if ctx.module.placeholder is None:
            return rows_gradient, gradient.t() @ rows, None
        weight.main_grad.addmm_(gradient.t(), rows, beta=int(ctx.adds))
        if not hasattr(weight, MARK):
            return rows_gradient, None, None
        setattr(weight, MARK, True)
        return rows_gradient, ctx.module.placeholder(weight), None


class Weighted(torch.nn.Module):
    """Two experts of two matrices each, whose gradients are added to `main_grad`, as by DDP.

    Args:
        placeholder: what a product that adds a gradient itself returns for it; None if none does.
    """

    def __init__(self, placeholder: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__()
        self.placeholder = placeholder
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterList(
            torch.randn(HIDDEN, HIDDEN, generator=generator) for _ in range(4)
        )
        self.numbers_of_hooks = [0] * 4
        for number, weight in enumerate(self.weights):
            weight.main_grad = torch.zeros_like(weight)
            setattr(weight, MARK, False)
            weight.register_post_accumulate_grad_hook(lambda one, at=number: self._add(one, at))

    def _add(self, weight: torch.Tensor, number: int) -> None:
        self.numbers_of_hooks[number] += 1
        assert weight.grad is not None
        if not getattr(weight, MARK):
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    @property
    def memory(self) -> list[torch.Tensor]:
        return [one for weight in self.weights for one in (weight.detach(), weight.main_grad)]

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        outputs = []
        for expert, part in enumerate(rows.split(tokens_per_expert.tolist())):
            for weight in self.weights[2 * expert : 2 * expert + 2]:
                part = Product.apply(part, weight, self)
            outputs.append(part)
        self.is_first_microbatch = False
        return torch.cat(outputs) * probs[:, None]


def peak_bytes(
    chain_name: str,
    layout_name: str,
    num_chunks: int,
    experts: Experts,
    memory: list[torch.Tensor],
) -> int:
    """The most that a layer holds, forward and backward, above what is there before.

    Args:
        chain_name, layout_name: what runs.
        num_chunks: in the pipeline; 0 for one call of the experts between the passes.
        experts: the experts.
        memory: what is theirs.
    """
    layer = layer_of(chain_name, layout_name)
    recorder, whole = layer.recorder, layer.exchange
    rows, probs, ids = layer.inputs()
    assert ids is not None
    with recorder:
        before = recorder.forget_peak([rows.detach(), probs.detach(), ids, *memory])
        if num_chunks:
            output = run_pipeline(layer.chunks(), rows * 1, probs * 1, ids, experts)
        else:
            expert_rows, expert_probs = dispatch(whole, rows * 1, probs * 1, ids)
            counts = torch.from_numpy(whole.bound_chain.rows_per_local_expert)
            output = combine(whole, experts(expert_rows, counts, expert_probs))
            del expert_rows, expert_probs
        (output * 2).sum().backward()
    assert recorder.findings == []
    return recorder.peak_bytes - before


def layer_of(chain_name: str, layout_name: str) -> Layer:
    return Layer(chain_name, layout_name, NUM_CHUNKS, num_tokens=96, hidden=HIDDEN)


def shared_placeholder() -> Callable[[torch.Tensor], torch.Tensor]:
    """One for all products, as Transformer Engine has it."""
    shared = torch.empty(HIDDEN, HIDDEN)
    return lambda weight: shared.detach()


PLACEHOLDERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "fresh": lambda: torch.empty_like,
    "shared": shared_placeholder,
}


@pytest.mark.parametrize("kind", PLACEHOLDERS)
@pytest.mark.parametrize(("chain_name", "layout_name"), TOKEN_CASES)
def test_weight_gradients(chain_name: str, layout_name: str, kind: str) -> None:
    """Two chunks above the unsplit layer at most, where products add to `main_grad`.

    Autograd holds no placeholders either, as it would without `with_one_placeholder`. Where none
    adds, there is one set of gradients besides: the engine sums the chunks' before the hooks run.
    """
    whole, split, plain = (Weighted(PLACEHOLDERS[kind]()) for _ in range(3))
    if kind != "none":
        add_in_every_call(split)
    unsplit, mine, without = (
        peak_bytes(chain_name, layout_name, num_chunks, experts, module.memory)
        for num_chunks, experts, module in (
            (0, whole, whole),
            (NUM_CHUNKS, split if kind == "none" else with_one_placeholder(split, split), split),
            (NUM_CHUNKS, plain, plain),
        )
    )
    rows_of_chunks = layer_of(chain_name, layout_name).exchange.bound_chain.rows_at[-1]
    one_weight, two_chunks = HIDDEN * HIDDEN * 4, 2 * max(rows_of_chunks) * HIDDEN * 4
    if kind == "none":
        # The gradient that a product is just making comes on top; the unsplit layer has it as well,
        # but not when it holds most.
        assert abs(mine - unsplit - 4 * one_weight) <= two_chunks + one_weight
    else:
        assert mine <= unsplit + two_chunks
        assert without > mine + 2 * one_weight
        assert all(getattr(weight, MARK) for weight in split.weights)
    assert split.numbers_of_hooks == whole.numbers_of_hooks == [1] * 4
    for ours, theirs in zip(split.weights, whole.weights, strict=True):
        # Sums of some 100 products in another order.
        torch.testing.assert_close(ours.main_grad, theirs.main_grad, rtol=1e-5, atol=1e-2)
