"""Experts inside the pipeline (--moe-monta-overlap-experts), against stock's layer."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import overlap
import pytest
import torch
from dispatchers import (
    compare_batch_invariant,
    differences,
    replay_cuda_graph_attributes,
    run_phases,
)
from layers import (
    Case,
    assert_same_results,
    build_layer,
    build_pair,
    compare,
    compare_steps,
    error_of,
    forward_backward,
    make_batch,
)
from pool import on_ranks
from test_chains_against_stock import BATCHES
from test_supported_settings import CASES as ALL_CASES
from test_supported_settings import SETTINGS

from monta_megatron.chains import CHAINS
from monta_megatron.integration.experts import check_experts
from monta_megatron.integration.options import Options
from monta_megatron.integration.supported_settings import (
    UNSUPPORTED_WITH_OVERLAP,
    check_supported,
)

# Every chain whose rows are tokens.
CASES = [replace(case, pipelined=True) for case in ALL_CASES if CHAINS[case.chain].rows == "tokens"]
AUTO = Case(
    chain="auto", pipelined=True, options={"cluster": "emulated_2x4_500mbit", "tune_steps": 0}
)


@pytest.fixture(params=CASES, ids=lambda case: case.chain)
def case(request: pytest.FixtureRequest) -> Case:
    return replace(request.param, num_chunks=3)


@pytest.mark.old_end
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", [{"routing": "router"}, *BATCHES], ids=str)
@on_ranks(4)
def test_a_layer(case: Case, changes: dict[str, Any], dtype: str) -> None:
    compare(replace(case, **changes, dtype=dtype), [2, 5])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_ranks(4)
def test_all_but_matrix_products_is_the_same_to_the_bit(case: Case, dtype: str) -> None:
    """Experts that compute each value by itself: split and whole, nothing differs at all."""
    split, whole = (
        run_phases(each, layer.token_dispatcher, make_batch(each, layer))
        for each in (replace(case, dtype=dtype, num_chunks=chunks) for chunks in (3, 1))
        for layer in [build_layer(each)]
    )
    assert not list(differences(split, whole, {}))


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(4)
def test_settings(case: Case, setting: str) -> None:
    compare(replace(case, **SETTINGS[setting]), [1, 3])


@on_ranks(4)
def test_pad_to_capacity() -> None:
    """Auto takes a chain of permuted tokens, and splits nothing."""
    config = {"moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True}
    (choice,) = compare_steps(replace(AUTO, routing="router", config=config), [[24] * 4])
    assert not choice.splits_experts


@on_ranks(4)
def test_cuda_graph_attributes_replay(case: Case) -> None:
    replay_cuda_graph_attributes(case)


@on_ranks(4)
def test_batch_invariant_sums() -> None:
    """No chain of tokens adds in the order of this mode, so auto splits nothing."""
    compare_batch_invariant(replace(AUTO, num_local_experts=4, topk=9))


@pytest.mark.parametrize("frozen", ["experts", "router", "input", "router input"])
@on_ranks(4)
def test_frozen(case: Case, frozen: str) -> None:
    """Parts of a layer, or what it is given, without gradients: the others' are stock's."""
    results = []
    for layer in build_pair(case):
        for name in set(frozen.split()) - {"input"}:
            getattr(layer, name).requires_grad_(False)
        results.append(forward_backward(case, layer, "input" not in frozen))
    stock, ours = results
    trained = {"experts", "router", "input"} - set(frozen.split())
    assert {name.partition(".")[0] for name in ours.sums} == trained | {"output"}
    assert_same_results(ours, stock, False, f"frozen: {frozen}")


@pytest.mark.old_end
@pytest.mark.parametrize(
    ("changes", "recomputes_activation"),
    [({}, False), ({}, True), ({"topk": 1, "config": {"moe_apply_probs_on_input": True}}, False)],
    ids=["", "recomputed", "probabilities on the input"],
)
@on_ranks(4)
def test_grouped_experts(case: Case, changes: dict[str, Any], recomputes_activation: bool) -> None:
    """Megatron's grouped experts, which get rows per expert as stock gives them."""
    case, results = replace(case, **changes), []
    for layer in build_pair(case):
        overlap.give_grouped_experts(layer)
        layer.experts.activation_recompute = recomputes_activation
        with overlap.recomputation_on_a_host():
            results.append(forward_backward(case, layer))
    stock, ours = results
    assert_same_results(ours, stock, False, "grouped experts")
    (theirs,), mine = stock.calls, ours.calls
    assert len(mine) == 3 and torch.equal(sum(mine), theirs)
    for each in mine:
        assert (each.dtype, each.device, each.shape) == (theirs.dtype, theirs.device, theirs.shape)


