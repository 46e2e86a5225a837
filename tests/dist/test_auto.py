"""The planner chooses: every rank alike, whatever its own tokens, and as often as they change."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from layers import (
    Case,
    compare_steps,
    disagree_in_communicators,
    disagree_later,
    error_of,
    refusal_of,
    reported,
    rows_to_choose_from,
    tokens_decided_by,
)
from pool import Pools

from monta_megatron.common import strict_yaml
from monta_megatron.planner.cluster import Cluster

CLUSTER = Path(__file__).parents[2] / "configs/clusters/emulated_2x4_500mbit.yaml"


def with_short_starts(cluster: Cluster) -> Cluster:
    """Costs at which the answer depends on the number of rows of 64 bytes."""
    short = {
        name: replace(link, start_us=link.start_us / 30)
        for name in ("network", "node_link", "memory")
        if (link := getattr(cluster, name))
    }
    return replace(cluster, **short, host=replace(cluster.host, collective_us=5.0))


# 2 nodes of 2 ranks.
AUTO: dict[str, Any] = {
    "moe_monta_chain": "auto",
    "moe_monta_cluster": with_short_starts(strict_yaml.load(Cluster, CLUSTER)),
    "moe_monta_ranks_per_node": 2,
}
# Nothing is tuned.
PICKED = AUTO | {"moe_monta_tune_steps": 0}
TOKENS = [[0, 1, 100, 4096], [4096, 0, 1, 100], [1, 0, 1, 1], [0, 0, 0, 0], [100, 4096, 0, 1]]


@pytest.mark.parametrize("recompute", [{}, {"recompute_granularity": "selective"}])
@pytest.mark.parametrize(
    "case", [Case(tp=2, topk=3, options=PICKED), Case(ep=2, etp=2, options=PICKED)]
)
def test_unequal_tokens_changing_every_step(
    pools: Pools, case: Case, recompute: dict[str, str]
) -> None:
    config = {**recompute, "recompute_modules": ["moe"]} if recompute else {}
    by_rank = pools[4].run(compare_steps, Case(**{**vars(case), "config": config}), None, TOKENS)
    assert all(choices == by_rank[0] for choices in by_rank)
    assert len(set(by_rank[0])) > 1, "one answer for 1 and for 4,096 tokens"


def test_the_planners_pick_is_said_once(pools: Pools) -> None:
    case = Case(ep=4, num_tokens=4096, options=AUTO | {"moe_monta_tune_steps": 0})
    said, *others = pools[4].run(reported, case, True)
    no_tuning, pick = said
    assert no_tuning.startswith("monta: auto: no tuning, the planner's pick runs: ")
    assert re.match(
        r"monta: auto, .+ nodes: \w+ in \d chunks?, planned on .+ for up to 4,096 tokens", pick
    )
    assert others == [[]] * 3


FIXED = {"moe_monta_chain": "alltoall_allgather"}
# Other costs under the same name.
DEARER = replace(
    AUTO["moe_monta_cluster"], host=replace(AUTO["moe_monta_cluster"].host, operation_us=1.0)
)
NAMED = {"moe_monta_chain": "hierarchical_allgather"}
TWO = NAMED | {"moe_monta_ranks_per_node": 2}


@pytest.mark.parametrize(
    ("common", "other", "message"),
    [
        (FIXED, {"options": {"moe_monta_num_chunks": 3}}, "moe_monta_num_chunks: 4 and 3"),
        (
            FIXED,
            {"options": {"moe_monta_chain": "auto"}},
            "moe_monta_chain: alltoall_allgather and auto",
        ),
        (AUTO, {"options": {"moe_monta_tune_steps": 6}}, "moe_monta_tune_steps: 24 and 6"),
        (AUTO, {"options": {"moe_monta_cluster": DEARER}}, "hash of the costs: "),
        *(
            (common, other, message)
            for common in (FIXED, {"moe_monta_chain": "auto"})
            for other, message in (
                ({"hidden": 32}, "hidden_size: 16 and 32"),
                ({"topk": 3}, "moe_router_topk: 2 and 3"),
                ({"dtype": "bfloat16"}, "params_dtype: torch.float32 and torch.bfloat16"),
            )
        ),
        (TWO, {"options": {"moe_monta_ranks_per_node": 1}}, "moe_monta_ranks_per_node: 2 and 1"),
        # One that goes by its host, among others that have the option.
        (
            TWO,
            {"options": {"moe_monta_ranks_per_node": None}},
            "moe_monta_ranks_per_node: 2 and None",
        ),
    ],
)
def test_ranks_that_differ_are_told(
    pools: Pools, common: dict[str, Any], other: dict[str, Any], message: str
) -> None:
    """All of them, as a layer is built."""
    case = Case(options=common)
    differs = replace(case, **{**other, "options": common | other.get("options", {})})
    for refusal in pools[4].run(refusal_of, [case, case, differs, case], [{}] * 4):
        assert refusal.startswith(f"moe_monta: ranks 0 and 2 differ in {message}")
        assert refusal.endswith("; give every rank the same options and files")


def test_ranks_with_other_communicator_settings_are_told(pools: Pools) -> None:
    """Before groups are made that are named by them, for which the ranks would wait."""
    for error in pools[4].run(error_of, disagree_in_communicators, Case(), [16, 16, 32, 16]):
        assert "differ in max_ctas of ep (--nccl-communicator-config-path): 16 and 32; " in error


def test_ranks_that_come_to_differ_are_told_before_they_exchange(pools: Pools) -> None:
    case = Case(options={"moe_monta_chain": "alltoall_dedup"})
    for error in pools[4].run(error_of, disagree_later, case, 2):
        assert "ranks 0 and 2 differ in moe_monta_num_chunks: 2 and 3" in error


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
