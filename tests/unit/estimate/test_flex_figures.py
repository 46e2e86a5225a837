"""What the flex backends' figures count, by hand."""

import pytest
from toy import assumed, toy_cluster

from monta_megatron.planner.flex import FlexExchange, flex_pass_us
from monta_megatron.planner.routing.expected import UniformRouting

# 8 experts on 8 ranks of 2 nodes, and a token for every expert: 2 nodes, 8 ranks.
ALL = UniformRouting(num_experts=8, topk=8)
EXCHANGE = FlexExchange(routing=ALL, tokens_per_rank=100, row_bytes=1000, ep=8, ranks_per_node=4)


def test_the_local_node_counts_but_crosses_no_interface() -> None:
    assert EXCHANGE.rows_to_nodes == 200 and EXCHANGE.rows_to_ranks == 800
    assert EXCHANGE.printed_bytes == 2e5
    constants = assumed(deepep_efficiency=0.5, deepep_serial=0.25)
    # 1e5 bytes through 1e4 per us; 8e5 x 3/4 through 1e5 per us; both at half of the rate.
    network, link = 20, 12
    took = flex_pass_us(EXCHANGE, toy_cluster(), "deepep", constants)
    assert took == pytest.approx(network + 0.25 * link)


def test_inside_one_node() -> None:
    one = FlexExchange(
        routing=UniformRouting(num_experts=4, topk=4),
        tokens_per_rank=100,
        row_bytes=1000,
        ep=4,
        ranks_per_node=4,
    )
    assert one.printed_bytes == 4e5
    constants = assumed(hybridep_efficiency=1, hybridep_serial=1)
    assert flex_pass_us(one, toy_cluster(), "hybridep", constants) == pytest.approx(3)


def test_every_rank_of_an_expert_gets_its_tokens() -> None:
    """2 experts of 4 ranks each, a node for each: a token for one goes to 4 ranks of one node."""
    split = FlexExchange(
        routing=UniformRouting(num_experts=2, topk=1),
        tokens_per_rank=100,
        row_bytes=1000,
        ep=2,
        etp=4,
        ranks_per_node=4,
    )
    assert (split.rows_to_nodes, split.rows_to_ranks) == (100, 400)
    # One expert on 2 nodes.
    wide = FlexExchange(
        routing=UniformRouting(num_experts=1, topk=1),
        tokens_per_rank=100,
        row_bytes=1000,
        ep=1,
        etp=8,
        ranks_per_node=4,
    )
    assert (wide.rows_to_nodes, wide.rows_to_ranks) == (200, 800)
