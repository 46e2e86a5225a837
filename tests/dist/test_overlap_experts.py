"""Experts inside the pipeline (--moe-monta-overlap-experts), against stock's layer."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layers import (
    Case,
    case_of_chain,
    compare,
    compare_batch_invariant,
    compare_steps,
    knows_batch_invariant_sums,
    replay_cuda_graph_attributes,
)
from overlap import (
    compare_bits,
    compare_frozen,
    compare_grouped,
    compare_main_gradients,
    compare_recomputed_input,
    compare_trainings,
    refusal_of_sharded_weights,
    state_dict_keys,
)
from pool import Pools
from test_supported_settings import SETTINGS

from monta_megatron.integration.experts import check_experts
from monta_megatron.integration.options import Options
from monta_megatron.integration.supported_settings import (
    UNSUPPORTED_WITH_OVERLAP,
    check_supported,
)

# Every chain whose rows are tokens.
CASES = [
    case_of_chain("allgather", 2, moe_monta_overlap_experts=True),
    case_of_chain("alltoall_dedup", 1, moe_monta_overlap_experts=True),
    case_of_chain("hierarchical_allgather", 2, moe_monta_overlap_experts=True),
    case_of_chain("hierarchical_alltoall", 1, moe_monta_overlap_experts=True),
]
AUTO = Case(
    ep=4,
    num_local_experts=2,
    options={
        "moe_monta_chain": "auto",
        "moe_monta_cluster": "emulated_2x4_500mbit",
        "moe_monta_ranks_per_node": 2,
        "moe_monta_overlap_experts": True,
        "moe_monta_tune_steps": 0,
    },
)
CHUNKS = [1, 3]


@pytest.fixture(params=CASES, ids=lambda case: case.options["moe_monta_chain"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.mark.old_end
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "routing",
    ["router", "uniform", "rank0_empty", "expert0_empty", "one_expert", "few_tokens"],
)
def test_a_layer(pools: Pools, case: Case, routing: str, dtype: str) -> None:
    topk = 1 if routing == "one_expert" else 2
    case = replace(case, routing=routing, topk=topk, dtype=dtype)
    pools[4].run(compare, case, [2, 5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_but_matrix_products_is_the_same_to_the_bit(
    pools: Pools, case: Case, dtype: str
) -> None:
    pools[4].run(compare_bits, replace(case, dtype=dtype), 3)


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(pools: Pools, case: Case, setting: str) -> None:
    pools[4].run(compare, replace(case, **SETTINGS[setting]), CHUNKS)


def test_pad_to_capacity(pools: Pools) -> None:
    """Auto takes a chain of permuted tokens, and splits nothing."""
    config = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
    auto = replace(AUTO, routing="router", config=config)
    for choices in pools[4].run(compare_steps, auto, None, [[24] * 4]):
        assert not any(choice.splits_experts for choice in choices)


def test_cuda_graph_attributes_replay(pools: Pools, case: Case) -> None:
    pools[4].run(replay_cuda_graph_attributes, case, 3)


def test_batch_invariant_sums(pools: Pools) -> None:
    """No chain of tokens adds in the order of this mode, so auto splits nothing."""
    if not all(pools[4].run(knows_batch_invariant_sums)):
        pytest.skip("needs Megatron-Core >= 0.20, which orders a token's sum in this mode")
    pools[4].run(compare_batch_invariant, replace(AUTO, num_local_experts=4, topk=9), None)


@pytest.mark.parametrize("frozen", ["experts", "router", "input", "router input"])
def test_frozen(pools: Pools, case: Case, frozen: str) -> None:
    pools[4].run(compare_frozen, case, 3, frozen.split())


@pytest.mark.old_end
@pytest.mark.parametrize("recomputes_activation", [False, True])
def test_grouped_experts(pools: Pools, case: Case, recomputes_activation: bool) -> None:
    pools[4].run(compare_grouped, case, 3, recomputes_activation)


def test_probabilities_on_the_input_of_grouped_experts(pools: Pools, case: Case) -> None:
    config = {"moe_apply_probs_on_input": True}
    pools[4].run(compare_grouped, replace(case, topk=1, config=config), 3)


def test_the_norm_before_it_is_recomputed(pools: Pools, case: Case) -> None:
    pools[4].run(compare_recomputed_input, case, 3)


def test_state_dict(pools: Pools) -> None:
    assert pools[4].run(state_dict_keys, CASES[0]) == [True] * 4


DATA_PARALLEL = Case(
    ep=2, num_local_experts=2, options={**CASES[3].options, "moe_monta_ranks_per_node": 1}
)


@pytest.mark.parametrize("fused", [False, True])
def test_training_with_other_chunks_in_every_step(pools: Pools, fused: bool) -> None:
    """2 data-parallel ranks, 10 steps of 3 micro-batches; hooks are called once for each.

    With gradient accumulation fusion they have nothing to add.
    """
    case = replace(DATA_PARALLEL, config={"gradient_accumulation_fusion": fused})
    chunks = [2, 8, 1, 3, 5, 8, 2, 4, 7, 6]
    differences = pools[4].run(compare_trainings, case, chunks, 3)
    # Gradients that differ in their last bits; Adam's steps are as large for small gradients.
    assert max(differences) < 1e-4, differences


def test_products_of_all_chunks_add_to_one_gradient(pools: Pools) -> None:
    case = replace(DATA_PARALLEL, dtype="bfloat16", config={"gradient_accumulation_fusion": True})
    # Sums of 24 products in another order; in bf16 their roundings would be 2^-9 of each.
    assert max(pools[4].run(compare_main_gradients, case, 3)) < 1e-6


@pytest.mark.parametrize("num_chunks", [None, 3])
def test_auto_splits_the_best_chain_of_tokens(pools: Pools, num_chunks: int | None) -> None:
    """In 4, or as asked for; on every rank alike, with other tokens in every step."""
    tokens = [[2000, 0, 1, 100], [1, 1, 0, 1]]
    for choices in pools[4].run(compare_steps, AUTO, num_chunks, tokens):
        assert all(choice.splits_experts for choice in choices)
        assert [choice.num_chunks for choice in choices] == [num_chunks or 4] * 2


def test_options_that_do_not_go_together() -> None:
    def options(**given: Any) -> Options:
        named = {f"moe_monta_{name}": value for name, value in given.items()}
        return Options.of(SimpleNamespace(moe_monta_overlap_experts=True, **named))

    with pytest.raises(ValueError, match="moe_monta_tune_steps: got 5, must be 0, which is off, o"):
        options(tune_steps=5)
    with pytest.raises(ValueError, match="given with alltoall, must be with one of"):
        options(chain="alltoall")


REFUSED = {
    "overlap_moe_expert_parallel_comm": {"overlap_moe_expert_parallel_comm": True},
    "delay_wgrad_compute": {"delay_wgrad_compute": True},
    "fp8_recipe": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "gradient_accumulation_fusion with fp8 or fp4": {
        "gradient_accumulation_fusion": True,
        "fp8": "hybrid",
        "fp8_recipe": "blockwise",
    },
    "moe_router_padding_for_quantization": {"moe_router_padding_for_quantization": True},
    "use_megatron_fsdp": {"use_megatron_fsdp": True},
    "expert_gtp_weight_remat_size": {
        "expert_tensor_parallel_size": 2,
        "expert_tensor_parallel_num_weight_shards": 4,
    },
    "moe_use_grouped_tensor": {"moe_use_grouped_tensor": True},
    "use_torch_fsdp2": {"use_torch_fsdp2": True},
    "offload_modules": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["attn_norm", "moe_act"],
    },
    "cpu_offloading": {"cpu_offloading": True},
    "moe_paged_stash": {"moe_paged_stash": True},
    "moe_ncclep_zero_copy": {"moe_ncclep_zero_copy": True},
    "log_moe_overload_factor": {"log_moe_overload_factor": True},
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
            expert_gtp_weight_remat_size=1,
            expert_tensor_parallel_size=2,
            expert_tensor_parallel_num_weight_shards=2,
        )
    )


def test_fsdp_that_no_configuration_names_is_refused(pools: Pools) -> None:
    for refused in pools[4].run(refusal_of_sharded_weights, CASES[0]):
        assert refused.startswith("use_megatron_fsdp: not supported with moe_monta_overlap_experts")


def test_dropout_inside_experts_is_refused() -> None:
    experts = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    check_experts(experts)
    experts.append(torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"experts\.2: dropout of 0.1, must be 0 with"):
        check_experts(experts)
