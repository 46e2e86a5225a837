"""From a configuration to the planner of a dispatcher."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monta_megatron.chains import CHAINS
from monta_megatron.common import strict_yaml
from monta_megatron.core import Layout, Shape
from monta_megatron.integration.options import Options
from monta_megatron.integration.planning import planner_for
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.plan import NUM_CHUNKS

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
        found = planner_for(Options(), config(**changes), LAYOUT, permuted_only=False).shape
        assert found is not None
        return found

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
    pairs = planner_for(Options(), config(), LAYOUT, permuted_only=True)
    assert {chain.rows for chain in pairs.chains} == {"permuted tokens"}
    both = planner_for(Options(), config(), LAYOUT, permuted_only=False)
    assert {chain.rows for chain in both.chains} == {"permuted tokens", "tokens"}


@pytest.mark.parametrize("num_chunks", [None, 2])
def test_experts_are_split_where_a_chain_of_tokens_can_run(num_chunks: int | None) -> None:
    options = Options(overlap_experts=True, num_chunks=num_chunks)
    planner = planner_for(options, config(), LAYOUT, permuted_only=False)
    assert planner.fixed is None and planner.splits_experts
    assert planner.num_chunks == (NUM_CHUNKS if num_chunks is None else (2,))
    choice = planner.pick(4096)[0]
    assert choice.splits_experts and choice.num_chunks == (num_chunks or 4)
    assert not planner_for(options, config(), LAYOUT, permuted_only=True).splits_experts
    options = Options(chain=choice.chain, overlap_experts=True, num_chunks=choice.num_chunks)
    assert planner_for(options, config(), LAYOUT, permuted_only=False).fixed == choice


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_of_tokens_is_refused_with_padded_experts(chain: str) -> None:
    padded = config(moe_pad_expert_input_to_capacity=True)
    options = Options(chain=chain, num_chunks=1)
    if CHAINS[chain].rows == "permuted tokens":
        assert planner_for(options, padded, LAYOUT, permuted_only=True).chains[0].name == chain
        return
    with pytest.raises(ValueError) as error:
        planner_for(options, padded, LAYOUT, permuted_only=True)
    assert str(error.value) == (
        f"moe_monta_chain: {chain} cannot run here: its rows are tokens, and "
        "moe_pad_expert_input_to_capacity pads permuted tokens; take auto, alltoall or "
        "alltoall_allgather, or leave the padding out"
    )


def test_an_exchange_on_more_nodes_than_there_are_is_refused() -> None:
    cluster = strict_yaml.load(Cluster, CONFIGS / "clusters" / "a800_2x8_ib200.yaml")
    assert planner_for(Options(cluster=cluster), config(), LAYOUT, permuted_only=False)
    spread = Layout(ep=4, etp=1, num_local_experts=2, rank=0, nodes=(0, 1, 2, 3))
    with pytest.raises(ValueError, match=r"has 2 nodes, must have at least the 4 of the exch"):
        planner_for(Options(cluster=cluster), config(), spread, permuted_only=False)


@pytest.mark.parametrize(
    ("fields", "tune_steps"),
    [
        ({}, 24),
        ({"moe_monta_chain": "auto", "moe_monta_num_chunks": 2}, 24),
        ({"moe_monta_tune_steps": 7}, 7),
        ({"moe_monta_tune_steps": 0}, 0),
        ({"deterministic_mode": True}, 0),
        ({"moe_monta_chain": "alltoall"}, 0),
        ({"moe_monta_chain": "alltoall", "moe_monta_tune_steps": 0}, 0),
    ],
)
def test_only_auto_is_tuned(fields: dict[str, Any], tune_steps: int) -> None:
    assert Options.of(SimpleNamespace(**fields)).tune_steps == tune_steps


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"moe_monta_tune_steps": 5}, "be 0, which is off, or an integer >= 6"),
        ({"moe_monta_tune_steps": 6, "deterministic_mode": True}, "be 0 or left out in determin"),
        ({"moe_monta_tune_steps": 6, "moe_monta_chain": "alltoall"}, "be 0 or left out where a c"),
    ],
)
def test_numbers_of_steps_that_cannot_be_are_refused(fields: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"moe_monta_tune_steps: got [56], must {rule}"):
        Options.of(SimpleNamespace(**fields))


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
