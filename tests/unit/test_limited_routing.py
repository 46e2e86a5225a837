"""Device-limited routing, in Megatron's own top-k: experts on few nodes or few ranks."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

import torch
from equal import assert_equal
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from monta_megatron.integration.limited_routing import (
    LimitedTopk,
    groups_of,
    limit_routing,
    limits_of,
)

from monta_megatron.chains.layout import Layout
from monta_megatron.integration.supported_settings import check_supported

pytestmark = pytest.mark.old_end

LAYOUT = Layout(ep=8, etp=1, num_local_experts=8, rank=0, nodes=(0, 0, 1, 1, 2, 2, 3, 3))


def walked(scores: torch.Tensor, topk: int, num_places: int, most: int) -> torch.Tensor:
    """[T, E] -> [T, k]: experts by score until `most` places are fixed, then from these alone."""
    chosen = []
    for row in scores.tolist():
        by_score = sorted(range(len(row)), key=lambda expert: -row[expert])
        place_of = [expert * num_places // len(row) for expert in range(len(row))]
        places: list[int] = []
        for expert in by_score[:topk]:
            if place_of[expert] not in places and len(places) < most:
                places.append(place_of[expert])
        # Where the best experts name fewer places, all of these stay.
        kept = [expert for expert in by_score if place_of[expert] in places]
        chosen.append(kept[:topk] if len(places) == most else by_score[:topk])
    return torch.tensor(chosen)


def route(logits: torch.Tensor, router_replay: Any, **settings: Any) -> tuple[Any, Any]:
    """Megatron's probabilities and routing map, [T, E]."""
    return topk_routing_with_score_function(logits, 8, router_replay=router_replay, **settings)


@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("num_places", [4, 8])
@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_the_choice_is_that_of_a_walk(score_function: str, num_places: int, most: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(100, 64, generator=generator, requires_grad=True)
    bias = torch.randn(64, generator=generator) if score_function == "sigmoid" else None
    replay = LimitedTopk({num_places: most})
    probs, routing_map = route(logits, replay, score_function=score_function, expert_bias=bias)
    scores = logits if bias is None else logits.sigmoid() + bias
    experts = walked(scores, 8, num_places, most)
    assert_equal(routing_map, torch.zeros(100, 64).scatter(1, experts, 1).bool(), "choice")
    places = routing_map.view(100, num_places, -1).any(2).sum(1)
    assert places.max() == most
    # As the router normalises them, and with their gradient.
    kept = logits.gather(1, experts)
    own = kept.softmax(1) if bias is None else kept.sigmoid()
    own = own / own.sum(1, keepdim=True)
    torch.testing.assert_close(probs.gather(1, experts), own)
    (probs * probs).sum().backward()
    assert logits.grad is not None and not logits.grad[~routing_map].any()


def test_a_free_choice_within_the_limit_stays() -> None:
    logits = torch.zeros(50, 64)
    logits[:, :16] = 5 + torch.randn(50, 16, generator=torch.Generator().manual_seed(0))
    assert_equal(route(logits, LimitedTopk({4: 1}))[1], route(logits, None)[1], "choice")


def test_nodes_and_ranks_together() -> None:
    logits = torch.randn(100, 64, generator=torch.Generator().manual_seed(0))
    routing_map = route(logits, LimitedTopk({8: 3, 4: 2}))[1]
    assert routing_map.sum(1).unique().tolist() == [8]
    assert routing_map.view(100, 4, -1).any(2).sum(1).max() == 2
    assert routing_map.view(100, 8, -1).any(2).sum(1).max() == 3


def test_uniform_scores_reach_the_limit() -> None:
    """Occult prunes OLMoE's 3.68 copies to 1.98 and 1.0."""
    logits = torch.randn(4000, 64, generator=torch.Generator().manual_seed(0))
    copies = [
        float(route(logits, replay)[1].view(4000, 4, -1).any(2).sum(1).float().mean())
        for replay in (None, LimitedTopk({4: 2}), LimitedTopk({4: 1}))
    ]
    assert np.round(copies, 2).tolist() == [pytest.approx(3.66, abs=0.02), 2.0, 1.0]


def config_of(**settings: Any) -> Any:
    return SimpleNamespace(
        **{
            "moe_router_topk": 8,
            "moe_router_num_groups": None,
            "moe_router_group_topk": None,
            **settings,
        }
    )


def test_what_is_said() -> None:
    config = config_of(moe_monta_max_nodes_per_token=2, moe_monta_max_ranks_per_token=8)
    assert limits_of(config, LAYOUT).limits == {4: 2}
    assert groups_of(config, LAYOUT) == (4, 2)
    router, said = SimpleNamespace(router_replay=None), list[str]()
    limit_routing(router, config, LAYOUT, said.append)
    assert isinstance(router.router_replay, LimitedTopk)
    assert said == [
        "experts of a token limited to 8 of 8 ranks, which is all of them: nothing changes; to "
        "2 of 4 nodes: this changes the model, as a token whose best experts lie on more goes to "
        "others"
    ]


def test_groups_of_the_router_already_limit() -> None:
    groups = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    config = config_of(moe_monta_max_nodes_per_token=2, **groups)
    router, said = SimpleNamespace(router_replay=None), list[str]()
    limit_routing(router, config, LAYOUT, said.append)
    assert router.router_replay is None and groups_of(config, LAYOUT) == (4, 2)
    assert "already does: nothing changes" in said[0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"moe_monta_max_nodes_per_token": 0, "moe_router_topk": 9}, "hold 0"),
        ({"moe_monta_max_ranks_per_token": 1, "moe_router_topk": 9}, "1 of 8 ranks hold 8"),
        (
            {
                "moe_monta_max_ranks_per_token": 1,
                "moe_router_num_groups": 4,
                "moe_router_group_topk": 2,
            },
            "must be left out beside moe_router_num_groups (4)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match="moe_monta_max_") as error:
        limits_of(config_of(**settings), LAYOUT)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("moe_router_fusion", True),
        ("moe_enable_routing_replay", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "quantile_balancing"]),
    ],
)
def test_routers_that_cannot_be_limited(setting: str, value: Any) -> None:
    check_supported(config_of(**{setting: value}))
    config = config_of(**{setting: value}, moe_monta_max_nodes_per_token=1)
    with pytest.raises(ValueError, match=f"{setting}: not supported with moe_monta_max_nodes"):
        check_supported(config)
