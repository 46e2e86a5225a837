"""Experts inside the pipeline (--moe-monta-overlap-experts), against stock's layer."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Pools
from layers import (
    Case,
    compare_steps,
    compare_width,
    compare_without_gradient,
    replay_cuda_graph_attributes,
)
from overlap import (
    compare_frozen,
    compare_recomputed,
    compare_split,
    compare_trainings,
    state_dict_keys,
)

from monta_megatron.integration.overlapped_experts import (
    RUNS_WITH_OVERLAP,
    UNSUPPORTED_WITH_OVERLAP,
    check_experts,
)
from monta_megatron.integration.supported_settings import RUNS, check_supported

pytestmark = pytest.mark.old_end

# Every chain whose rows are tokens, on 2 nodes of 2 ranks.
CASES = [
    Case(
        tp=2,
        ep=2 if etp == 2 else 4,
        etp=etp,
        num_local_experts=2,
        options={
            "moe_monta_chain": chain,
            "moe_monta_ranks_per_node": 2,
            "moe_monta_overlap_experts": True,
        },
    )
    for chain, etp in (
        ("allgather", 2),
        ("alltoall_dedup", 1),
        ("hierarchical_allgather", 2),
        ("hierarchical_alltoall", 1),
    )
]
CHUNKS = [1, 3]
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=CASES, ids=lambda case: case.options["moe_monta_chain"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def check(pools: Pools, case: Case, **config: Any) -> None:
    pools[4].run(compare_split, dataclasses.replace(case, config=config), CHUNKS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "routing",
    ["router", "uniform", "rank0_empty", "expert0_empty", "one_expert", "few_tokens"],
)
def test_a_layer(pools: Pools, case: Case, routing: str, dtype: str) -> None:
    topk = 1 if routing == "one_expert" else 2
    case = dataclasses.replace(case, routing=routing, topk=topk, dtype=dtype)
    pools[4].run(compare_split, case, [2, 5])


def test_shared_experts(pools: Pools, case: Case) -> None:
    check(pools, case, moe_shared_expert_intermediate_size=16)


def test_shared_experts_overlap(pools: Pools, case: Case) -> None:
    check(pools, case, moe_shared_expert_intermediate_size=16, moe_shared_expert_overlap=True)


def test_capacity_factor(pools: Pools, case: Case) -> None:
    check(pools, dataclasses.replace(case, routing="router"), moe_expert_capacity_factor=0.75)


def test_pad_to_capacity(pools: Pools, case: Case) -> None:
    case = dataclasses.replace(case, routing="router")
    check(pools, case, moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True)


def test_probabilities_on_the_input(pools: Pools, case: Case) -> None:
    check(pools, dataclasses.replace(case, topk=1), moe_apply_probs_on_input=True)


def test_latent_size(pools: Pools, case: Case) -> None:
    pools[4].run(compare_width, case, 3, 12)


def test_selective_recompute(pools: Pools, case: Case) -> None:
    check(pools, case, recompute_granularity="selective", recompute_modules=["moe"])


def test_full_recompute(pools: Pools, case: Case) -> None:
    pools[4].run(compare_recomputed, case, 3)


def test_token_count_changes_every_step(pools: Pools, case: Case) -> None:
    tokens = [[24, 3, 0, 7], [1, 0, 0, 0], [0, 0, 0, 0], [100, 100, 100, 100], [2, 50, 1, 9]]
    pools[4].run(compare_steps, case, 4, tokens)


def test_cuda_graph_attributes_replay(pools: Pools, case: Case) -> None:
    pools[4].run(replay_cuda_graph_attributes, case, 3)


def test_evaluation_without_gradient(pools: Pools, case: Case) -> None:
    pools[4].run(compare_without_gradient, case, 3)


def test_frozen_experts(pools: Pools, case: Case) -> None:
    pools[4].run(compare_frozen, case, 3)


def test_state_dict(pools: Pools) -> None:
    assert pools[4].run(state_dict_keys, CASES[0]) == [True] * 4


def test_training_with_other_chunks_in_every_step(pools: Pools) -> None:
    """2 data-parallel ranks, 10 steps of 3 micro-batches; hooks are called once for each."""
    case = Case(
        ep=2,
        num_local_experts=2,
        options={**CASES[3].options, "moe_monta_ranks_per_node": 1},
    )
    chunks = [2, 8, 1, 3, 5, 8, 2, 4, 7, 6]
    differences = pools[4].run(compare_trainings, case, chunks, 3)
    # Gradients that differ in their last bits; Adam's steps are as large for small gradients.
    assert max(differences) < 1e-4, differences


def test_every_setting_has_its_line() -> None:
    refused = {unsupported.setting for unsupported in UNSUPPORTED_WITH_OVERLAP}
    assert RUNS.keys() == RUNS_WITH_OVERLAP.keys() | (refused & RUNS.keys())
    for name in RUNS_WITH_OVERLAP.values():
        path, function = name.split("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name


REFUSED = {
    "overlap_moe_expert_parallel_comm": {"overlap_moe_expert_parallel_comm": True},
    "delay_wgrad_compute": {"delay_wgrad_compute": True},
    "fp8_recipe": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "moe_router_padding_for_quantization": {"moe_router_padding_for_quantization": True},
    "use_megatron_fsdp": {"use_megatron_fsdp": True},
    "offload_modules": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["attn_norm", "moe_act"],
    },
    "cpu_offloading": {"cpu_offloading": True},
    "moe_paged_stash": {"moe_paged_stash": True},
    "moe_ncclep_zero_copy": {"moe_ncclep_zero_copy": True},
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_needs_one_call_of_the_experts_is_refused(setting: str) -> None:
    settings = REFUSED[setting]
    check_supported(SimpleNamespace(**settings))
    with pytest.raises(ValueError, match=f"{setting}: not supported with moe_monta_overlap_exper"):
        check_supported(SimpleNamespace(**settings, moe_monta_overlap_experts=True))


def test_every_refusal_is_tried() -> None:
    assert [one.setting for one in UNSUPPORTED_WITH_OVERLAP] == list(REFUSED)


def test_similar_settings_are_not_refused() -> None:
    check_supported(
        SimpleNamespace(
            moe_monta_overlap_experts=True,
            fp8="hybrid",
            fp8_recipe="blockwise",
            fine_grained_activation_offloading=True,
            offload_modules=["attn_norm"],
        )
    )


def test_dropout_inside_experts_is_refused() -> None:
    experts = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    check_experts(experts)
    experts.append(torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"experts\.2: dropout of 0.1, must be 0 with"):
        check_experts(experts)
