"""Exchanges that lie across nodes in other ways than one EP group over all ranks."""

from dataclasses import replace
from typing import Any

import pytest
from layers import (
    Case,
    compare,
    error_of,
    groups_with_megatrons_time_limit,
    nodes_found,
    refusal_of,
    reported,
    statistics_of_layers,
    sums_around_a_local_group,
)
from pool import Pools

from monta_megatron.core import Layout
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import uncalibrated


def uncalibrated_cluster(ranks_per_node: int) -> Cluster:
    nodes = tuple(rank // ranks_per_node for rank in range(4))
    return uncalibrated(Layout(ep=4, etp=1, num_local_experts=1, rank=0, nodes=nodes), "H100")


def found_nodes(
    pools: Pools, node_of_rank: str, variable: str = "NCCL_HOSTID", **options: Any
) -> tuple[int, ...]:
    """The nodes on which all of 4 ranks agree."""
    (found,) = set(pools[4].run(nodes_found, list(node_of_rank), variable, options))
    return found


HIERARCHICAL = {"moe_monta_chain": "hierarchical_alltoall", "moe_monta_ranks_per_node": 2}
CHUNKS = [1, 3]


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        # Context parallel ranks share an EP group: the tokens of one sequence on both.
        (4, Case(ep=4, cp=2, options=HIERARCHICAL)),
        # As --use-tp-pp-dp-mapping does.
        (8, Case(tp=4, ep=4, pp=2, order="tp-cp-ep-pp-dp", options=HIERARCHICAL)),
        # Two EP groups in one node, and two that share two nodes.
        (4, Case(ep=2, options={**HIERARCHICAL, "moe_monta_ranks_per_node": 4})),
        (8, Case(ep=4, options=HIERARCHICAL)),
        # EP 3 on nodes of 2: the second group starts in the middle of a node.
        (6, Case(ep=3, options={"moe_monta_chain": "alltoall_dedup"})),
        (6, Case(ep=3, options={"moe_monta_chain": "allgather", "moe_monta_ranks_per_node": 2})),
    ],
)
def test_layer_equals_stock(pools: Pools, world_size: int, case: Case) -> None:
    pools[world_size].run(compare, case, CHUNKS)


def test_uneven_nodes_are_refused_where_the_chain_needs_rails(pools: Pools) -> None:
    case = Case(ep=3, options=HIERARCHICAL)
    for error in pools[6].run(error_of, compare, case, CHUNKS):
        assert "not evenly in order" in error


def test_one_exchange_refuses_for_all(pools: Pools) -> None:
    """EP 3 on nodes of 2 and 4 ranks: only the first of two exchanges lies on uneven nodes."""
    case = Case(ep=3, options={"moe_monta_chain": "hierarchical_alltoall"})
    environment = [{"NCCL_HOSTID": each} for each in "aabbbb"]
    refusals = pools[6].run(refusal_of, [case] * 6, environment)
    here = "moe_monta_chain: hierarchical_alltoall cannot run here: the ranks of the exchange lie "
    there = [f" (in the expert group of rank {rank})" for rank in range(3)]
    assert refusals == [
        f"{here}on nodes [0, 0, 1], not evenly in order{where}" for where in ["", "", "", *there]
    ]


@pytest.mark.parametrize(
    ("named", "other"),
    # On one rank of an exchange; on all ranks of one exchange and on none of the other.
    [([1], 1), ([0, 1], 2)],
)
def test_names_of_nodes_on_some_ranks_only(pools: Pools, named: list[int], other: int) -> None:
    environment = [{"MONTA_NODE": "a"} if rank in named else {} for rank in range(4)]
    refusals = pools[4].run(refusal_of, [Case(ep=2)] * 4, environment)
    first = f"moe_monta: ranks 0 and {other} differ in whether MONTA_NODE is set: "
    assert refusals[0].startswith(first)
    for refusal in refusals:
        assert "differ in whether MONTA_NODE is set" in refusal


def test_a_cluster_file_and_the_hosts(pools: Pools) -> None:
    found = uncalibrated_cluster(ranks_per_node=2)
    cluster = {"moe_monta_cluster": found}
    # A node of two hosts is for the file to say.
    rack = {"moe_monta_cluster": replace(found, ranks_per_host=1)}
    assert found_nodes(pools, "abcd", **rack) == (0, 0, 1, 1)
    # Else each host is one: used in part, larger, or with ranks dealt out in turn.
    assert found_nodes(pools, "abcd", **cluster) == (0, 1, 2, 3)
    assert found_nodes(pools, "aaaa", **cluster) == (0, 0, 0, 0)
    assert found_nodes(pools, "abab", **cluster) == (0, 1, 0, 1)
    # Names given by the user come before the file, but not before the option.
    assert found_nodes(pools, "abbb", "MONTA_NODE", **cluster) == (0, 1, 1, 1)
    option = {"moe_monta_ranks_per_node": 2}
    assert found_nodes(pools, "abbb", "MONTA_NODE", **cluster, **option) == (0, 0, 1, 1)
    assert found_nodes(pools, "abab", **cluster, **option) == (0, 0, 1, 1)


def test_every_pipeline_stage_reports_its_choice(pools: Pools) -> None:
    """Rank 0 may be of a stage without MoE layers."""
    found = pools[4].run(reported, Case(ep=2, pp=2, options=HIERARCHICAL))
    chain = "hierarchical_alltoall in 4 chunks, EP 2 x ETP 1 over 1 node: as asked for"
    assert found == [[f"monta: {chain}"], [], [f"monta, rank 2: {chain}"], []]


def test_statistics_of_a_model_are_those_of_its_layers(pools: Pools) -> None:
    for of_rank in pools[4].run(statistics_of_layers, Case(ep=4, options=HIERARCHICAL)):
        (*second, sent_in_two_steps), (*first, sent_in_one) = of_rank
        choice = "hierarchical_alltoall in 4 chunks"
        # Known from the second exchange on.
        number, ran, busiest = second
        assert (number, ran, first) == (1000, choice, [1001, choice, None])
        assert busiest is not None and 1 <= busiest < 2
        # The same tokens in every step.
        assert sent_in_two_steps == {name: 2 * sent for name, sent in sent_in_one.items()}
        assert min(sent_in_one.values()) > 0


def test_megatron_changes_the_time_limit_of_our_groups_too(pools: Pools) -> None:
    found = pools[4].run(groups_with_megatrons_time_limit, Case(options=HIERARCHICAL))
    assert found == [["node", "rail"]] * 4


@pytest.mark.old_end
def test_a_group_made_by_its_members_alone_disturbs_no_other(pools: Pools) -> None:
    """As where a pipeline stage has no MoE layers: the next group of all ranks still meets."""
    assert pools[4].run(sums_around_a_local_group) == [(1, 6), (1, 6), (5, 6), (5, 6)]
