"""The drawn routings: the data, and that the planner expects it."""

import numpy as np
import pytest

from monta_megatron.planner.routing.drawn import expected_routing, make_routing

DRAWN = ("uniform", "skewed", "node-limited")
# Eight experts on two nodes.
NODES = np.array([0, 0, 0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize("name", DRAWN)
def test_routing_is_top_k_and_the_same_wherever_it_is_made(name: str) -> None:
    made = make_routing(name, 300, 3, NODES, seed=5, rank=2)
    assert (made.sum(axis=1) == 3).all()
    assert np.array_equal(made, make_routing(name, 300, 3, NODES, seed=5, rank=2))
    assert not np.array_equal(made, make_routing(name, 300, 3, NODES, seed=5, rank=3))
    share = made.sum(axis=0) / made.sum()
    on_both_nodes = made[:, :4].any(axis=1) & made[:, 4:].any(axis=1)
    assert (share.max() > 0.2) == (name == "skewed")
    assert on_both_nodes.any() == (name != "node-limited")


@pytest.mark.parametrize("name", DRAWN)
def test_the_planner_expects_what_is_drawn(name: str) -> None:
    made = make_routing(name, 6000, 3, NODES, seed=5, rank=1)
    expected = expected_routing(name, num_experts=8, topk=3, num_nodes=2, seed=5)
    # Three standard deviations of a share of 4,096 tokens, the planner's sample, are under 0.024.
    assert expected.expert_shares == pytest.approx(made.mean(axis=0), abs=0.03)
    for num_parts in (2, 4):
        drawn = made.reshape(len(made), num_parts, -1).any(axis=2).mean(axis=0)
        assert expected.hits(num_parts) == pytest.approx(drawn, abs=0.03)


def test_the_seed_says_which_experts_are_wanted_most() -> None:
    first, other = (expected_routing("skewed", 64, 8, num_nodes=2, seed=seed) for seed in (0, 1))
    assert first.expert_shares.sum() == pytest.approx(8)
    assert first.expert_shares.max() > 4 * first.expert_shares.min()
    assert first.expert_shares.argmax() != other.expert_shares.argmax()
    again = expected_routing("skewed", 64, 8, num_nodes=2, seed=0)
    assert np.array_equal(first.expert_shares, again.expert_shares)


def test_node_limited_routing_needs_nodes_with_room() -> None:
    rule = r"--routing: got node-limited, must leave the {} experts .* of {} nodes, .* hold {}"
    with pytest.raises(ValueError, match=r"must not be where an exchange lies on 1 node$"):
        make_routing("node-limited", 4, 2, np.zeros(8, dtype=np.int64), seed=0, rank=0)
    with pytest.raises(ValueError, match=rule.format(5, 2, 4)):
        make_routing("node-limited", 4, 5, NODES, seed=0, rank=0)
    with pytest.raises(ValueError, match=rule.format(5, 2, 4)):
        expected_routing("node-limited", num_experts=8, topk=5, num_nodes=2)
