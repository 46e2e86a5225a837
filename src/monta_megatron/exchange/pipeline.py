"""Dispatch, experts and combine of a micro-batch as one pipeline over chunks of its tokens.

Each chunk consists of whole token blocks and is an exchange of its own, with its own passes and
expert rows. In step s

    first pass of chunk s starts | chunk s-1 is computed, its second starts | second of s-2 ends

Forward, the first pass is dispatch and the second one combine; backward, combine's backward and
dispatch's, in the same order over the chunks from the last to the first. `exchange.streams` shows
what waits for what.

The start of a pass and the wait for it are nodes of the autograd graph, created in this order:

    step           forward                    node       backward
    start first    dispatch starts            _Step      dispatch's backward is waited for
    end first      dispatch is waited for     _Arrive    dispatch's backward starts
    experts        run                        theirs     run
    start second   combine starts             _Leave     combine's backward is waited for
    end second     combine is waited for      _Step      combine's backward starts

Each node gets an empty tensor, the token, from the node before it. So backward is the mirror image,
with collectives in the same order on every rank, whichever of its ready nodes the engine runs first
and whatever the experts' graph is. It sums a parameter's gradients over all chunks before its hooks
run, once. Rows are in tensors of all chunks, and each pass reads and writes its slice.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

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
from monta_megatron.exchange.executor import Execution

LayerStep: TypeAlias = Literal[
    "start first", "end first", "start experts", "end experts", "start second", "end second"
]
STEPS: tuple[LayerStep, ...] = get_args(LayerStep)

# (rows [N, H], rows of each local expert, the rows' probabilities [N]) -> their outputs [N, H].
# Experts that compute beside the host have a method `wait`: outputs -> outputs, once complete.
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
    pipeline, wait = _Pipeline(chunks), getattr(experts, "wait", None)
    # It requires a gradient, so backward runs all passes even if the rows do not.
    token = rows_TH.new_empty(0, requires_grad=True)
    token = _Enter.apply(pipeline, rows_TH.contiguous(), probs_TW.contiguous(), ids_TW, token)
    inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    outputs: dict[int, torch.Tensor] = {}
    for step, chunk in pipelined_steps(len(chunks), in_background=wait is not None):
        if step == "start first":
            start = partial(pipeline.send_tokens, DISPATCH)
            token = _Step.apply(start, partial(pipeline.finish, DISPATCH_BACKWARD), chunk, token)
        elif step == "end first":
            *inputs[chunk], token = _Arrive.apply(pipeline, chunk, token)
        elif step == "start experts":
            rows_NH, probs_N = inputs.pop(chunk)
            outputs[chunk] = experts(rows_NH, pipeline.tokens_per_expert(chunk), probs_N)
            del rows_NH, probs_N
        elif step == "end experts" and wait is not None:
            outputs[chunk] = wait(outputs[chunk])
        elif step == "start second":
            token = _Leave.apply(pipeline, chunk, outputs.pop(chunk), token)
        elif step == "end second":
            end = partial(pipeline.finish, COMBINE)
            token = _Step.apply(end, partial(pipeline.send_tokens, COMBINE_BACKWARD), chunk, token)
    return _Exit.apply(pipeline, token)


def pipelined_steps(num_chunks: int, in_background: bool = False) -> list[tuple[LayerStep, int]]:
    """(step, chunk) in the order of issue; backward mirrors it.

    Args:
        num_chunks: C.
        in_background: the experts compute asynchronously to the host, which would block on them if
            it continued with the same chunk.
    """
    offsets = (0, 1, 1, 2, 2, 3) if in_background else (0, 1, 1, 1, 1, 2)
    return [(STEPS[at], chunk) for at, chunk in order_of_issue(offsets, num_chunks)]


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
        self.sources: dict[str, Columns] = {}
        self._results: dict[str, Columns] = {}

    def tokens_per_expert(self, chunk: int) -> torch.Tensor:
        """Rows of each local expert in a chunk, on the host."""
        return torch.from_numpy(self._chunks[chunk].bound_chain.rows_per_local_expert)

    def send_tokens(self, pass_: Pass, chunk: int) -> None:
        """Start a pass from tokens to experts: of a chunk's tokens in the pass's source."""
        columns = self.sources[pass_.name].of_rows(self._slices[chunk])
        self._start(pass_, chunk, Execution(self._chunks[chunk], pass_, columns))

    def return_rows(self, pass_: Pass, chunk: int, columns: Columns) -> None:
        """Start a pass from experts to tokens: of a chunk's expert rows into the pass's result."""
        # Allocated before the first of these passes forks.
        if pass_.name not in self._results:
            self._results[pass_.name] = self._empty_like(columns)
        output = self._results[pass_.name].of_rows(self._slices[chunk])
        execution = Execution(self._chunks[chunk], pass_, columns, output)
        # This pass comes after the experts; the rest of other passes must not.
        for other in self._under_way.values():
            if other.bound.program.policy != "host":
                other.go_on()
        self._start(pass_, chunk, execution)

    def _start(self, pass_: Pass, chunk: int, execution: Execution) -> None:
        execution.start()
        self._under_way[pass_.name, chunk] = execution

    def finish(self, pass_: Pass, chunk: int) -> Columns:
        """End a pass for a chunk."""
        return self._under_way.pop((pass_.name, chunk)).finish()

    def result(self, pass_: Pass) -> Columns:
        """Output of a pass for all chunks."""
        return self._results.pop(pass_.name)

    def _empty_like(self, columns: Columns) -> Columns:
        num_tokens, probs = self._slices[-1].stop, columns.probs
        width = self._chunks[0].max_experts_per_token
        return Columns(
            rows=columns.rows.new_empty(num_tokens, columns.rows.shape[1]),
            probs=None if probs is None else probs.new_empty(num_tokens, width),
        )


class _Enter(torch.autograd.Function):
    """Entry of the pipeline: it takes the tensors of all tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        pipeline: _Pipeline,
        rows: torch.Tensor,
        probs: torch.Tensor,
        ids: torch.Tensor,
        token: torch.Tensor,
    ) -> torch.Tensor:
        ctx.pipeline = pipeline
        pipeline.sources[DISPATCH.name] = Columns(rows=rows, probs=probs, ids=ids)
        return torch.empty_like(token)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, _: torch.Tensor
    ) -> tuple[None, torch.Tensor, torch.Tensor | None, None, None]:
        ctx.pipeline.sources.clear()
        gradients = ctx.pipeline.result(DISPATCH_BACKWARD)
        return None, gradients.rows, gradients.probs, None, None


