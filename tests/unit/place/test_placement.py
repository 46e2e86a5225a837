"""Placement of experts: planted clusters, load, groups of a router."""

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from planted import planted_routing

from monta_megatron.planner.routing import UniformRouting
from monta_megatron.tools.placement import (
    busiest_load,
    copies_per_token,
    place_experts,
)

# Experts, ranks, nodes; two-level and flat.
EXCHANGES = [(64, 4, 1), (64, 4, 4), (64, 8, 2), (128, 16, 4), (256, 32, 4)]


@pytest.mark.parametrize("strength", [1.5, 3.0, 5.0])
@pytest.mark.parametrize(("num_experts", "num_ranks", "num_nodes"), EXCHANGES)
def test_planted_clusters_are_found(
    num_experts: int, num_ranks: int, num_nodes: int, strength: float
) -> None:
    """Within 2% of the placement that the tokens were made from.

    So many tokens that the planted placement itself keeps to the load.
    """
    routing_TE, planted = planted_routing(num_experts, num_ranks, num_nodes, 16384, strength, 0)
    assert busiest_load(routing_TE[:, planted], num_ranks) <= 1.1
    order = place_experts(routing_TE, num_nodes, num_ranks)
    assert sorted(order) == list(range(num_experts))
    for num_parts in (num_ranks, num_nodes):
        best = copies_per_token(routing_TE[:, planted], num_parts)
        assert copies_per_token(routing_TE[:, order], num_parts) <= 1.02 * best
    today = busiest_load(routing_TE, num_ranks)
    assert busiest_load(routing_TE[:, order], num_ranks) <= max(1.1, today)


def test_nodes_come_before_ranks() -> None:
    """Experts 0, 2, 4, 6 share tokens in pairs: they fill a node, each pair a rank of it."""
    pairs = [[0, 4], [2, 6], [1, 5], [3, 7]] * 8 + [[0, 2], [4, 6], [1, 3], [5, 7]]
    routing_TE = np.zeros((len(pairs), 8), dtype=np.bool_)
    np.put_along_axis(routing_TE, np.array(pairs), True, axis=1)
    order = place_experts(routing_TE, num_nodes=2, num_ranks=4)
    parts = order.reshape(4, 2).tolist()
    assert sorted(parts) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sorted(parts[0] + parts[1]) in ([0, 2, 4, 6], [1, 3, 5, 7])


def test_nothing_moves_where_nothing_is_saved() -> None:
    routing_TE = np.ones((16, 8), dtype=np.bool_)
    assert place_experts(routing_TE, 2, 4).tolist() == list(range(8))


def test_load_is_a_constraint() -> None:
    """Of four experts that collaborate three are hot: together they would be too much."""
    generator = np.random.default_rng(0)
    hot = np.zeros((600, 8), dtype=np.bool_)
    hot[:, ::2] = generator.random((600, 4)) < [0.9, 0.9, 0.9, 0.1]
    hot[:, 1::2] = generator.random((600, 4)) < 0.35
    today = busiest_load(hot, 2)
    free, bound = (place_experts(hot, 1, 2, max_load=load) for load in (9.0, 1.0))
    assert busiest_load(hot[:, free], 2) > today >= busiest_load(hot[:, bound], 2)
    assert copies_per_token(hot[:, bound], 2) >= copies_per_token(hot[:, free], 2)


@pytest.mark.parametrize(
    ("num_groups", "num_nodes", "num_ranks"), [(8, 2, 4), (4, 4, 16), (2, 4, 8)]
)
def test_groups_of_the_router_stay_together(
    num_groups: int, num_nodes: int, num_ranks: int
) -> None:
    routing_TE, _ = planted_routing(64, num_ranks, num_nodes, 2048, 2.0, 1)
    order = place_experts(routing_TE, num_nodes, num_ranks, num_groups, max_load=1.5)
    groups = order.reshape(num_groups, -1) // (64 // num_groups)
    assert (groups == groups[:, :1]).all()
    assert copies_per_token(routing_TE[:, order], num_ranks) < copies_per_token(
        routing_TE, num_ranks
    )


@pytest.mark.parametrize(
    ("num_groups", "group_topk", "copies"), [(None, None, 3.66), (4, 2, 2.0), (4, 1, 1.0)]
)
def test_copies_of_megatron_s_router_are_those_of_occult(
    num_groups: int | None, group_topk: int | None, copies: float
) -> None:
    """Top-8 of 64 experts on 4 ranks, where a group of the router may be a rank.

    Occult (arXiv 2505.13345) reports 3.68 copies of a token for a trace, 1.98 and 1.0 where it is
    pruned to two ranks and one.
    """
    logits = torch.randn(20_000, 64, generator=torch.Generator().manual_seed(0))
    _, routing_map = topk_routing_with_score_function(
        logits, 8, num_groups=num_groups, group_topk=group_topk
    )
    # A token's copies deviate by about 0.5, their mean by 0.004; and 3.66 and 2.00 are rounded.
    assert copies_per_token(routing_map.numpy(), 4) == pytest.approx(copies, abs=0.02)
    # The planner's expectation: groups are drawn there, and chosen by their best experts here.
    uniform = UniformRouting(
        num_experts=64, topk=8, num_groups=num_groups or 1, group_topk=group_topk or 1
    )
    assert uniform.hits(4).sum() == pytest.approx(copies, abs=0.02)
