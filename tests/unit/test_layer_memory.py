"""What a layer holds at most where its experts are in the pipeline."""

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
        if ctx.module.placeholder == "none":
            return rows_gradient, gradient.t() @ rows, None
        weight.main_grad.addmm_(gradient.t(), rows, beta=int(ctx.adds))
        if not hasattr(weight, MARK):
            return rows_gradient, None, None
        setattr(weight, MARK, True)
        is_shared = ctx.module.placeholder == "shared"
        placeholder = ctx.module.shared.detach() if is_shared else torch.empty_like(weight)
        return rows_gradient, placeholder, None


class Weighted(torch.nn.Module):
    """Two experts of two matrices each, whose gradients are added to `main_grad`, as by DDP.

    Args:
        placeholder: what a product that adds a gradient itself returns for it: "fresh" memory, or
            memory that all products share, as in Transformer Engine; "none" if none adds.
    """

    def __init__(self, placeholder: str) -> None:
        super().__init__()
        self.placeholder, self.shared = placeholder, torch.empty(HIDDEN, HIDDEN)
        self.is_first_microbatch, self.disable_parameter_transpose_cache = True, False
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterList(
            torch.randn(HIDDEN, HIDDEN, generator=generator) for _ in range(4)
        )
        for weight in self.weights:
            weight.main_grad = torch.zeros_like(weight)
            setattr(weight, MARK, False)
            weight.register_post_accumulate_grad_hook(self._add)

    def _add(self, weight: torch.Tensor) -> None:
        assert weight.grad is not None
        if not getattr(weight, MARK):
            weight.main_grad.add_(weight.grad)
        weight.grad = None

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
    chain_name: str, layout_name: str, num_chunks: int, module: Weighted, experts: Experts
) -> tuple[int, int]:
    """The most that a layer holds, forward and backward, above what is there before.

    Args:
        chain_name, layout_name: what runs.
        num_chunks: in the pipeline; 0 for one call of the experts between the passes.
        module, experts: the experts, and how they are called.

    Returns:
        It, and the bytes of a chunk's rows at the experts.
    """
    layer = Layer(chain_name, layout_name, NUM_CHUNKS, num_tokens=96, hidden=HIDDEN)
    recorder, whole = layer.recorder, layer.exchange
    rows, probs, ids = layer.inputs()
    assert ids is not None
    memory = [one for weight in module.weights for one in (weight.detach(), weight.main_grad)]
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
    return recorder.peak_bytes - before, max(whole.bound_chain.rows_at[-1]) * HIDDEN * 4


@pytest.mark.parametrize("placeholder", ["none", "fresh", "shared"])
@pytest.mark.parametrize(("chain_name", "layout_name"), TOKEN_CASES)
def test_weight_gradients(chain_name: str, layout_name: str, placeholder: str) -> None:
    """Two chunks above the unsplit layer at most, where products add to `main_grad`.

    Autograd holds no placeholders either, as it would without `with_one_placeholder`. Where none
    adds, there is one set of gradients besides: the engine sums the chunks' before the hooks run.
    """
    whole, split, plain = (Weighted(placeholder) for _ in range(3))
    experts: Any = split
    if placeholder != "none":
        add_in_every_call(split)
        experts = with_one_placeholder(split, split)
    unsplit, _ = peak_bytes(chain_name, layout_name, 0, whole, whole)
    mine, chunk = peak_bytes(chain_name, layout_name, NUM_CHUNKS, split, experts)
    one_weight = HIDDEN * HIDDEN * 4
    if placeholder == "none":
        # The gradient that a product is just making comes on top; the unsplit layer has it as well,
        # but not when it holds most.
        assert abs(mine - unsplit - 4 * one_weight) <= 2 * chunk + one_weight
    else:
        without, _ = peak_bytes(chain_name, layout_name, NUM_CHUNKS, plain, plain)
        assert mine <= unsplit + 2 * chunk
        assert without > mine + 2 * one_weight
        assert all(getattr(weight, MARK) for weight in split.weights)
    for ours, theirs in zip(split.weights, whole.weights, strict=True):
        # Sums of some 100 products in another order.
        torch.testing.assert_close(ours.main_grad, theirs.main_grad, rtol=1e-5, atol=1e-2)
