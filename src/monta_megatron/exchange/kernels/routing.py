"""Read a routing map: counts by token block, lists of experts and probabilities, the gradient.

Counts, of pairs of each expert and of tokens of each part of the experts:

    experts[b, e]   = tokens of block b with expert e
    parts[b, p]     = tokens of block b with an expert in part p, for two kinds of nested parts
    most experts    = of any token

The first launch counts runs of tokens, each inside one block, the second sums the runs of a block.
A tile is [tokens, outer parts, inner parts, experts of an inner part].

Lists, and the gradient of the probabilities from that of their lists:

    position of expert e = routed experts of the token before e
    ids[t, position]     = e, padded with E
    lists[t, position]   = probs[t, e], padded with 0
    gradient of probs[t, e] = gradient of lists[t, position], 0 where e is not routed

Bytes: the map is read once; each count of a run takes 8, written and read; each list and each
routed probability is read and written once.
Grid: [R], then [B, X / COLUMNS]; of lists [T / tokens of a tile], in both directions.
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from monta_megatron.exchange.kernels.tiles import LIST, Launch, blocks_of, kernel

# Values of a tile of counts: 4 for each thread.
COUNT_TILE = 512
# Fewest tokens of a run, so that its counts are small next to the map, and about the most runs if
# there are many tokens.
RUN, MOST_RUNS = 128, 256
COLUMNS = 256
RUNS = tl.constexpr(8)
# Tokens of a tile of lists, and tokens times experts: 8 for each thread.
MOST_TOKENS, LIST_TILE = 32, 1024


def count_routing(
    routing_map_TE: torch.Tensor, num_blocks: int, num_parts: dict[str, int], with_most: bool
) -> dict[str, torch.Tensor]:
    """Count by token block; arguments and result as of `count_messages.count_routing`."""
    num_tokens, num_experts = routing_map_TE.shape
    inner = max(num_parts.values(), default=1)
    outer = min(num_parts.values(), default=1)
    # As `count_messages.block_size`.
    size = blocks_of(num_tokens, num_blocks)
    count, add, tokens = _count_launches(
        routing_map_TE.device, num_experts, outer, inner, routing_map_TE.stride(0)
    )
    tiles = blocks_of(max(RUN, blocks_of(num_tokens, MOST_RUNS)), tokens)
    runs_per_block = blocks_of(size, tiles * tokens)
    num_counts = num_experts + outer + inner + 1

    runs_RX = routing_map_TE.new_empty(num_blocks * runs_per_block, num_counts, dtype=torch.int32)
    counts = routing_map_TE.new_empty(num_blocks * (num_counts - 1) + 1, dtype=torch.int32)
    experts, by_outer, by_inner, most = counts.split(
        [num_blocks * num_experts, num_blocks * outer, num_blocks * inner, 1]
    )
    count(len(runs_RX), routing_map_TE, runs_RX, num_tokens, size, runs_per_block, tiles)
    add(num_blocks, runs_RX, counts, num_blocks, runs_per_block)
    by_size = {outer: by_outer, inner: by_inner}
    result = {"experts": experts.view(num_blocks, -1)}
    if with_most:
        result["most experts"] = most
    for name, number in num_parts.items():
        result[name] = by_size[number].view(num_blocks, -1)
    return result


@cache
def _count_launches(
    device: torch.device, num_experts: int, outer: int, inner: int, stride: int
) -> tuple[Launch, Launch, int]:
    """Both launches for maps of this stride and device, and the tokens of a tile."""
    in_outer, size = inner // outer, num_experts // inner
    shape = [triton.next_power_of_2(n) for n in (outer, in_outer, size)]
    tokens = max(1, COUNT_TILE // math.prod(shape))
    num_columns = blocks_of(num_experts + outer + inner + 1, COLUMNS)
    return (
        Launch(_count_runs, 1, 1, stride, outer, in_outer, size, tokens, *shape),
        Launch(_add_runs, 1, num_columns, num_experts, outer, inner, COLUMNS),
        tokens,
    )


@kernel()
def _count_runs(
    routing_map: tl.tensor,
    runs: tl.tensor,
    num_tokens: tl.int32,
    block_size: tl.int32,
    runs_per_block: tl.int32,
    tiles: tl.int32,
    stride: tl.int32,
    outer: tl.int32,
    inner: tl.int32,
    size: tl.int32,
    TOKENS: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    run = tl.program_id(0)
    block = run // runs_per_block
    end = tl.minimum((block + 1) * block_size, num_tokens)
    # [OUTER, INNER, SIZE] and its first axes
    o = tl.arange(0, OUTER)
    i = tl.arange(0, INNER)
    e = tl.arange(0, SIZE)
    part = o[:, None] * inner + i[None, :]
    is_part = (o < outer)[:, None] & (i < inner)[None, :]
    expert = part[:, :, None] * size + e[None, None, :]
    is_expert = is_part[:, :, None] & (e < size)[None, None, :]

    by_expert = tl.zeros([OUTER, INNER, SIZE], tl.int32)
    by_inner = tl.zeros([OUTER, INNER], tl.int32)
    by_outer = tl.zeros([OUTER], tl.int32)
    most = 0
    first = block * block_size + (run % runs_per_block) * tiles * TOKENS
    for tile in range(tiles):
        token = first + tile * TOKENS + tl.arange(0, TOKENS)
        at = token.to(tl.int64)[:, None, None, None] * stride + expert[None, :, :, :]
        mask = (token < end)[:, None, None, None] & is_expert[None, :, :, :]
        routed = tl.load(routing_map + at, mask, other=0).to(tl.int32)
        by_expert += tl.sum(routed, 0)
        in_inner = tl.sum(routed, 3)
        by_inner += tl.sum((in_inner > 0).to(tl.int32), 0)
        in_outer = tl.sum(in_inner, 2)
        by_outer += tl.sum((in_outer > 0).to(tl.int32), 0)
        most = tl.maximum(most, tl.max(tl.sum(in_outer, 1), 0))

    num_inner = outer * inner
    num_experts = num_inner * size
    counts = runs + run.to(tl.int64) * (num_experts + outer + num_inner + 1)
    tl.store(counts + expert, by_expert, is_expert)
    tl.store(counts + num_experts + o, by_outer, o < outer)
    tl.store(counts + num_experts + outer + part, by_inner, is_part)
    tl.store(counts + num_experts + outer + num_inner, most)


@kernel()
def _add_runs(
    runs: tl.tensor,
    counts: tl.tensor,
    num_blocks: tl.int32,
    runs_per_block: tl.int32,
    num_experts: tl.int32,
    outer: tl.int32,
    inner: tl.int32,
    COLUMNS: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    num_sums = num_experts + outer + inner
    total = tl.zeros([COLUMNS], tl.int32)
    for run in range(block * runs_per_block, (block + 1) * runs_per_block):
        at = run * (num_sums + 1).to(tl.int64) + column
        total += tl.load(runs + at, column < num_sums, other=0)
    # Counts are ordered by kind, then by block.
    first = tl.where(column < num_experts, 0, num_experts)
    width = tl.where(column < num_experts, num_experts, outer)
    first = tl.where(column < num_experts + outer, first, num_experts + outer)
    width = tl.where(column < num_experts + outer, width, inner)
    tl.store(counts + first * num_blocks + block * width + column - first, total, column < num_sums)

    if block == 0 and tl.program_id(1) == 0:
        num_runs = num_blocks * runs_per_block
        most = tl.zeros([RUNS], tl.int32)
        for begin in range(0, num_runs, RUNS):
            other = begin + tl.arange(0, RUNS)
            last = other.to(tl.int64) * (num_sums + 1) + num_sums
            most = tl.maximum(most, tl.load(runs + last, other < num_runs, other=0))
        tl.store(counts + num_blocks * num_sums, tl.max(most, 0))


def make_lists(
    routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as of `exchange.rows.make_lists`."""
    num_tokens, num_experts = routing_map_TE.shape
    lists_TW = probs_TE.new_empty(num_tokens, width)
    ids_TW = torch.empty(num_tokens, width, dtype=torch.int32, device=probs_TE.device)
    strides = routing_map_TE.stride(0), probs_TE.stride(0)
    launch = _list_launch(_list, probs_TE.device, probs_TE.dtype, num_experts, width, *strides)
    launch(num_tokens, routing_map_TE, probs_TE, lists_TW, ids_TW, num_tokens)
    return lists_TW, ids_TW


