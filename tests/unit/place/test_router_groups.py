"""Megatron's own flags limit the parts that a token's experts lie on: Occult's copies per token."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

from monta_megatron.planner.routing import UniformRouting
from monta_megatron.tools.placement import copies_per_token

NUM_TOKENS, NUM_EXPERTS, TOPK, NUM_RANKS = 20_000, 64, 8, 4


@pytest.mark.parametrize(
    ("num_groups", "group_topk", "copies"), [(None, None, 3.66), (4, 2, 2.0), (4, 1, 1.0)]
)
def test_groups_that_are_ranks_limit_the_copies(
    num_groups: int | None, group_topk: int | None, copies: float
) -> None:
    """`--moe-router-num-groups 4 --moe-router-group-topk 2` on 4 ranks of 16 experts.

    Occult (arXiv 2505.13345) reports 3.68 copies of a token for a trace, 1.98 and 1.0 where it is
    pruned to two ranks and one.
    """
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(0))
    _, routing_map = topk_routing_with_score_function(
        logits, TOPK, num_groups=num_groups, group_topk=group_topk
    )
    assert (routing_map.sum(dim=1) == TOPK).all()
    uniform = UniformRouting(
        num_experts=NUM_EXPERTS,
        topk=TOPK,
        num_groups=num_groups or 1,
        group_topk=group_topk or 1,
    )
    # A token's copies deviate by about 0.5, their mean by 0.004; and 3.66 and 2.00 are rounded.
    measured = copies_per_token(routing_map.numpy(), NUM_RANKS)
    assert measured == pytest.approx(copies, abs=0.02)
    # The planner's expectation: groups are drawn there, and chosen by their best experts here.
    assert uniform.hits(NUM_RANKS).sum() == pytest.approx(copies, abs=0.02)
