"""Everything that decides what runs is compared between ranks, before they exchange anything."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs megatron-core")
from monta_megatron.integration.options import Options
from monta_megatron.integration.planning import AGREED_FIELDS, agreed_config, hash_of

# Two values of each field of a configuration that decides which chains run, or a row's size.
VALUES: dict[str, tuple[Any, Any]] = {
    "hidden_size": (16, 32),
    "moe_latent_size": (None, 8),
    "params_dtype": (torch.float32, torch.bfloat16),
    "num_moe_experts": (8, 16),
    "moe_router_topk": (2, 3),
    "moe_router_num_groups": (None, 2),
    "moe_router_group_topk": (None, 1),
    "moe_router_dtype": (None, "fp32"),
    "moe_expert_capacity_factor": (None, 1.0),
    "batch_invariant_mode": (False, True),
}


def agreed(**changes: Any) -> dict[str, Any]:
    values = {name: ours for name, (ours, _) in VALUES.items()} | changes
    return agreed_config(Options(chain="alltoall"), SimpleNamespace(**values), {}, False)


@pytest.mark.parametrize("name", VALUES)
def test_ranks_that_differ_in_a_field_are_told(name: str) -> None:
    ours, theirs = agreed(), agreed(**{name: VALUES[name][1]})
    assert [field for field in ours if ours[field] != theirs[field]] == [name]
    assert hash_of(ours) != hash_of(theirs)


def test_every_field_that_is_compared_has_a_case() -> None:
    assert set(AGREED_FIELDS) == set(VALUES)