class _Step(torch.autograd.Function):
    """A step of a chunk without tensors of its own, and its step in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Callable[[int], object],
        back: Callable[[int], object],
        chunk: int,
        token: torch.Tensor,
    ) -> torch.Tensor:
        ctx.back, ctx.chunk = back, chunk
        step(chunk)
        return torch.empty_like(token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:
        ctx.back(ctx.chunk)
        return None, None, None, token


class _Arrive(torch.autograd.Function):
    """Dispatch of a chunk ends; its backward starts."""

    @staticmethod
    def forward(
        ctx: Any, pipeline: _Pipeline, chunk: int, token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        ctx.pipeline, ctx.chunk = pipeline, chunk
        columns = pipeline.finish(DISPATCH, chunk)
        return columns.rows, columns.probs, torch.empty_like(token)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, rows_NH: torch.Tensor, probs_N: torch.Tensor, token: torch.Tensor
    ) -> tuple[None, None, torch.Tensor]:
        columns = Columns(rows=rows_NH.contiguous(), probs=probs_N.contiguous())
        ctx.pipeline.return_rows(DISPATCH_BACKWARD, ctx.chunk, columns)
        return None, None, token


class _Leave(torch.autograd.Function):
    """Combine of a chunk starts; its backward ends."""

    @staticmethod
    def forward(
        ctx: Any, pipeline: _Pipeline, chunk: int, rows_NH: torch.Tensor, token: torch.Tensor
    ) -> torch.Tensor:
        ctx.pipeline, ctx.chunk = pipeline, chunk
        pipeline.return_rows(COMBINE, chunk, Columns(rows=rows_NH.contiguous()))
        return torch.empty_like(token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: torch.Tensor) -> tuple[None, None, torch.Tensor, torch.Tensor]:
        return None, None, ctx.pipeline.finish(COMBINE_BACKWARD, ctx.chunk).rows, token


class _Exit(torch.autograd.Function):
    """Exit of the pipeline: it returns the result of all tokens."""

    @staticmethod
    def forward(ctx: Any, pipeline: _Pipeline, token: torch.Tensor) -> torch.Tensor:
        ctx.pipeline = pipeline
        # Dispatch has read them.
        pipeline.sources.clear()
        return pipeline.result(COMBINE).rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows_TH: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.pipeline.sources[COMBINE_BACKWARD.name] = Columns(rows=rows_TH.contiguous())
        return None, rows_TH.new_empty(0)
