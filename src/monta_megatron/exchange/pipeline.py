"""Dispatch, experts and combine of a micro-batch as one pipeline over chunks of its tokens.

Each chunk consists of whole token blocks and is an exchange of its own, with its own passes and
expert rows. In step s

    first pass of chunk s starts | chunk s-1 is computed, its second starts | second of s-2 ends

Forward, the first pass is dispatch and the second one combine; backward, combine's backward and
dispatch's, in the same order over the chunks from the last to the first. `exchange.streams` shows
what waits for what.

Passes go from tokens to experts (dispatch, combine's backward) or from experts to tokens (combine,
dispatch's backward). A step of one and its mirror image are a node of the autograd graph:

    forward                          backward
    dispatch takes all tokens        dispatch's backward gives all gradients
    dispatch starts                  dispatch's backward ends
    dispatch ends                    dispatch's backward starts
    experts                          experts
    combine starts                   combine's backward ends
    combine ends                     combine's backward starts
    combine gives all tokens         combine's backward takes all gradients

Each node gets an empty tensor, the token, from the node before it. So backward is the mirror image,
with collectives in the same order on every rank, whichever of its ready nodes the engine runs first
and whatever the experts' graph is. It sums a parameter's gradients over all chunks before its hooks
run, once. Rows are in tensors of all chunks, and each pass reads and writes its slice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from monta_megatron.chains.chain import order_of_issue
from monta_megatron.chains.program import (
    COMBINE,
    COMBINE_BACKWARD,
    DISPATCH,
    DISPATCH_BACKWARD,
    Pass,
)
from monta_megatron.exchange.buffers import Columns
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.executor import Execution, contiguous

Tensors: TypeAlias = Sequence[torch.Tensor]

# (rows [N, H], rows of each local expert, the rows' probabilities [N]) -> their outputs [N, H].
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def run_pipeline(
    chunks: Sequence[Exchange],
    rows_TH: torch.Tensor,
    probs_TW: torch.Tensor,
    ids_TW: torch.Tensor,
    experts: Experts,
) -> torch.Tensor:
    """Dispatch, compute and combine all chunks; differentiable.

    Args:
        chunks: their exchanges, each bound with one chunk, in the order of their tokens.
        rows_TH: the tokens.
        probs_TW: probability of each expert in `ids_TW`.
        ids_TW: experts of each token, ascending.
        experts: called for every chunk.

    Returns:
        [T, H] sums of the experts' outputs by token.

    Raises:
        ExchangeError: a collective failed or timed out.
    """
    pipeline = _Pipeline(chunks)
    # It requires a gradient, so backward runs all passes even if the rows do not.
    token = rows_TH.new_empty(0, requires_grad=True)

    def node(step: Any, back: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
        nonlocal token
        token, *results = _Node.apply(step, back, token, *tensors)
        return results

    give = partial(pipeline.give, DISPATCH_BACKWARD)
    node(partial(pipeline.take, DISPATCH, ids_TW), give, rows_TH, probs_TW)
    # Three parts of each chunk, as above; each comes a step after the one before.
    for part, chunk in order_of_issue((0, 1, 2), len(chunks)):
        start, end = partial(pipeline.start, chunk), partial(pipeline.end, chunk)
        if part == 0:
            node(partial(start, DISPATCH), partial(end, DISPATCH_BACKWARD))
        elif part == 1:
            rows_NH, probs_N = node(partial(end, DISPATCH), partial(start, DISPATCH_BACKWARD))
            outputs_NH = experts(rows_NH, pipeline.tokens_per_expert(chunk), probs_N)
            del rows_NH, probs_N
            node(partial(start, COMBINE), partial(end, COMBINE_BACKWARD), outputs_NH)
            del outputs_NH
        else:
            node(partial(end, COMBINE), partial(start, COMBINE_BACKWARD))
    take = partial(pipeline.take, COMBINE_BACKWARD, None)
    (result_TH,) = node(partial(pipeline.give, COMBINE), take)
    return result_TH


def blocks_of_chunks(num_blocks: int, num_chunks: int) -> list[tuple[int, int]]:
    """[C] first token block of each chunk, and the one after its last."""
    return list(pairwise(num_blocks * chunk // num_chunks for chunk in range(num_chunks + 1)))


class _Pipeline:
    """Passes in flight, and the tensors of all chunks that they read and write."""

    def __init__(self, chunks: Sequence[Exchange]) -> None:
        self._chunks = chunks
        ends = [0]
        for chunk in chunks:
            ends.append(ends[-1] + int(chunk.bound_chain.num_source_rows))
        self._slices = [slice(*bounds) for bounds in pairwise(ends)]
        self._under_way: dict[tuple[str, int], Execution] = {}
        # Inputs and outputs of all chunks, by pass.
        self._sources: dict[str, Columns] = {}
        self._results: dict[str, Columns] = {}

    def tokens_per_expert(self, chunk: int) -> torch.Tensor:
        """Rows of each local expert in a chunk, on the host."""
        return torch.from_numpy(self._chunks[chunk].bound_chain.rows_per_local_expert)

    def take(self, pass_: Pass, ids: torch.Tensor | None, *columns: torch.Tensor) -> Tensors:
        """Take the source of a pass from tokens to experts: the columns of all tokens."""
        self._sources[pass_.name] = contiguous(*columns)._replace(ids=ids)
        return ()

    def give(self, pass_: Pass) -> Tensors:
        """Give the result of a pass from experts to tokens: the columns of all tokens."""
        # The pass from tokens to experts has read its source.
        self._sources.clear()
        return self._results.pop(pass_.name).tensors()

    def start(self, chunk: int, pass_: Pass, *columns: torch.Tensor) -> Tensors:
        """Start a pass for a chunk, from its tokens or from the `columns` of its experts."""
        exchange, rows = self._chunks[chunk], self._slices[chunk]
        if pass_.transpose:
            given = contiguous(*columns)
            # Allocated before the first of these passes forks.
            if pass_.name not in self._results:
                self._results[pass_.name] = self._empty_like(given)
            output = self._results[pass_.name].of_rows(rows)
            execution = Execution(exchange, pass_, given, output)
            # This pass comes after the experts; the rest of other passes must not.
            for other in self._under_way.values():
                if other.bound.program.policy != "host":
                    other.go_on()
        else:
            execution = Execution(exchange, pass_, self._sources[pass_.name].of_rows(rows))
        execution.start()
        self._under_way[pass_.name, chunk] = execution
        return ()

    def end(self, chunk: int, pass_: Pass) -> Tensors:
        """End a pass for a chunk; returns the experts' columns, while tokens' are in the result."""
        columns = self._under_way.pop((pass_.name, chunk)).finish()
        return () if pass_.transpose else columns.tensors()

    def _empty_like(self, columns: Columns) -> Columns:
        num_tokens, probs = self._slices[-1].stop, columns.probs
        width = self._chunks[0].max_experts_per_token
        return Columns(
            rows=columns.rows.new_empty(num_tokens, columns.rows.shape[1]),
            probs=None if probs is None else probs.new_empty(num_tokens, width),
        )


class _Node(torch.autograd.Function):
    """A step of the pipeline in forward and its mirror image in backward, behind a token."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Callable[..., Tensors],
        back: Callable[..., Tensors],
        token: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> Tensors:
        ctx.back = back
        return torch.empty_like(token), *step(*tensors)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, token: torch.Tensor, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return None, None, token, *ctx.back(*gradients)
