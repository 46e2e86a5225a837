"""W0 to W7 of Megatron-LM's pull request 7488, by their definitions there."""

import numpy as np
import pytest
from numpy.typing import NDArray

from monta_megatron.planner.routing.drawn import imbalance_map, imbalance_routing, num_steps
from monta_megatron.planner.routing.names import IMBALANCE_WORKLOADS, routing_or_folder

TOKENS, EXPERTS, TOPK = 400, 16, 3
# max(top-k, experts / 4) of them are hot.
HOT = [0, 1, 2, 3]


def rows(name: str, step: int = 0, seed: int = 1, topk: int = TOPK) -> NDArray[np.bool_]:
    return imbalance_map(name, TOKENS, EXPERTS, topk, seed, step)


def used(name: str, tokens: slice, step: int = 0) -> list[int]:
    """The experts that get any of these tokens."""
    return np.flatnonzero(rows(name, step)[tokens].any(axis=0)).tolist()


def every_fourth(name: str, step: int = 0) -> list[list[int]]:
    """The experts of the tokens 0, 4, 8 and so on, then those of the others."""
    of_others = rows(name, step)[np.arange(TOKENS) % 4 != 0].any(axis=0)
    return [used(name, slice(0, None, 4), step), np.flatnonzero(of_others).tolist()]


@pytest.mark.parametrize("name", IMBALANCE_WORKLOADS)
@pytest.mark.parametrize("topk", [1, 3, 8])
def test_every_token_has_top_k_distinct_experts(name: str, topk: int) -> None:
    for step in range(5):
        made = rows(name, step, topk=topk)
        assert made.shape == (TOKENS, EXPERTS)
        assert (made.sum(axis=1) == topk).all()


@pytest.mark.parametrize("name", IMBALANCE_WORKLOADS)
def test_rows_follow_from_name_seed_and_step(name: str) -> None:
    imbalance_map.cache_clear()
    first = rows(name).copy()
    imbalance_map.cache_clear()
    assert np.array_equal(rows(name), first)
    assert np.array_equal(rows(name, seed=2), first) == (name == "W0")


def test_w0_goes_round() -> None:
    # 16 experts, top-3: token 0 has 0 1 2, token 1 has 3 4 5, token 5 has 15 0 1.
    made = rows("W0")
    assert [np.flatnonzero(made[token]).tolist() for token in (0, 1, 5)] == [
        [0, 1, 2],
        [3, 4, 5],
        [0, 1, 15],
    ]
    assert made[:16].sum(axis=0).tolist() == [TOPK] * EXPERTS


def test_hot_sets() -> None:
    everyone = list(range(EXPERTS))
    for name in ("W1", "W2"):
        assert every_fourth(name) == [everyone, HOT]
    assert every_fourth("W3") == [everyone, everyone[::2]]
    assert used("W4", slice(None)) == everyone
    assert used("W5", slice(None)) == everyone[8:]


def test_the_hot_set_of_w6_moves_every_third_step() -> None:
    # 4 places of 4 experts, 3 steps in each.
    assert num_steps("W6", EXPERTS, TOPK) == 12
    hot = [every_fourth("W6", step)[1] for step in range(13)]
    assert [experts[0] for experts in hot] == [0, 0, 0, 4, 4, 4, 8, 8, 8, 12, 12, 12, 0]
    assert all(len(experts) == 4 for experts in hot)
    # Top-6 of 16: 6 hot experts, which lie around the end once; 8 places.
    assert num_steps("W6", EXPERTS, 6) == 24
    assert np.flatnonzero(rows("W6", 6, topk=6)[1]).tolist() == [0, 1, 12, 13, 14, 15]


def test_every_fourth_step_of_w7_is_a_burst() -> None:
    assert num_steps("W7", EXPERTS, TOPK) == 4
    by_step = [used("W7", slice(0, None, 2), step) for step in range(8)]
    assert [experts == HOT for experts in by_step] == [False, False, False, True] * 2
    assert used("W7", slice(1, None, 2), 3) == list(range(EXPERTS))


def test_w5_needs_enough_experts_in_the_upper_half() -> None:
    with pytest.raises(ValueError, match=r"got W5, must leave the 9 experts .* half holds 8$"):
        rows("W5", topk=9)


@pytest.mark.parametrize(("name", "largest"), [("W0", 1.0), ("W1", 3.25), ("W5", 2.0)])
def test_loads_are_those_of_the_definition(name: str, largest: float) -> None:
    """W1: 3/4 of the pairs on 1/4 of the experts, and 1/4 on all: (3 + 1/4) times the mean."""
    pairs = imbalance_map(name, 20_000, EXPERTS, 2, 1, 0).sum(axis=0)
    assert pairs.max() / pairs.mean() == pytest.approx(largest, rel=0.02)


def test_the_planner_expects_a_step_without_a_burst() -> None:
    """Of four steps one is a burst, so the one in the middle is none."""
    routing = imbalance_routing("W7", TOKENS, EXPERTS, TOPK, num_ranks=4, ep=4, seed=1)
    assert routing.name == "W7_burst"
    assert any(np.array_equal(routing.routing_maps[0], rows("W7", step)) for step in range(3))


def test_names() -> None:
    assert [routing_or_folder(name) for name in ("W3", "W3_spread_hot_experts")] == ["W3", "W3"]
    assert list(IMBALANCE_WORKLOADS) == [name[:2] for name in IMBALANCE_WORKLOADS.values()]