def lists_backward(routing_map_TE: torch.Tensor, gradient_TW: torch.Tensor) -> torch.Tensor:
    """Arguments and result as of `exchange.rows.lists_backward`."""
    num_tokens, num_experts = routing_map_TE.shape
    gradient_TW = gradient_TW.contiguous()
    into_TE = gradient_TW.new_empty(num_tokens, num_experts)
    shared = num_experts, gradient_TW.shape[1], routing_map_TE.stride(0)
    launch = _list_launch(_unlist, into_TE.device, into_TE.dtype, *shared)
    launch(num_tokens, routing_map_TE, gradient_TW, into_TE, num_tokens)
    return into_TE


@cache
def _list_launch(
    function: Any, device: torch.device, dtype: torch.dtype, num_experts: int, *shared: int
) -> Launch:
    """The launch for these sizes, dtype and device."""
    all_experts = triton.next_power_of_2(num_experts)
    tokens = max(1, min(MOST_TOKENS, LIST_TILE // all_experts))
    return Launch(function, tokens, 1, num_experts, *shared, tokens, all_experts)


@triton.jit
def _tile_of(
    routing_map: tl.tensor,
    num_tokens: tl.int32,
    num_experts: tl.int32,
    map_stride: tl.int32,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    is_there = (token < num_tokens) & (expert < num_experts)
    routed = tl.load(routing_map + token * map_stride + expert, is_there, other=0).to(tl.int32)
    return token, expert, routed, tl.cumsum(routed, 1) - routed


@kernel()
def _list(
    routing_map: tl.tensor,
    probs: tl.tensor,
    lists: tl.tensor,
    ids: tl.tensor,
    num_tokens: tl.int32,
    num_experts: tl.int32,
    width: tl.int32,
    map_stride: tl.int32,
    probs_stride: tl.int32,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    token, expert, routed, position = _tile_of(
        routing_map, num_tokens, num_experts, map_stride, TOKENS, EXPERTS
    )
    is_listed = (routed > 0) & (position < width)
    prob = tl.load(probs + token * probs_stride + expert, is_listed)
    tl.store(lists + token * width + position, prob, is_listed)
    tl.store(ids + token * width + position, expert + tl.zeros_like(position), is_listed)
    num_routed = tl.sum(routed, 1)[:, None]
    for begin in range(0, width, LIST):
        slot = begin + tl.arange(0, LIST)[None, :]
        is_padding = (token < num_tokens) & (slot >= num_routed) & (slot < width)
        padding = tl.zeros([TOKENS, LIST], tl.int32)
        tl.store(lists + token * width + slot, padding.to(lists.dtype.element_ty), is_padding)
        tl.store(ids + token * width + slot, padding + num_experts, is_padding)


@kernel()
def _unlist(
    routing_map: tl.tensor,
    gradient: tl.tensor,
    into: tl.tensor,
    num_tokens: tl.int32,
    num_experts: tl.int32,
    width: tl.int32,
    map_stride: tl.int32,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
) -> None:
    token, expert, routed, position = _tile_of(
        routing_map, num_tokens, num_experts, map_stride, TOKENS, EXPERTS
    )
    is_listed = (routed > 0) & (position < width)
    value = tl.load(gradient + token * width + position, is_listed, other=0)
    is_there = (token < num_tokens) & (expert < num_experts)
    tl.store(into + token * num_experts + expert, value, is_there)
