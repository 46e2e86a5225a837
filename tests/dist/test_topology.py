"""Exchanges that lie across nodes in other ways than one EP group over all ranks."""

import pytest
from conftest import Pools
from layers import Case
from pool import PoolError

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
    pools[world_size].run("layers:compare", case, CHUNKS)


def test_uneven_nodes_are_refused_where_the_chain_needs_rails(pools: Pools) -> None:
    case = Case(ep=3, options=HIERARCHICAL)
    with pytest.raises(PoolError, match=r"lie on nodes \[0, 0, 1\], not evenly in order"):
        pools[6].run("layers:compare", case, CHUNKS)


def test_ranks_tell_each_other_their_nodes(pools: Pools) -> None:
    # Each rank knows its own node alone, as torchrun and srun tell it.
    assert pools[4].run("layers:nodes_found", ["a", "a", "b", "b"]) == [(0, 0, 1, 1)] * 4


@pytest.mark.old_end
def test_a_group_made_by_its_members_alone_disturbs_no_other(pools: Pools) -> None:
    """As where a pipeline stage has no MoE layers: the next group of all ranks still meets."""
    assert pools[4].run("layers:sums_around_a_local_group") == [(1, 6), (1, 6), (5, 6), (5, 6)]
