"""Groups that are destroyed and made again, passes that are abandoned, and what else changes.

docs/limits.md says of each what it gives.
"""

import pytest
from free_ports import free_ports
from layers import Case
from lifecycles import (
    abandon_and_change,
    another_layout,
    built_again,
    compiled,
    copies,
    moved,
    restarted,
    retained,
    sleep_and_wake,
    two_models,
)
from pool import Pool, Pools
from test_auto import AUTO

HIERARCHICAL = {"moe_monta_chain": "hierarchical_alltoall", "moe_monta_ranks_per_node": 2}
DESTROYED = (
    "moe_monta: the process groups that this model was built with were destroyed; build it again "
    "with those of now"
)
CANNOT = "cannot pickle 'torch._C._distributed_c10d.ProcessGroup' object"


@pytest.mark.old_end
@pytest.mark.parametrize(
    ("case", "ours_of_rank"),
    [
        # Two chains with a rail and a node each.
        (Case(ep=4, options={"moe_monta_ranks_per_node": 2}), [4] * 4),
        # The first stage is dense.
        (Case(ep=2, pp=2, options={"moe_monta_ranks_per_node": 1}), [0, 0, 4, 4]),
    ],
)
def test_groups_that_are_wrapped_destroyed_and_made_again(
    pools: Pools, case: Case, ours_of_rank: list[int]
) -> None:
    found = pools[4].run(sleep_and_wake, case, [False, True])
    assert found == [[(4.0, ours), (4.0, 0)] for ours in ours_of_rank]


def test_another_layout(pools: Pools) -> None:
    first, second = Case(ep=4, options=HIERARCHICAL), Case(ep=2, etp=2, topk=3)
    assert pools[4].run(another_layout, first, second) == [DESTROYED] * 4


def test_a_chain_changes_after_an_abandoned_pass(pools: Pools) -> None:
    pools[4].run(abandon_and_change, Case(options=AUTO | {"moe_monta_tune_steps": 0}))


def test_two_models_in_a_process(pools: Pools) -> None:
    case = Case(options={"moe_monta_ranks_per_node": 2})
    pools[4].run(two_models, case, ["hierarchical_alltoall", "alltoall_allgather"])


def test_a_model_that_is_built_again(pools: Pools) -> None:
    pools[4].run(built_again, Case(options=AUTO))


def test_copies_of_a_layer_are_refused_as_stocks_are(pools: Pools) -> None:
    assert pools[4].run(copies, Case(options=HIERARCHICAL)) == [[[CANNOT] * 2] * 2] * 4


@pytest.mark.parametrize("chain", ["alltoall_allgather", "hierarchical_alltoall"])
def test_a_graph_is_kept(pools: Pools, chain: str) -> None:
    pools[4].run(retained, Case(options={**HIERARCHICAL, "moe_monta_chain": chain}))


def test_a_compiled_layer(pools: Pools) -> None:
    pools[4].run(compiled, Case(options=HIERARCHICAL))


def test_a_process_begins_anew_after_an_abandoned_pass() -> None:
    # So long a rank waits for the one that has left.
    pool = Pool(2, group_limit_s=5.0)
    try:
        case = Case(ep=2, options={**AUTO, "moe_monta_ranks_per_node": 1})
        assert pool.run(restarted, case, free_ports(1)[0]) == [DESTROYED] * 2
    finally:
        pool.close()


def test_ranks_that_were_moved_to_other_nodes(pools: Pools) -> None:
    case = Case(options={"moe_monta_chain": "hierarchical_alltoall"})
    placements = ["aabb", "aaaa", "abcd", "bbaa"]
    found = pools[4].run(moved, case, placements)
    assert found == [[(0, 0, 1, 1), (0, 0, 0, 0), (0, 1, 2, 3), (0, 0, 1, 1)]] * 4
