"""What ranks count and send each other, and what each of them reads of it."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from counted_routing import CountedRouting

from monta_megatron.chains import CHAINS, Counts, TokenCounts
from monta_megatron.chains.chain import COUNT_BYTES, MOST_TOKENS, NUM_BLOCKS, num_counted_blocks
from monta_megatron.core import Layout
from monta_megatron.exchange.count_messages import CountMessages, MicroBatchCounts

NAMES = [*CHAINS, "auto"]
# (EP, ETP, ranks per node)
SHAPES = [(4, 1, 2), (4, 1, 4), (4, 1, 1), (6, 1, 3), (4, 2, 4), (2, 2, 2), (1, 2, 2), (1, 1, 1)]
FOR_ETP_1 = ("alltoall_dedup", "hierarchical_alltoall")


def table_of(
    name: str, shape: tuple[int, int, int], rank: int, num_local_experts: int, num_blocks: int
) -> CountMessages:
    ep, etp, ranks_per_node = shape
    nodes = tuple(other // ranks_per_node for other in range(ep * etp))
    layout = Layout(ep=ep, etp=etp, num_local_experts=num_local_experts, rank=rank, nodes=nodes)
    chains = CHAINS.values() if name == "auto" else [CHAINS[name]]
    chains = tuple(chain for chain in chains if chain.incompatibility(layout) is None)
    blocks = num_counted_blocks(chains, num_blocks)
    return CountMessages(chains=chains, layout=layout, num_blocks=blocks)


def exchange(tables: list[CountMessages], maps: list[torch.Tensor]) -> list[MicroBatchCounts]:
    """What every rank reads; rank r says 2**62 + r, and that it got 3 r rows."""
    counted = [
        table.count(routing_map, 2**62 + rank, 3 * rank)
        for rank, (table, routing_map) in enumerate(zip(tables, maps, strict=True))
    ]
    for rank, (_, joined) in enumerate(counted):
        received = torch.stack([to[rank] for to, _ in counted]).flatten()
        joined[: len(received)] = received
    return [table.read(each.numpy()) for table, (_, each) in zip(tables, counted, strict=True)]


def test_messages_by_hand() -> None:
    """4 ranks on 2 nodes, an expert each, 3 tokens in 2 blocks.

    block 0:  token 0 to experts 0 and 1, token 1 to expert 3     block 1:  token 2 to 2 and 3
    """
    table = table_of("hierarchical_alltoall", (4, 1, 2), 0, 1, 2)
    routing_map = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1]], dtype=torch.bool)
    messages, _ = table.count(routing_map, 5 + (7 << 32), 11)
    header = [3, 11, 2, 5, 7]
    # After it: to its expert, to its node, to the two ranks of its node.
    by_hand = [
        [[*header, 1, 1, 1, 1], [*header, 0, 0, 0, 0]],
        [[*header, 1, 1, 1, 1], [*header, 0, 0, 0, 0]],
        [[*header, 0, 1, 0, 1], [*header, 1, 1, 1, 1]],
        [[*header, 1, 1, 0, 1], [*header, 1, 1, 1, 1]],
    ]
    assert torch.equal(messages, torch.tensor(by_hand, dtype=torch.int32))


@pytest.mark.parametrize("num_blocks", [1, 3, 8])
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in NAMES for shape in SHAPES if shape[1] == 1 or name not in FOR_ETP_1],
)
def test_every_rank_reads_what_a_recorded_routing_counts(
    name: str, shape: tuple[int, int, int], num_blocks: int
) -> None:
    """Some ranks have no tokens, or fewer than blocks."""
    num_ranks = shape[0] * shape[1]
    tables = [table_of(name, shape, rank, 2, num_blocks) for rank in range(num_ranks)]
    generator = torch.Generator().manual_seed(num_blocks)
    lengths = [(12, 0, 5, 1, 40, 8)[rank % 6] for rank in range(num_ranks)]
    maps = [
        torch.rand(length, tables[0].layout.num_experts, generator=generator) < 0.3
        for length in lengths
    ]
    routing = CountedRouting(routing_maps=tuple(each.numpy() for each in maps))
    for table, counts in zip(tables, exchange(tables, maps), strict=True):
        assert counts.num_tokens.tolist() == lengths
        assert counts.tags.tolist() == [2**62 + rank for rank in range(num_ranks)]
        assert counts.received_rows.tolist() == [3 * rank for rank in range(num_ranks)]
        expected = routing.max_experts_per_token if table.by_block else 0
        assert counts.max_experts_per_token == expected
        for chain in table.chains:
            check_counts(
                counts.permuted_tokens if chain.rows == "permuted tokens" else counts.tokens,
                routing.counts(chain, table.layout, 0, table.num_blocks),
            )


def check_counts(counts: Counts | TokenCounts | None, expected: Counts | TokenCounts) -> None:
    """Those that the chain needs; for other candidates there may be more."""
    assert type(counts) is type(expected)
    for field in fields(expected):
        value = getattr(expected, field.name)
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(counts, field.name), value, field.name)


@pytest.mark.parametrize("name", NAMES)
def test_what_512_ranks_send_a_rank_is_half_a_megabyte_at_most(name: str) -> None:
    """512 experts, 8 ranks on a node, as many blocks as `auto` counts.

    By hand for `auto`: a header of 4, an expert, a node and its 8 ranks, in 8 blocks, 4 bytes each.
    """
    table = table_of(name, (512, 1, 8), 300, 1, NUM_BLOCKS)
    messages, joined = table.count(torch.zeros(4, 512, dtype=torch.bool))
    assert joined.dtype == torch.int32
    # As large as what it sends.
    assert messages.nbytes <= 500_000
    if name == "auto":
        assert messages.nbytes == 512 * 8 * (5 + 1 + 1 + 8) * COUNT_BYTES == 245_760


def test_sums_of_ranks_are_above_what_one_can_count() -> None:
    table = table_of("alltoall", (2, 1, 1), 0, 1, 1)
    # Two messages, a header and two experts.
    most = torch.full((2 * (5 + 1) + 5 + 2,), MOST_TOKENS, dtype=torch.int32)
    counts = table.read(most.numpy())
    assert counts.permuted_tokens.received.sum() == 2 * MOST_TOKENS
    assert counts.permuted_tokens.sent.sum() == 2 * MOST_TOKENS
