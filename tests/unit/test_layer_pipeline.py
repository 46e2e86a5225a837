"""The pipeline of dispatch, experts and combine, on one rank, where nothing is sent."""

from typing import Any

import numpy as np
import pytest
import torch
from fake_world import bound_exchange, chunks_of

from monta_megatron.chains import CHAINS, TokenCounts
from monta_megatron.core import Layout
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.pipeline import run_pipeline
from monta_megatron.exchange.rows import expert_ids_of

NUM_EXPERTS, TOPK, HIDDEN, TOKENS = 4, 2, 16, 40
BLOCKS = 8
LAYOUT = Layout(ep=1, etp=1, num_local_experts=NUM_EXPERTS, rank=0, nodes=(0,))


def routing_of(num_tokens: int) -> torch.Tensor:
    scores = torch.rand(num_tokens, NUM_EXPERTS)
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(TOPK).indices, True)


def exchanges(routing_map: torch.Tensor, num_chunks: int) -> list[Exchange]:
    """The exchanges of so many chunks."""
    chain = CHAINS["allgather"]
    exchange, counts = bound_exchange(chain, LAYOUT, [routing_map], 1, BLOCKS)
    assert isinstance(counts, TokenCounts)
    return chunks_of(exchange, counts, num_chunks)


class Gated(torch.nn.Module):
    """Experts with one matrix each, whose outputs are weighted; called once for every chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN))
        self.numbers_of_rows: list[int] = []

    def forward(
        self, rows: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
    ) -> torch.Tensor:
        self.numbers_of_rows.append(len(rows))
        parts = rows.split(tokens_per_expert.tolist())
        outputs = [
            torch.tanh(part @ matrix) for part, matrix in zip(parts, self.weight, strict=True)
        ]
        return (torch.cat(outputs) * probs[:, None]).to(rows.dtype)


def run(num_chunks: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Forward and backward of one batch; 0 chunks: every expert on all tokens, dense."""
    torch.manual_seed(0)
    experts = Gated()
    hidden, gradient = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    probs, routing_map = torch.rand(TOKENS, NUM_EXPERTS), routing_of(TOKENS)
    # The same values in every dtype.
    experts.weight.data = experts.weight.data.bfloat16().to(dtype)
    hidden, gradient = (one.bfloat16().to(dtype) for one in (hidden, gradient))
    hidden.requires_grad_()
    probs = probs.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    hooks: list[int] = []
    experts.weight.register_post_accumulate_grad_hook(lambda _: hooks.append(1))
    if num_chunks:
        row_probs, ids = expert_ids_of(routing_map, probs, TOPK)
        output = run_pipeline(exchanges(routing_map, num_chunks), hidden, row_probs, ids, experts)
    else:
        # [E, T, H] -> [T, H]
        by_expert = torch.tanh(torch.einsum("th,ehf->etf", hidden, experts.weight))
        output = torch.einsum("etf,te->tf", by_expert, probs * routing_map)
    output.backward(gradient)
    return {
        "output": output.detach(),
        "hidden": hidden.grad,
        "probs": probs.grad,
        "weight": experts.weight.grad,
        "hooks": len(hooks),
        "numbers of rows": experts.numbers_of_rows,
    }


TENSORS = ("output", "hidden", "probs", "weight")


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 8])
def test_it_is_the_dense_layer(num_chunks: int) -> None:
    ours, dense = run(num_chunks), run(0)
    assert len(ours["numbers of rows"]) == num_chunks
    assert sum(ours["numbers of rows"]) == TOPK * TOKENS
    # The engine sums the chunks' gradients of a parameter before its hooks run.
    assert ours["hooks"] == 1
    for name in TENSORS:
        # Sums of at most 40 terms in another order.
        torch.testing.assert_close(ours[name], dense[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_chunks", [2, 8])
def test_rounding_is_that_of_the_experts(dtype: torch.dtype, num_chunks: int) -> None:
    """Outputs and gradients of rows: as accurate as of one call, against fp64.

    A weight's gradient is the sum of C products, each rounded to its dtype, and so are the sums: of
    2 C - 1 roundings instead of one.
    """
    exact, whole, split = run(0), run(1, dtype), run(num_chunks, dtype)

    def error(result: dict[str, Any], name: str) -> float:
        return float((result[name].double() - exact[name]).square().mean().sqrt())

    for name in TENSORS[:3]:
        assert error(split, name) <= 1.05 * error(whole, name), name
    assert error(split, "weight") <= (2 * num_chunks - 1) ** 0.5 * error(whole, "weight")


@pytest.mark.parametrize("has_graph", [True, False])
def test_nothing_is_kept_once_the_graph_is_gone(has_graph: bool) -> None:
    """Without a gradient there is none from the start."""
    routing_map = routing_of(TOKENS)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    probs, ids = expert_ids_of(routing_map, torch.rand(TOKENS, NUM_EXPERTS), TOPK)
    with torch.set_grad_enabled(has_graph):
        output = run_pipeline(exchanges(routing_map, 2), hidden, probs, ids, Gated())
    assert (output.grad_fn is not None) == has_graph and output.shape == (TOKENS, HIDDEN)
    for backward in (lambda: None, lambda: output.sum().backward()) if has_graph else ():
        kept = output.grad_fn.back.func.__self__
        backward()
        assert not kept._under_way and not kept._results and not kept._sources


def test_counts_of_blocks() -> None:
    counts = TokenCounts(
        tokens=np.arange(8).reshape(2, 4),
        experts=np.arange(16).reshape(2, 4, 2),
        sent_to_ranks=np.arange(8).reshape(4, 2),
        for_rank=np.arange(8).reshape(2, 4),
    )
    part = counts.of_blocks(1, 3)
    assert part.tokens.tolist() == [[1, 2], [5, 6]]
    assert part.experts.tolist() == [[[2, 3], [4, 5]], [[10, 11], [12, 13]]]
    assert part.sent_to_ranks is not None and part.sent_to_ranks.tolist() == [[2, 3], [4, 5]]
    assert part.for_rank is not None and part.for_rank.tolist() == [[1, 2], [5, 6]]
    assert part.sent_to_nodes is None
