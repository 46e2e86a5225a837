"""From a configuration to a choice of chain."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monta_megatron.chains import CHAINS
from monta_megatron.common import strict_yaml
from monta_megatron.core import Layout, Shape
from monta_megatron.integration.options import Options
from monta_megatron.integration.policy import policy_for
from monta_megatron.planner.chain_policy import PlannedPolicy
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import plan

CONFIGS = Path(__file__).parents[2] / "configs"
LAYOUT = Layout(ep=4, etp=1, num_local_experts=2, rank=0, nodes=(0, 0, 1, 1))


def config(**changes: Any) -> SimpleNamespace:
    """The fields of a TransformerConfig that a choice looks at."""
    values = {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "hidden_size": 64,
        "params_dtype": torch.bfloat16,
    }
    return SimpleNamespace(**{**values, **changes})


def test_auto_plans_for_what_the_configuration_exchanges() -> None:
    def shape(**changes: Any) -> Shape:
        choice = policy_for(Options(), config(**changes), LAYOUT, permuted_only=False)
        assert isinstance(choice, PlannedPolicy)
        return choice.shape

    plain = shape()
    assert (plain.hidden_size, plain.value_bytes, plain.prob_bytes) == (64, 2, 2)
    assert shape(moe_latent_size=12).hidden_size == 12
    assert shape(moe_router_dtype="fp32").prob_bytes == 4
    assert shape(moe_router_dtype="fp64").prob_bytes == 8
    assert shape(params_dtype=torch.float32).value_bytes == 4
    limited = shape(moe_router_num_groups=4, moe_router_group_topk=2)
    assert (limited.routing.num_groups, limited.routing.group_topk) == (4, 2)
    # With 2 groups on each of 2 nodes, a token crosses less often if it may take only 2 of them.
    assert limited.routing.hits(2).sum() < plain.routing.hits(2).sum()


def test_auto_permutes_where_tokens_cannot_be_sent() -> None:
    pairs = policy_for(Options(), config(), LAYOUT, permuted_only=True)
    assert {chain.rows for chain in pairs.chains} == {"permuted tokens"}
    both = policy_for(Options(), config(), LAYOUT, permuted_only=False)
    assert {chain.rows for chain in both.chains} == {"permuted tokens", "tokens"}


@pytest.mark.parametrize(("num_chunks", "chosen"), [(None, 4), (2, 2)])
def test_auto_splits_layers_with_the_best_chain_of_tokens(
    num_chunks: int | None, chosen: int
) -> None:
    """Nothing is priced of experts: always in 4 chunks, or in the number that is given."""
    options = Options(overlap_experts=True, num_chunks=num_chunks)
    policy = policy_for(options, config(), LAYOUT, permuted_only=False)
    assert isinstance(policy, PlannedPolicy)
    assert {chain.rows for chain in policy.chains} == {"tokens"}
    choice = policy.choose(4096)
    selection = policy.selection(4096)
    assert len(policy.chains) > 2
    assert {price.num_chunks for price in selection.prices} == {chosen}
    assert (choice.chain, choice.num_chunks) == (selection.price.chain, chosen)
    # Where no chain of tokens can run, layers are not split.
    permuted = policy_for(options, config(), LAYOUT, permuted_only=True)
    assert {chain.rows for chain in permuted.chains} == {"permuted tokens"}


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_of_tokens_is_refused_with_padded_experts(chain: str) -> None:
    padded = config(moe_pad_expert_input_to_capacity=True)
    options = Options(chain=chain, num_chunks=1)
    if CHAINS[chain].rows == "permuted tokens":
        assert policy_for(options, padded, LAYOUT, permuted_only=True).chains[0].name == chain
        return
    with pytest.raises(ValueError) as error:
        policy_for(options, padded, LAYOUT, permuted_only=True)
    assert str(error.value) == (
        f"moe_monta_chain: {chain} cannot run here: its rows are tokens, and "
        "moe_pad_expert_input_to_capacity pads permuted tokens; take auto, alltoall or "
        "alltoall_allgather, or leave the padding out"
    )


def test_an_exchange_on_more_nodes_than_there_are_is_refused() -> None:
    cluster = strict_yaml.load(Cluster, CONFIGS / "clusters" / "a800_2x8_ib200.yaml")
    assert policy_for(Options(cluster=cluster), config(), LAYOUT, permuted_only=False)
    spread = Layout(ep=4, etp=1, num_local_experts=2, rank=0, nodes=(0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"has 2 nodes, must have at least the 4 of the exch"):
        policy_for(Options(cluster=cluster), config(), spread, permuted_only=False)


def test_a_doubtful_calibration_is_said() -> None:
    cluster = strict_yaml.load(Cluster, CONFIGS / "clusters" / "a800_2x8_ib200.yaml")
    doubtful = replace(cluster, doubts=("calibrated in 1 round",))
    for costs, said in ((cluster, False), (doubtful, True)):
        choice = policy_for(Options(cluster=costs), config(), LAYOUT, permuted_only=False)
        assert isinstance(choice, PlannedPolicy)
        assert ("whose calibration is doubtful" in choice.choose(64).reason) is said
        assert ("calibrated in 1 round" in plan(choice.shape, costs).notes) is said


def test_many_experts_of_a_token_are_priced() -> None:
    """Rows of tokens carry them; padding for quantization makes them far more than top-k."""
    large = config(num_moe_experts=256, moe_router_topk=8, hidden_size=2048)
    layout = Layout(
        ep=16, etp=1, num_local_experts=16, rank=0, nodes=tuple(rank // 8 for rank in range(16))
    )
    policy = policy_for(Options(), large, layout, permuted_only=False)
    assert isinstance(policy, PlannedPolicy)
    many = policy.choose(4096, 251)
    assert policy.choose(4000, 193) is many
    assert "4,096 tokens per rank with up to 256 experts each" in many.reason
    # Top-k, or fewer where tokens are dropped, is what the plan expects.
    assert policy.choose(4096, 8) is policy.choose(4096, 5) is policy.choose(4096)
    assert policy.choose(4096) is not many
    short, long = (
        {
            (price.chain.name, price.num_chunks): (price.total_us, price.peak_bytes)
            for price in policy.selection(4096, most_experts).prices
        }
        for most_experts in (0, 256)
    )
    for chain in policy.chains:
        key = chain.name, 1
        if chain.rows == "tokens":
            assert long[key][0] > 1.05 * short[key][0] and long[key][1] > short[key][1], key
        else:
            assert long[key] == short[key]


@pytest.mark.parametrize(
    ("fields", "tune_steps"),
    [
        ({}, 20),
        ({"moe_monta_chain": "auto", "moe_monta_num_chunks": 2}, 20),
        ({"moe_monta_tune_steps": 7}, 7),
        ({"moe_monta_tune_steps": 0}, 0),
        ({"deterministic_mode": True}, 0),
        ({"deterministic_mode": True, "moe_monta_tune_steps": 5}, 5),
        ({"moe_monta_chain": "alltoall"}, 0),
        ({"moe_monta_chain": "alltoall", "moe_monta_tune_steps": 0}, 0),
    ],
)
def test_only_auto_is_tuned(fields: dict[str, Any], tune_steps: int) -> None:
    assert Options.of(SimpleNamespace(**fields)).tune_steps == tune_steps


def test_a_cluster_file_is_read_once_unless_it_changes(tmp_path: Path) -> None:
    """Every layer makes its options."""
    path = tmp_path / "cluster.yaml"
    path.write_bytes((CONFIGS / "clusters" / "a800_2x8_ib200.yaml").read_bytes())
    given = SimpleNamespace(moe_monta_cluster=str(path))
    found = Options.of(given).cluster
    assert Options.of(given).cluster is found
    os.utime(path, ns=(1, 1))
    again = Options.of(given).cluster
    assert again == found and again is not found
