"""From a configuration to a choice of chain."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monta_megatron.chains.layout import Layout
from monta_megatron.common import strict_yaml
from monta_megatron.integration.options import Options
from monta_megatron.integration.policy import agreed_config_of, policy_for
from monta_megatron.planner.chain_policy import PlannedPolicy
from monta_megatron.planner.cluster import Cluster
from monta_megatron.planner.cluster_file import uncalibrated
from monta_megatron.planner.plan import plan
from monta_megatron.planner.workload import Workload

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
    def workload(**changes: Any) -> Workload:
        choice = policy_for(Options(), config(**changes), LAYOUT, permuted_only=False)
        assert isinstance(choice, PlannedPolicy)
        return choice.workload

    plain = workload()
    assert (plain.hidden_size, plain.value_bytes, plain.prob_bytes) == (64, 2, 2)
    assert workload(moe_latent_size=12).hidden_size == 12
    assert workload(moe_router_dtype="fp32").prob_bytes == 4
    assert workload(moe_router_dtype="fp64").prob_bytes == 8
    assert workload(params_dtype=torch.float32).value_bytes == 4
    limited = workload(moe_router_num_groups=4, moe_router_group_topk=2)
    assert (limited.routing.num_groups, limited.routing.group_topk) == (4, 2)
    # With 2 groups on each of 2 nodes, a token crosses less often if it may take only 2 of them.
    assert limited.routing.hits(2).sum() < plain.routing.hits(2).sum()


def test_auto_permutes_where_tokens_cannot_be_sent() -> None:
    pairs = policy_for(Options(), config(), LAYOUT, permuted_only=True)
    assert {chain.rows for chain in pairs.chains} == {"permuted tokens"}
    both = policy_for(Options(), config(), LAYOUT, permuted_only=False)
    assert {chain.rows for chain in both.chains} == {"permuted tokens", "tokens"}


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
        assert ("calibrated in 1 round" in plan(choice.workload, costs).notes) is said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 128}, "hidden_size: the plan is for 64, used with 128"),
        ({"moe_latent_size": 32}, "hidden_size: the plan is for 64, used with 32"),
        ({"moe_router_topk": 1}, "topk: the plan is for 2, used with 1"),
        ({"num_moe_experts": 16}, "num_experts: the plan is for 8, used with 16"),
        ({"params_dtype": torch.float32}, "value_bytes: the plan is for 2, used with 4"),
    ],
)
def test_a_plan_for_another_model_is_refused(changes: dict[str, Any], said: str) -> None:
    auto = policy_for(Options(), config(), LAYOUT, permuted_only=False)
    assert isinstance(auto, PlannedPolicy)
    given = Options(plan=plan(replace(auto.workload, tokens_per_rank=512), auto.cluster))
    assert policy_for(given, config(), LAYOUT, permuted_only=False)
    with pytest.raises(ValueError, match=rf"^moe_monta_plan: key\.{said}"):
        policy_for(given, config(**changes), LAYOUT, permuted_only=False)


def test_a_memory_limit() -> None:
    large = config(hidden_size=4096)
    costs = uncalibrated(LAYOUT, "H100")

    def chosen(limit_gb: float | None) -> tuple[str, str]:
        options = Options(memory_limit_gb=limit_gb, cluster=costs)
        choice = policy_for(options, large, LAYOUT, permuted_only=False).choose(8192)
        return choice.chain.name, choice.reason

    def held_gb(reason: str) -> float:
        return float(reason.split("holds up to ")[1].split()[0])

    fastest, reason = chosen(None)
    free_gb = held_gb(reason)
    assert chosen(free_gb * 1.01)[0] == fastest
    # Just below what the fastest one holds there are others.
    other, reason = chosen(free_gb * 0.99)
    assert other != fastest or held_gb(reason) < free_gb
    assert held_gb(reason) <= free_gb and "over the limit" not in reason
    # Where there are none, a training that has come to larger batches goes on with the least.
    least, reason = chosen(free_gb / 100)
    # It holds a window of chunks, where `alltoall` holds all rows as they arrive.
    assert least == "alltoall_allgather" and "; over the limit of 0." in reason


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
    ("options", "message"),
    [
        ({"memory_limit_gb": 0.0}, "got 0.0, must be a number > 0"),
        ({"memory_limit_gb": "much"}, "got 'much', must be a number > 0"),
        ({"memory_limit_gb": float("nan")}, "got nan, must be a number > 0"),
        ({"memory_limit_gb": 2.0, "chain": "alltoall"}, "must be left out where a flag or a plan"),
    ],
)
def test_bad_memory_limits(options: dict[str, Any], message: str) -> None:
    fields = {f"moe_monta_{name}": value for name, value in options.items()}
    with pytest.raises(ValueError, match=f"moe_monta_memory_limit_gb: .*{message}"):
        Options.of(SimpleNamespace(**fields))


SHARED = {"moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 64}
OVERLAP = {"overlap_moe_expert_parallel_comm": True}


def test_other_work_is_planned_beside() -> None:
    large = config(num_moe_experts=128, moe_router_topk=8, hidden_size=4096)
    layout = Layout(
        ep=16, etp=1, num_local_experts=8, rank=0, nodes=tuple(rank // 8 for rank in range(16))
    )
    for setting in (SHARED, OVERLAP):
        options = Options.of(SimpleNamespace(moe_monta_overlapped_compute_us=2000, **setting))
        assert options.overlaps == (next(iter(setting)),)
        policy = policy_for(options, large, layout, permuted_only=False)
        assert isinstance(policy, PlannedPolicy)
        workload = replace(policy.workload, tokens_per_rank=2048)
        planned = plan(workload, policy.cluster)
        beside = plan(workload, policy.cluster, overlapped_compute_us=2000)
        choice = policy.choose(2048)
        assert (choice.chain.name, choice.num_chunks) == (beside.chain, beside.num_chunks)
        assert beside.exposed_us != planned.exposed_us
        assert "2,048 tokens per rank beside 2,000 us of computation: " in choice.reason
        assert " us, exposes " in choice.reason
        assert choice.benefit is None
        # Ranks agree on it.
        agreed = SimpleNamespace(**vars(large), **setting, moe_monta_overlapped_compute_us=2000)
        assert agreed_config_of(policy, agreed, layout)["moe_monta_overlapped_compute_us"] == 2000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"overlapped_compute_us": "long"}, "got 'long', must be a number >= 0"),
        ({"overlapped_compute_us": -1.0}, "got -1.0, must be a number >= 0"),
        ({"overlapped_compute_us": float("inf")}, "got inf, must be a number >= 0"),
        (
            {"overlapped_compute_us": 100.0, "chain": "alltoall"},
            "must be 0 or left out where a flag or a plan",
        ),
    ],
)
def test_bad_other_work(fields: dict[str, Any], message: str) -> None:
    options = {f"moe_monta_{name}": value for name, value in fields.items()}
    with pytest.raises(ValueError, match=f"^moe_monta_overlapped_compute_us: .*{message}"):
        Options.of(SimpleNamespace(**options, **OVERLAP))


@pytest.mark.parametrize("fields", [{}, {"moe_shared_expert_overlap": True}])
def test_other_work_needs_a_setting_that_runs_it(fields: dict[str, Any]) -> None:
    """Overlapped shared experts are none where there are no shared experts."""
    assert (
        Options.of(
            SimpleNamespace(moe_monta_overlapped_compute_us=0, **fields)
        ).overlapped_compute_us
        == 0
    )
    message = (
        "^moe_monta_overlapped_compute_us: got 100.0, must be 0 or left out without "
        "overlap_moe_expert_parallel_comm or moe_shared_expert_overlap, as nothing hides the "
        "exchange then$"
    )
    with pytest.raises(ValueError, match=message):
        Options.of(SimpleNamespace(moe_monta_overlapped_compute_us=100.0, **fields))


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


def test_a_plan_is_written_by_a_tuning_alone(tmp_path: Path) -> None:
    out = {"moe_monta_plan_out": str(tmp_path / "plan.yaml")}
    assert Options.of(SimpleNamespace(**out)).plan_out == str(tmp_path / "plan.yaml")
    for fields in ({"deterministic_mode": True}, {"moe_monta_chain": "alltoall"}):
        with pytest.raises(ValueError, match=r"^moe_monta_plan_out: got .*, must be left out with"):
            Options.of(SimpleNamespace(**out, **fields))
    choice = policy_for(Options(), config(), LAYOUT, permuted_only=False)
    assert isinstance(choice, PlannedPolicy)
    plan(choice.workload, choice.cluster).save(tmp_path / "given.yaml")
    for fields in ({"moe_monta_tune_steps": 5}, out):
        with pytest.raises(ValueError, match=rf"^{next(iter(fields))}: got .*, must be "):
            Options.of(SimpleNamespace(moe_monta_plan=str(tmp_path / "given.yaml"), **fields))


def test_files_are_read_once_unless_they_change(tmp_path: Path) -> None:
    """Every layer makes its options."""
    cluster, plan_file = tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    cluster.write_bytes((CONFIGS / "clusters" / "a800_2x8_ib200.yaml").read_bytes())
    choice = policy_for(Options(), config(), LAYOUT, permuted_only=False)
    assert isinstance(choice, PlannedPolicy)
    plan(choice.workload, choice.cluster).save(plan_file)
    for name, path in (("cluster", cluster), ("plan", plan_file)):
        given = SimpleNamespace(**{f"moe_monta_{name}": str(path)})
        found = getattr(Options.of(given), name)
        assert getattr(Options.of(given), name) is found
        os.utime(path, ns=(1, 1))
        again = getattr(Options.of(given), name)
        assert again == found and again is not found
