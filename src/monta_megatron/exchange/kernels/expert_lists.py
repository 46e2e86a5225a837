"""Experts of each token and their probabilities as compact lists, and the gradient.

    position of expert e = routed experts of the token before e
    ids[t, position]     = e, padded with E
    lists[t, position]   = probs[t, e], padded with 0
    gradient of probs[t, e] = gradient of lists[t, position], 0 where e is not routed

Bytes: the map is read once, each list and each routed probability read and written once.
Grid: [T / tokens of a tile], in both directions.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from monta_megatron.exchange.kernels.tiles import LIST, Launch, kernel

# Tokens of a tile, and tokens times experts: 8 for each thread.
MOST_TOKENS, TILE = 32, 1024


def make_lists(
    routing_map_TE: torch.Tensor, probs_TE: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and result as of `exchange.rows.make_lists`."""
    num_tokens, num_experts = routing_map_TE.shape
    lists_TW = probs_TE.new_empty(num_tokens, width)
    ids_TW = torch.empty(num_tokens, width, dtype=torch.int32, device=probs_TE.device)
    strides = routing_map_TE.stride(0), probs_TE.stride(0)
    launch = _launch(_list, probs_TE.device, probs_TE.dtype, num_experts, width, *strides)
    launch(num_tokens, routing_map_TE, probs_TE, lists_TW, ids_TW, num_tokens)
    return lists_TW, ids_TW


def bring_back(routing_map_TE: torch.Tensor, gradient_TW: torch.Tensor) -> torch.Tensor:
    """Arguments and result as of `exchange.rows.bring_back`."""
    num_tokens, num_experts = routing_map_TE.shape
    gradient_TW = gradient_TW.contiguous()
    into_TE = gradient_TW.new_empty(num_tokens, num_experts)
    shared = num_experts, gradient_TW.shape[1], routing_map_TE.stride(0)
    launch = _launch(_unlist, into_TE.device, into_TE.dtype, *shared)
    launch(num_tokens, routing_map_TE, gradient_TW, into_TE, num_tokens)
    return into_TE


@cache
def _launch(
    function: Any, device: torch.device, dtype: torch.dtype, num_experts: int, *shared: int
) -> Launch:
    """The launch for these sizes, dtype and device."""
    all_experts = triton.next_power_of_2(num_experts)
    tokens = max(1, min(MOST_TOKENS, TILE // all_experts))
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