@on_ranks(4)
def test_the_norm_before_it_is_recomputed(case: Case) -> None:
    """What a layer reads is discarded and computed anew, as Megatron's norm before it may be."""
    from megatron.core.tensor_parallel import CheckpointWithoutOutput

    results = []
    for is_recomputed in (False, True):
        layer = build_layer(case)
        whole = layer.forward

        def forward(hidden: torch.Tensor, whole: Any = whole, again: bool = is_recomputed) -> Any:
            if not again:
                return whole(hidden.tanh())
            checkpoint = CheckpointWithoutOutput()
            output, _ = whole(checkpoint.checkpoint(torch.tanh, hidden))
            checkpoint.discard_output_and_register_recompute(output)
            return output, None

        layer.forward = forward
        with overlap.recomputation_on_a_host():
            results.append(forward_backward(case, layer))
    plain, recomputed = results
    assert_same_results(recomputed, plain, True, "its input recomputed")


@on_ranks(4)
def test_state_dict() -> None:
    """Once it has run, that of a layer without the pipeline."""
    keys = []
    for layer in build_pair(CASES[0]):
        forward_backward(CASES[0], layer)
        keys.append((list(layer.state_dict()), list(layer.sharded_state_dict())))
    assert keys[0] == keys[1]


DATA_PARALLEL = Case(chain="hierarchical_alltoall", ep=2, ranks_per_node=1, pipelined=True)


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(4)
def test_training_with_other_chunks_in_every_step(fused: bool) -> None:
    """2 data-parallel ranks, 10 steps of 3 micro-batches; hooks are called once for each.

    With gradient accumulation fusion they have nothing to add.
    """
    config, chunks = {"gradient_accumulation_fusion": fused}, [2, 8, 1, 3, 5, 8, 2, 4, 7, 6]
    with overlap.gradient_accumulation_fusion():
        split, whole, untrained = (
            overlap.Model(replace(DATA_PARALLEL, config=config, num_chunks=num_chunks))
            for num_chunks in (8, 1, 1)
        )
        split.train(chunks, 3)
        whole.train([1] * len(chunks), 3)
    assert split.numbers_of_calls.keys() == {1}, split.numbers_of_calls
    ours, theirs, before = (
        [each.detach() for each in model.layer.parameters()] for model in (split, whole, untrained)
    )
    assert not any(map(torch.equal, theirs, before)), "a parameter was not trained"
    # Gradients that differ in their last bits; Adam's steps are as large for small gradients.
    assert overlap.largest_difference(ours, theirs) < 1e-4


@on_ranks(4)
def test_products_of_all_chunks_add_to_one_gradient() -> None:
    config = {"gradient_accumulation_fusion": True}
    gradients = []
    for chunks in (3, 1):
        case = replace(DATA_PARALLEL, dtype="bfloat16", config=config, num_chunks=chunks)
        with overlap.gradient_accumulation_fusion() as products:
            model = overlap.Model(case)
            model.accumulate(chunks, 2)
        assert model.numbers_of_calls.keys() == {1}
        weights = list(model.layer.experts.parameters())
        assert products.dtypes == [(torch.bfloat16, torch.float32)] * 2 * chunks * len(weights)
        # Of each weight and micro-batch one, whatever the number of chunks.
        assert Counter(products.placeholders) == Counter(2 * [tuple(one.shape) for one in weights])
        assert all(weight.grad_added_to_main_grad for weight in weights)
        gradients.append([weight.main_grad.clone() for weight in model.layer.parameters()])
    # Sums of 24 products in another order; in bf16 their roundings would be 2^-9 of each.
    assert overlap.largest_difference(*gradients) < 1e-6


@pytest.mark.parametrize("num_chunks", [None, 3])
@on_ranks(4)
def test_auto_splits_the_best_chain_of_tokens(num_chunks: int | None) -> None:
    """In 4, or as asked for; on every rank alike, with other tokens in every step."""
    case = replace(AUTO, num_chunks=num_chunks)
    for choice in compare_steps(case, [[2000, 0, 1, 100], [1, 1, 0, 1]]):
        assert choice.splits_experts and choice.num_chunks == (num_chunks or 4)


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


@on_ranks(4)
def test_fsdp_that_no_configuration_names_is_refused() -> None:
    """A layer whose weights Megatron-FSDP has taken over."""
    layer = build_layer(replace(CASES[0], num_chunks=2))
    for parameter in layer.experts.parameters():
        parameter.__fsdp_param__ = True
    refused = error_of(forward_backward, CASES[0], layer)
    assert refused.startswith("use_megatron_fsdp: not supported with moe_monta_overlap_experts")


def test_dropout_inside_experts_is_refused() -> None:
    experts = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.0))
    check_experts(experts)
    experts.append(torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"experts\.2: dropout of 0.1, must be 0 with"):
        check_experts(experts)
