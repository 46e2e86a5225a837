"""Which experts are put together: planted clusters, load, groups, and counted savings."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from planted import planted_routing

from monta_megatron.planner.routing import UniformRouting
from monta_megatron.tools.place.placement import (
    _saved_by_swap,
    co_activation,
    collaboration,
    place_experts,
)


def copies(routing_map: NDArray[np.bool_], num_parts: int) -> float:
    return float(routing_map.reshape(len(routing_map), num_parts, -1).any(2).sum(1).mean())


def load(routing_map: NDArray[np.bool_], num_parts: int) -> float:
    pairs = routing_map.reshape(len(routing_map), num_parts, -1).sum((0, 2))
    return float(pairs.max() / pairs.mean())


# Experts, ranks, nodes; two-level and flat.
EXCHANGES = [(64, 4, 1), (64, 4, 4), (64, 8, 2), (128, 16, 4), (256, 32, 4), (256, 64, 8)]


@pytest.mark.parametrize("strength", [1.5, 3.0, 5.0])
@pytest.mark.parametrize(("num_experts", "num_ranks", "num_nodes"), EXCHANGES)
def test_planted_clusters_are_found(
    num_experts: int, num_ranks: int, num_nodes: int, strength: float
) -> None:
    """Within 2% of the placement that the tokens were made from.

    So many tokens that the planted placement itself keeps to the load.
    """
    routing_map, planted = planted_routing(num_experts, num_ranks, num_nodes, 32768, strength, 0)
    assert load(routing_map[:, planted], num_ranks) <= 1.1
    order = place_experts(routing_map, num_nodes, num_ranks, max_load=1.1)
    assert sorted(order) == list(range(num_experts))
    for num_parts in (num_ranks, num_nodes):
        best = copies(routing_map[:, planted], num_parts)
        assert copies(routing_map[:, order], num_parts) <= 1.02 * best
    assert load(routing_map[:, order], num_ranks) <= 1.1


def test_nodes_come_before_ranks() -> None:
    """Experts 0, 2, 4, 6 share tokens in pairs: they fill a node, each pair a rank of it."""
    pairs = [[0, 4], [2, 6], [1, 5], [3, 7]] * 8 + [[0, 2], [4, 6], [1, 3], [5, 7]]
    routing_map = np.zeros((len(pairs), 8), dtype=np.bool_)
    np.put_along_axis(routing_map, np.array(pairs), True, axis=1)
    order = place_experts(routing_map, num_nodes=2, num_ranks=4, max_load=1.1)
    assert order.tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


def test_nothing_moves_where_nothing_is_won() -> None:
    routing_map = np.ones((16, 8), dtype=np.bool_)
    assert place_experts(routing_map, 2, 4, max_load=1.1).tolist() == list(range(8))


def test_saved_copies_against_counting() -> None:
    """Every swap, counted before and after."""
    routing_map, _ = planted_routing(16, 4, 1, 64, 1.0, 0)
    part_of = np.repeat(np.arange(4), 4)
    saved = _saved_by_swap(routing_map.astype(np.float32), part_of, 4)
    for one, other in itertools.combinations(range(16), 2):
        order = np.arange(16)
        order[[one, other]] = other, one
        if part_of[one] != part_of[other]:
            change = copies(routing_map, 4) - copies(routing_map[:, order], 4)
            assert saved[one, other] == saved[other, one] == round(64 * change)


def test_load_is_a_constraint() -> None:
    """Three of four experts that collaborate are hot: together they would be too much."""
    generator = np.random.default_rng(0)
    hot = np.zeros((600, 8), dtype=np.bool_)
    hot[:, :4] = generator.random((600, 4)) < [0.9, 0.9, 0.9, 0.1]
    hot[:, 4:] = generator.random((600, 4)) < 0.35
    free = place_experts(hot, 1, 2, max_load=9.0)
    bound = place_experts(hot, 1, 2, max_load=1.1)
    assert load(hot[:, free], 2) > 1.1 >= load(hot[:, bound], 2)
    assert copies(hot[:, bound], 2) >= copies(hot[:, free], 2)


@pytest.mark.parametrize(
    ("num_groups", "num_nodes", "num_ranks"), [(8, 2, 4), (4, 4, 16), (2, 4, 8)]
)
def test_groups_of_the_router_stay_together(
    num_groups: int, num_nodes: int, num_ranks: int
) -> None:
    routing_map, _ = planted_routing(64, num_ranks, num_nodes, 2048, 2.0, 1)
    order = place_experts(routing_map, num_nodes, num_ranks, 1.5, num_groups)
    groups = order.reshape(num_groups, -1) // (64 // num_groups)
    assert (groups == groups[:, :1]).all()
    assert copies(routing_map[:, order], num_ranks) < copies(routing_map, num_ranks)


def test_uniform_copies_are_those_of_occult() -> None:
    """Top-8 of 64 experts on 4 ranks: 3.66 by the formula; Occult reports 3.68 for a trace."""
    uniform = UniformRouting(num_experts=64, topk=8)
    routing_map, _ = planted_routing(64, 4, 1, 20000, 0.0, 0)
    measured = collaboration(routing_map, 4, uniform)
    assert measured.uniform_copies == pytest.approx(3.66, abs=0.005)
    # Standard error of the mean below 0.004.
    assert measured.copies == pytest.approx(measured.uniform_copies, abs=0.02)
    # 15 of the other 63 experts are in the same part.
    assert measured.uniform_intra == pytest.approx(15 / 63)
    assert measured.intra == pytest.approx(15 / 63, abs=0.005)
    assert measured.inter == 1 - measured.intra


@pytest.mark.parametrize("num_parts", [2, 4, 8, 16])
def test_uniform_pairs_in_groups(num_parts: int) -> None:
    """8 groups of 4 experts, 3 of them allowed: against a count over drawn tokens."""
    generator = np.random.default_rng(0)
    allowed = generator.permuted(np.tile(np.arange(8) < 3, (20000, 1)), axis=1)
    scores = np.where(np.repeat(allowed, 4, axis=1), generator.random((20000, 32)), -1.0)
    routing_map = scores >= np.sort(scores, axis=1)[:, -6:-5]
    uniform = UniformRouting(num_experts=32, topk=6, num_groups=8, group_topk=3)
    measured = collaboration(routing_map, num_parts, uniform)
    assert measured.copies == pytest.approx(measured.uniform_copies, abs=0.02)
    assert measured.intra == pytest.approx(measured.uniform_intra, abs=0.005)


def test_co_activation_by_hand() -> None:
    routing_map = np.array([[1, 1, 0], [1, 0, 1], [1, 1, 0], [0, 1, 1]], dtype=np.bool_)
    assert (4 * co_activation(routing_map)).tolist() == [[3, 2, 1], [2, 3, 1], [1, 1, 2]]
