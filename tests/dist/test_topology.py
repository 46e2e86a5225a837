"""Exchanges that lie across nodes in other ways than one EP group over all ranks."""

import gc
from dataclasses import replace

import pytest
import torch.distributed as dist
from layers import (
    Case,
    build_layer,
    compare,
    error_of,
    forward_backward,
    gathered,
    reported,
    variable_of_rank,
)
from pool import Pools, on_ranks

import monta_megatron
from monta_megatron.core import Layout
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import uncalibrated

HIERARCHICAL = Case(chain="hierarchical_alltoall")


@pytest.mark.parametrize(
    ("world_size", "case"),
    [
        # Context parallel ranks share an EP group: the tokens of one sequence on both.
        (4, replace(HIERARCHICAL, cp=2)),
        # As --use-tp-pp-dp-mapping does.
        (8, replace(HIERARCHICAL, tp=4, pp=2, order="tp-cp-ep-pp-dp")),
        # Two EP groups in one node, and two that share two nodes.
        (4, replace(HIERARCHICAL, ep=2, ranks_per_node=4)),
        (8, HIERARCHICAL),
        # EP 3 on nodes of 2: the second group starts in the middle of a node.
        (6, Case(ep=3, chain="alltoall_dedup", ranks_per_node=None)),
        (6, Case(ep=3, chain="allgather")),
    ],
)
def test_layer_equals_stock(pools: Pools, world_size: int, case: Case) -> None:
    pools[world_size].run(compare, case, (1, 3))


@on_ranks(6)
def test_one_exchange_refuses_for_all() -> None:
    """EP 3 on nodes of 2 and 4 ranks: only the first of two exchanges lies on uneven nodes."""
    with variable_of_rank("NCCL_HOSTID", "aabbbb"):
        refusal = error_of(build_layer, replace(HIERARCHICAL, ep=3, ranks_per_node=None))
    rank = dist.get_rank()
    where = "" if rank < 3 else f" (in the expert group of rank {rank - 3})"
    assert refusal == (
        "moe_monta_chain: hierarchical_alltoall cannot run here: the ranks of the exchange lie on "
        f"nodes [0, 0, 1], not evenly in order{where}"
    )


@pytest.mark.parametrize(
    ("named", "other"),
    # On one rank of an exchange; on all ranks of one exchange and on none of the other.
    [([1], 1), ([0, 1], 2)],
)
@on_ranks(4)
def test_names_of_nodes_on_some_ranks_only(named: list[int], other: int) -> None:
    names = ["a" if rank in named else "" for rank in range(4)]
    with variable_of_rank("MONTA_NODE", names):
        refusal = error_of(build_layer, Case(ep=2, ranks_per_node=None))
    assert "differ in whether MONTA_NODE is set" in refusal
    first = f"moe_monta: ranks 0 and {other} differ in whether MONTA_NODE is set: "
    assert dist.get_rank() > 0 or refusal.startswith(first)


CLUSTER = uncalibrated(Layout(ep=4, etp=1, num_local_experts=1, rank=0, nodes=(0, 0, 1, 1)), "H100")
RACK = replace(CLUSTER, ranks_per_host=1)


@pytest.mark.parametrize(
    ("cluster", "names", "variable", "ranks_per_node", "nodes"),
    [
        # A node of two hosts is for the file to say.
        (RACK, "abcd", "NCCL_HOSTID", None, (0, 0, 1, 1)),
        # Else each host is one: used in part, larger, or with ranks dealt out in turn.
        (CLUSTER, "abcd", "NCCL_HOSTID", None, (0, 1, 2, 3)),
        (CLUSTER, "aaaa", "NCCL_HOSTID", None, (0, 0, 0, 0)),
        (CLUSTER, "abab", "NCCL_HOSTID", None, (0, 1, 0, 1)),
        (CLUSTER, "bbaa", "NCCL_HOSTID", None, (0, 0, 1, 1)),
        # Names given by the user come before the file, but not before the option.
        (CLUSTER, "abbb", "MONTA_NODE", None, (0, 1, 1, 1)),
        (CLUSTER, "abbb", "MONTA_NODE", 2, (0, 0, 1, 1)),
        (CLUSTER, "abab", "NCCL_HOSTID", 2, (0, 0, 1, 1)),
    ],
)
@on_ranks(4)
def test_a_cluster_file_and_the_hosts(
    cluster: Cluster, names: str, variable: str, ranks_per_node: int | None, nodes: tuple[int, ...]
) -> None:
    with variable_of_rank(variable, names):
        layer = build_layer(Case(ranks_per_node=ranks_per_node, options={"cluster": cluster}))
    assert layer.token_dispatcher.setup.layout.nodes == nodes


@on_ranks(4)
def test_every_pipeline_stage_reports_its_choice() -> None:
    """Rank 0 may be of a stage without MoE layers."""
    found = gathered(reported(replace(HIERARCHICAL, ep=2, pp=2)))
    chain = "hierarchical_alltoall in 4 chunks, EP 2 x ETP 1 over 1 node: as asked for"
    assert found == [[f"monta: {chain}"], [], [f"monta, rank 2: {chain}"], []]


@on_ranks(4)
def test_statistics_of_a_model_are_those_of_its_layers() -> None:
    """Of two layers that have run; a third is gone."""
    # Those of other tests.
    gc.collect()
    before = len(monta_megatron.statistics())
    layers = [build_layer(HIERARCHICAL) for _ in range(3)]
    for number, layer in enumerate(layers):
        layer.set_layer_number(1001 - number)
    del layers[2:], layer
    gc.collect()
    for number_of_runs, layer in enumerate(layers, start=1):
        for _ in range(number_of_runs):
            forward_backward(HIERARCHICAL, layer)
    *others, second, first = monta_megatron.statistics()
    assert len(others) == before
    for number, (layer, found) in enumerate(zip(layers, (first, second), strict=True)):
        assert found.layer_number == 1001 - number
        assert found.choice.name == "hierarchical_alltoall in 4 chunks"
        sent = {"inter": found.inter_bytes, "intra": found.intra_bytes}
        assert sent == layer.token_dispatcher.monitor.bytes_by_resource()
    # Known from the second exchange on; the same tokens in every step.
    assert first.busiest_over_mean is None and 1 <= second.busiest_over_mean < 2
    assert second.inter_bytes == 2 * first.inter_bytes > 0
    assert second.intra_bytes == 2 * first.intra_bytes > 0


@on_ranks(4)
def test_megatron_changes_the_time_limit_of_our_groups_too() -> None:
    from megatron.core import parallel_state

    groups = build_layer(HIERARCHICAL).token_dispatcher.groups
    changed = parallel_state._global_process_group_list
    # Twice would do no harm, but would grow with the layers.
    once = [name for name, group in groups.items() if changed.count(group.process_group) == 1]
    assert once == ["node", "rail"]
