"""A lost rank ends the others in bounded time with a name; nothing grows over many steps."""

import pytest
from layers import Case, die_in_dispatch, end_in_exchange_of_counts, many_steps
from pool import Pool, Pools

import monta_megatron

CASE = Case(ep=4, num_local_experts=2, options={"moe_monta_ranks_per_node": 2})
# What Megatron gives its groups here, and the rails and nodes inherit.
GROUP_LIMIT_S = 10.0


@pytest.mark.parametrize(
    ("chain", "group", "stops"),
    [("alltoall_allgather", "ep", True), ("hierarchical_alltoall", "rail|node", False)],
)
def test_a_lost_rank_is_reported_by_stage_chunk_and_group(
    chain: str, group: str, stops: bool
) -> None:
    """Killed, or stopped by SIGSTOP: its connections stay open, and nothing answers."""
    pool = Pool(4, group_limit_s=GROUP_LIMIT_S)
    case = Case(
        ep=4,
        num_local_experts=2,
        options={"moe_monta_chain": chain, "moe_monta_ranks_per_node": 2},
    )
    try:
        answers = pool.run_on_survivors(die_in_dispatch, case, 4, 3, stops)
    finally:
        pool.close()
    assert sorted(answers) == [0, 1, 2]
    for rank, (message, seconds) in answers.items():
        assert seconds < GROUP_LIMIT_S + 5.0
        # A rank may wait for the dead one, or for one that waits for it.
        assert f"chain {chain}, stage " in message
        assert "chunk " in message and " of 4" in message
        assert any(f"group {name}" in message for name in group.split("|"))
        assert f"; monta-megatron {monta_megatron.__version__}, megatron-core " in message
        if stops:
            # Of pack, alltoall, pack, alltoall, put, pack, alltoall, put, ...: the eighth waits for
            # the second chunk's AllToAll, to which the lost rank has not come.
            assert message.startswith(
                f"dispatch: chain {chain}, stage alltoall, chunk 2 of 4, group ep (rank {rank} of "
                "4) failed: "
            )
            assert (
                "\nlast started: operation 7 of 12, alltoall, stage alltoall, chunk 3 of 4, group "
                f"ep (rank {rank} of 4); last ended: operation 6 of 12, pack, stage pack, chunk 3 "
                "of 4; monta-megatron "
            ) in message


@pytest.mark.parametrize(("chain", "stops"), [("alltoall_allgather", False), ("auto", True)])
def test_a_rank_that_ends_or_stops_in_the_exchange_of_counts(chain: str, stops: bool) -> None:
    limit_s = 10.0
    pool = Pool(4, group_limit_s=limit_s)
    case = Case(ep=4, options={"moe_monta_chain": chain, "moe_monta_ranks_per_node": 2})
    try:
        answers = pool.run_on_survivors(end_in_exchange_of_counts, case, 3, stops)
    finally:
        pool.close()
    assert sorted(answers) == [0, 1, 2]
    for rank, (message, seconds) in answers.items():
        assert seconds < limit_s + 5.0
        assert message.startswith(
            f"exchange of counts: chain {chain}, group tp_ep (rank {rank} of 4: "
            "ranks 0, 1, 2, 3) failed: "
        )
        assert "\nno pass is under way; monta-megatron " in message


@pytest.mark.parametrize("chain", ["hierarchical_alltoall"])
def test_many_steps_grow_nothing(pools: Pools, chain: str) -> None:
    case = Case(
        ep=4,
        num_local_experts=2,
        options={"moe_monta_chain": chain, "moe_monta_ranks_per_node": 2},
    )
    for samples in pools[4].run(many_steps, case, 2, 500, limit_s=240.0):
        # The first quarter warms up allocators and caches.
        _, second, _, last = samples["memory_bytes"]
        assert last - second < 5 * 2**20
        for name in ("threads", "groups", "tensors"):
            assert len(set(samples[name][1:])) == 1, f"{name}: {samples[name]}"
