"""The planner chooses: every rank alike, whatever its own tokens, and as often as they change."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Pools
from layers import (
    Case,
    compare_steps,
    disagree,
    disagree_in_communicators,
    disagree_later,
    lookup_us,
    refusal_of,
    reported_in_steps,
    rows_to_choose_from,
    tokens_decided_by,
)
from pool import PoolError

from monta_megatron.common import strict_yaml
from monta_megatron.planner.chain_policy import bucket_of
from monta_megatron.planner.cluster import Cluster

CLUSTER = Path(__file__).parents[2] / "configs/clusters/emulated_2x4_500mbit.yaml"


def with_short_starts(cluster: Cluster) -> Cluster:
    """Costs at which the answer depends on the number of rows of 64 bytes."""
    links = (replace(link, alpha_us=link.alpha_us / 30) for link in cluster.links)
    return replace(cluster, links=tuple(links), launch=replace(cluster.launch, collective_us=5.0))


# 2 nodes of 2 ranks.
AUTO = {
    "moe_monta_chain": "auto",
    "moe_monta_cluster": with_short_starts(strict_yaml.load(Cluster, CLUSTER)),
    "moe_monta_ranks_per_node": 2,
}
TOKENS = [[0, 1, 100, 4096], [4096, 0, 1, 100], [1, 0, 1, 1], [0, 0, 0, 0], [100, 4096, 0, 1]]


@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "selective"}])
@pytest.mark.parametrize(
    "case", [Case(tp=2, topk=3, options=AUTO), Case(ep=2, etp=2, options=AUTO)]
)
def test_unequal_tokens_changing_every_step(
    pools: Pools, case: Case, recompute: dict[str, str]
) -> None:
    config = {**recompute, "recompute_modules": ["moe"]} if recompute else {}
    by_rank = pools[4].run(compare_steps, Case(**{**vars(case), "config": config}), None, TOKENS)
    assert all(decisions == by_rank[0] for decisions in by_rank)
    assert len(set(by_rank[0])) > 1, "one answer for 1 and for 4,096 tokens"


def test_the_benefit_is_said_once_with_the_choice(pools: Pools) -> None:
    case = Case(ep=4, num_tokens=4096, options=AUTO)
    (first, num_exchanges), *others = pools[4].run(reported_in_steps, case, 3)
    assert num_exchanges == 2
    chain, benefit = first
    assert chain.startswith("monta: chain ") and "planned on" in chain
    assert re.fullmatch(
        r"monta: \d\.\d\dx stock alltoall: saves [\d.]+ ms x 2 MoE layers x 3 micro-batches = "
        r"[\d.]+ ms per iteration \(\d+% of the exchange's predicted time\)",
        benefit,
    )
    assert others == [([], 2)] * 3


def test_ranks_that_would_choose_differently_are_told(pools: Pools) -> None:
    with pytest.raises(PoolError, match="ranks 0 and 2 differ in num_chunks: 4 and 3"):
        pools[4].run(disagree, Case(), {2: {"moe_monta_num_chunks": 3}})
    with pytest.raises(
        PoolError, match="ranks 0 and 1 differ in chain: alltoall_allgather and auto"
    ):
        pools[4].run(disagree, Case(), {1: {"moe_monta_chain": "auto"}})
    auto = Case(options={"moe_monta_chain": "auto"})
    with pytest.raises(PoolError, match="differ in moe_monta_tune_steps: 20 and 5"):
        pools[4].run(disagree, auto, {1: {"moe_monta_tune_steps": 5}})
    # Other costs under the same name.
    cluster = AUTO["moe_monta_cluster"]
    dearer = replace(cluster, launch=replace(cluster.launch, operation_us=1.0))
    clusters = [{"moe_monta_cluster": each} for each in (cluster, dearer, cluster, cluster)]
    with pytest.raises(PoolError, match="ranks 0 and 1 differ in hash of the costs: "):
        pools[4].run(disagree, auto, dict(enumerate(clusters)))


@pytest.mark.parametrize("chain", ["alltoall_allgather", "auto"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 32}, "ranks 0 and 2 differ in hidden_size: 16 and 32"),
        ({"topk": 3}, "ranks 0 and 2 differ in moe_router_topk: 2 and 3"),
        ({"dtype": "bfloat16"}, "ranks 0 and 2 differ in value_bytes: 4 and 2"),
        (
            {"options": {"moe_monta_wire_dtype": "fp8"}},
            "ranks 0 and 2 differ in moe_monta_wire_dtype: None and fp8",
        ),
    ],
)
def test_ranks_that_exchange_other_rows_are_told(
    pools: Pools, chain: str, changes: dict[str, Any], message: str
) -> None:
    case = Case(options={"moe_monta_chain": chain})
    options = case.options | changes.get("options", {})
    other = replace(case, **{**changes, "options": options})
    refusals = pools[4].run(refusal_of, [case, case, other, case], [{}] * 4)
    assert refusals == [f"moe_monta: {message}; give every rank the same options and files"] * 4


def test_ranks_with_other_communicator_settings_are_told(pools: Pools) -> None:
    """Before groups are made that are named by them, for which the ranks would wait."""
    with pytest.raises(PoolError) as error:
        pools[4].run(disagree_in_communicators, Case(), [16, 16, 32, 16])
    assert (
        "ranks 0 and 2 differ in max_ctas of ep (--nccl-communicator-config-path): 16 and 32; give "
        "every rank the same options and files"
    ) in str(error.value)


def test_ranks_that_come_to_differ_are_told_before_they_exchange(pools: Pools) -> None:
    case = Case(options={"moe_monta_chain": "alltoall_dedup"})
    with pytest.raises(PoolError, match="ranks 0 and 2 differ in num_chunks: 2 and 3"):
        pools[4].run(disagree_later, case, 2)


def test_ranks_that_see_other_nodes_are_told(pools: Pools) -> None:
    chain = {"moe_monta_chain": "hierarchical_allgather"}
    two, one = (chain | {"moe_monta_ranks_per_node": number} for number in (2, 1))
    with pytest.raises(PoolError, match="ranks 0 and 3 differ in ranks_per_node: 2 and 1"):
        pools[4].run(disagree, Case(), {0: two, 1: two, 2: two, 3: one})
    # One that has the option, among others that go by their hosts.
    with pytest.raises(PoolError, match="ranks 0 and 1 differ in ranks_per_node: 2 and None"):
        pools[4].run(disagree, Case(), {0: two, 1: chain, 2: chain, 3: chain})
    # The same nodes, but only a rank with the cluster file would end if the hosts were dealt out.
    filed = chain | {"moe_monta_cluster": AUTO["moe_monta_cluster"]}
    four = chain | {"moe_monta_ranks_per_node": AUTO["moe_monta_cluster"].ranks_per_node}
    with pytest.raises(
        PoolError, match="ranks 0 and 1 differ in the cluster of ranks_per_node: None and "
    ):
        pools[4].run(disagree, Case(), {0: four, 1: filed, 2: four, 3: four})


def test_padded_to_capacity_all_ranks_choose_for_as_many_tokens(pools: Pools) -> None:
    config = {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}
    # Of 8 experts each takes 4 pairs from every rank: ceil(29 * 2 / 8 / 2) = 32 * 2 / 8 / 2.
    case = Case(routing="router", options=AUTO, config=config)
    found = pools[4].run(tokens_decided_by, case, [30, 31, 32, 29])
    assert found == [[32]] * 4


def test_auto_takes_permuted_tokens_where_cuda_graphs_capture(pools: Pools) -> None:
    for captures, rows in ((False, {"permuted tokens", "tokens"}), (True, {"permuted tokens"})):
        found = pools[4].run(rows_to_choose_from, Case(options=AUTO), captures)
        assert found == [rows] * 4


def test_buckets_are_half_octaves() -> None:
    assert [bucket_of(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 9, 13, 100, 4096, 4097)] == [
        *(1, 1, 2, 3, 4, 6, 6, 8, 12, 16, 128, 4096, 6144)
    ]


def test_a_choice_that_was_made_costs_nothing(pools: Pools) -> None:
    # 20 us at most; measured far below, so that a busy machine does not fail it.
    assert min(pools[4].run(lookup_us, Case(options=AUTO))) < 20
