"""Megatron's batch-invariant mode (0.20) with what an older release lacks put in its place.

`tests/dist/test_supported_settings.py` compares the sums where the mode is there.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher as stock
from test_choice import LAYOUT, config

from monta_megatron.chains import CHAINS
from monta_megatron.integration import count_sources
from monta_megatron.integration.dispatcher import MontaTokenDispatcher
from monta_megatron.integration.options import Options
from monta_megatron.integration.planning import check_chain_runs, planner_for


@pytest.fixture(autouse=True)
def order() -> Any:
    with mock.patch.object(count_sources, "KNOWS_ORDER", True):
        yield


def config_of(**options: Any) -> SimpleNamespace:
    given = {f"moe_monta_{name}": value for name, value in options.items()}
    return config(batch_invariant_mode=True, moe_router_topk=4, **given)


def problem(**options: Any) -> str:
    source = config_of(**options)
    try:
        check_chain_runs(Options.of(source), source, LAYOUT)
    except ValueError as error:
        return str(error)
    return ""


def test_chains_that_add_in_another_order_are_refused() -> None:
    said = {chain: problem(chain=chain) for chain in CHAINS}
    assert [chain for chain in CHAINS if not said[chain]] == ["alltoall", "alltoall_allgather"]
    for chain, line in said.items():
        assert not line or line.startswith(f"moe_monta_chain: {chain} cannot run here: batch_inv")


def test_an_older_megatron_demands_no_order() -> None:
    with mock.patch.object(count_sources, "KNOWS_ORDER", False):
        assert not problem(chain="hierarchical_alltoall")


@pytest.mark.parametrize("overlap_experts", [None, True])
def test_auto_chooses_among_chains_that_add_in_order(overlap_experts: bool | None) -> None:
    """So that there is none to split with its experts."""
    source = config_of(overlap_experts=overlap_experts)
    planner = planner_for(Options.of(source), source, LAYOUT, permuted_only=False)
    assert {chain.name for chain in planner.chains} == {"alltoall", "alltoall_allgather"}
    assert not planner.splits_experts


def test_the_map_of_permute_is_kept_for_unpermute() -> None:
    tokens, inverse_map = torch.ones(3, 2), torch.zeros(2, 3, 1, dtype=torch.long)
    dispatcher = SimpleNamespace(
        config=SimpleNamespace(batch_invariant_mode=True, moe_permute_fusion=False),
        routing_map=torch.ones(3, 1, dtype=torch.bool),
        drop_and_pad=False,
        choice=None,
    )
    answer = (tokens, tokens[:, 0], torch.arange(3), inverse_map, None)
    with mock.patch.object(stock, "permute", return_value=answer) as permute:
        MontaTokenDispatcher._enter(dispatcher, tokens, torch.ones(3, 1), 3)
    assert permute.call_args.kwargs["return_batch_invariant_inverse_map"] is True
    assert dispatcher.batch_invariant_inverse_permutation_mapping is inverse_map
