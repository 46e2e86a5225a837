"""One rank of a world, in one process: its groups, what all ranks count, and its exchange.

The groups are torch's fake ones, whose collectives move nothing. Ranks differ in their tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

import torch
import torch.distributed as dist

from monta_megatron.chains import Chain, ChainCounts, TokenCounts
from monta_megatron.chains.chain import num_counted_blocks
from monta_megatron.chains.stages import Parts
from monta_megatron.core import FLAT_GROUPS, GroupName, Layout
from monta_megatron.exchange.buffers import MessageFormat
from monta_megatron.exchange.collectives import PeerGroup
from monta_megatron.exchange.count_messages import CountMessages
from monta_megatron.exchange.exchange import Exchange
from monta_megatron.exchange.monitor import Monitor
from monta_megatron.exchange.pipeline import blocks_of_chunks
from monta_megatron.exchange.rows import Copies

NUM_TOKENS = 48
TOPK = 8
RANKS_PER_NODE = 8
# On the second node, at neither of its ends; with ETP 2, the second rank of its experts.
RANK = 13
# (EP, ETP) -> this rank's place.
LAYOUTS = {
    (ep, etp): Layout(
        ep=ep,
        etp=etp,
        num_local_experts=4,
        rank=RANK,
        nodes=tuple(rank // RANKS_PER_NODE for rank in range(ep * etp)),
    )
    for ep in (16, 64)
    for etp in (1, 2)
}

_made: dict[tuple[int, ...], dist.ProcessGroup] = {}


@contextmanager
def fake_world() -> Iterator[None]:
    """Context in which this process is one of as many ranks as the largest layout has."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world_size = max(len(layout.nodes) for layout in LAYOUTS.values())
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _made.clear()


def megatron_groups(layout: Layout) -> dict[str, dist.ProcessGroup]:
    """The groups that Megatron makes."""
    groups: dict[str, dist.ProcessGroup] = {}
    for name in FLAT_GROUPS:
        ranks = tuple(layout.members(name, layout.rank))
        if ranks not in _made:
            _made[ranks] = dist.new_group(list(ranks))
        groups[name] = _made[ranks]
    return groups


def routing_map(num_tokens: int, num_experts: int, padded: bool = False) -> torch.Tensor:
    """[T, E] bool; padded as Megatron does for quantization: experts take multiples of 16 tokens.

    The first tokens that an expert has not got fill it up, so theirs are the longest lists.
    """
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = torch.rand(num_tokens, num_experts, generator=generator).topk(TOPK, dim=1).indices
    routed = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(1, chosen, True)
    if padded:
        missing = -routed.sum(dim=0) % 16
        routed |= (~routed).cumsum(dim=0) <= missing
    return routed


def routing_maps(layout: Layout, padded: bool = False) -> list[torch.Tensor]:
    """The maps of three ranks, which have different numbers of tokens; see `joined_counts`."""
    return [routing_map(NUM_TOKENS - less, layout.num_experts, padded) for less in range(3)]


def exchanged_counts(count_messages: CountMessages) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank copies of the counts of all ranks, and its own map."""
    layout = count_messages.layout
    maps = routing_maps(layout)
    return joined_counts(count_messages, maps), maps[layout.rank % 3]


def joined_counts(count_messages: CountMessages, maps: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the exchange of counts brings a rank.

    Args:
        count_messages: of the rank.
        maps: [T, E] bool of the ranks, which have them in turn.
    """
    layout = count_messages.layout
    counted = [count_messages.count(each) for each in maps]
    received = [counted[rank % len(maps)][0][layout.rank] for rank in range(len(layout.nodes))]
    _, joined_J = counted[layout.rank % len(maps)]
    messages = torch.stack(received).flatten()
    joined_J[: len(messages)] = messages
    return joined_J


def bound_exchange(
    chain: Chain,
    layout: Layout,
    maps: Sequence[torch.Tensor],
    num_chunks: int,
    num_blocks: int,
    **settings: Any,
) -> tuple[Exchange, ChainCounts]:
    """A rank's exchange of a micro-batch, as the dispatcher makes it, and the counts in it.

    Args:
        chain: the chain.
        layout: the rank's place.
        maps: as `joined_counts` has them.
        num_chunks: 1 is meant where the chain is serial.
        num_blocks: that tokens are counted in.
        settings: of the exchange; groups that are not there unless given.
    """
    blocks = num_counted_blocks((chain,), num_blocks)
    count_messages = CountMessages(chains=(chain,), layout=layout, num_blocks=blocks)
    exchanged = count_messages.read(joined_counts(count_messages, maps).numpy())
    counts: Any = exchanged.tokens if chain.rows == "tokens" else exchanged.permuted_tokens
    fields = {"groups": groups_of(layout), "sum_dtype": torch.float32, "monitor": Monitor()}
    exchange = Exchange(
        bound_chain=chain.bind(layout, counts, 1 if chain.serial else num_chunks),
        max_experts_per_token=exchanged.max_experts_per_token,
        **{**fields, **settings},
    )
    return exchange, counts


def chunks_of(exchange: Exchange, counts: TokenCounts, num_chunks: int) -> list[Exchange]:
    """An exchange of each chunk, for experts in the pipeline."""
    bound, num_blocks = exchange.bound_chain, counts.tokens.shape[1]
    return [
        replace(
            exchange,
            bound_chain=bound.chain.bind(bound.layout, counts.of_blocks(*blocks), 1),
        )
        for blocks in blocks_of_chunks(num_blocks, num_chunks)
    ]


def format_of(tensors: Sequence[torch.Tensor], packed: bool) -> MessageFormat:
    """The format of `tensors`; a single column is never packed."""
    return MessageFormat(
        shapes=tuple(tuple(tensor.shape[1:]) for tensor in tensors),
        dtypes=tuple(tensor.dtype for tensor in tensors),
        packed=packed and len(tensors) > 1,
        device=tensors[0].device,
    )


def empty_copies(
    num_rows: int, num_copies: int, parts: Parts, device: torch.device | None = None
) -> Copies:
    """Uninitialised copies of one chunk."""
    sizes = Copies.sizes(num_rows, num_copies, parts)
    return Copies(*torch.empty(sum(sizes), dtype=torch.int64, device=device).split(sizes))


def groups_of(layout: Layout) -> dict[str, PeerGroup]:
    """Every group that a chain may name, seen from the layout's rank; without process groups."""
    members = {name: layout.members(name, layout.rank) for name in get_args(GroupName)}
    return {
        name: PeerGroup(
            name=name,
            process_group=None,
            size=len(ranks),
            rank=ranks.index(layout.rank),
            nodes=tuple(layout.nodes[member] for member in ranks),
        )
        for name, ranks in members.items()
    }
