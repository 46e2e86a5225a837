"""Expected traffic: against the published figures, by counting every choice, and against counts."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from clusters import layout_of
from counted_routing import CountedRouting

from monta_megatron.chains import CHAINS
from monta_megatron.planner.routing import UniformRouting


@pytest.mark.parametrize(
    ("num_experts", "topk", "expected"),
    [
        (256, 8, {2: 1.99, 4: 3.61, 8: 5.29, 16: 6.52}),
        (64, 6, {2: 1.98, 4: 3.35, 8: 4.54, 16: 5.32}),
        (8, 2, {2: 1.57, 4: 1.86, 8: 2.0}),
    ],
)
def test_expected_distinct_groups(num_experts: int, topk: int, expected: dict[int, float]) -> None:
    routing = UniformRouting(num_experts=num_experts, topk=topk)
    found = {num_parts: routing.hits(num_parts).sum() for num_parts in expected}
    assert found == pytest.approx(expected, abs=0.005)


# Parts that are whole groups, parts of groups, and parts that lie across groups.
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize(("num_groups", "group_topk"), [(4, 2), (6, 3), (3, 1), (2, 2), (1, 1)])
def test_group_limited_routing_by_counting(
    num_parts: int, num_groups: int, group_topk: int
) -> None:
    num_experts, topk = 12, 3
    routing = UniformRouting(
        num_experts=num_experts, topk=topk, num_groups=num_groups, group_topk=group_topk
    )
    group_size, part_size = num_experts // num_groups, num_experts // num_parts
    shares = np.zeros(num_parts)
    choices = list(combinations(range(num_groups), group_topk))
    for chosen in choices:
        allowed = [expert for expert in range(num_experts) if expert // group_size in chosen]
        picks = list(combinations(allowed, topk))
        for pick in picks:
            for part in {expert // part_size for expert in pick}:
                shares[part] += 1 / len(picks) / len(choices)
    assert routing.hits(num_parts) == pytest.approx(shares)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("rank", [0, 3])
def test_expected_counts_are_the_mean_of_counts(chain: str, rank: int) -> None:
    """Drawn tokens, counted as the executor counts, against the formulas."""
    num_tokens, num_blocks = 6_000, 2
    layout = replace(layout_of(ep=4, etp=1, ranks_per_node=2, num_experts=16), rank=rank)
    ranking = np.random.default_rng(0).random((4, num_tokens, 16)).argsort(axis=2)
    measured = CountedRouting(routing_maps=tuple(ranking < 3))
    uniform = UniformRouting(num_experts=16, topk=3)
    counted = measured.counts(CHAINS[chain], layout, 0, num_blocks)
    expected = uniform.counts(CHAINS[chain], layout, num_tokens, num_blocks)
    for name, counts in vars(counted).items():
        if not isinstance(counts, np.ndarray):
            assert getattr(expected, name) == counts
            continue
        assert getattr(expected, name).shape == counts.shape, name
        # Three standard deviations of a share of 3,000 tokens are under 85 of them.
        assert np.abs(getattr(expected, name) - counts).max() < 170, name
