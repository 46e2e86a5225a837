"""What Megatron's settings ask of a dispatcher (supported_settings.py), against stock."""

import dataclasses
from contextlib import nullcontext
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from layers import (
    Case,
    build_from_spec,
    case_of_chain,
    compare,
    compare_batch_invariant,
    compare_padded_for_quantization,
    compare_steps,
    compare_under_overlap_schedule,
    error_of,
    knows_batch_invariant_sums,
    options_survive_copies,
    refusal_of,
    replay_cuda_graph_attributes,
)
from pool import Pools

from monta_megatron.chains import CHAINS
from monta_megatron.integration.arguments import answer_should_free_input
from monta_megatron.integration.supported_settings import check_supported

pytestmark = pytest.mark.old_end

CASES = [
    case_of_chain("alltoall_allgather", 2),
    case_of_chain("allgather", 2),
    case_of_chain("alltoall_dedup", 1),
    case_of_chain("hierarchical_allgather", 2),
    case_of_chain("hierarchical_alltoall", 1),
]
CASE = CASES[0]


@pytest.fixture(params=CASES, ids=lambda case: case.options["moe_monta_chain"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


CHUNKS = [1, 3]


# What is changed of a case.
SHARED = {"moe_shared_expert_intermediate_size": 16}
SETTINGS: dict[str, dict[str, Any]] = {
    "shared experts": {"config": SHARED},
    "shared experts overlap": {"config": {**SHARED, "moe_shared_expert_overlap": True}},
    "capacity": {"routing": "router", "config": {"moe_expert_capacity_factor": 0.75}},
    "probabilities on the input": {"topk": 1, "config": {"moe_apply_probs_on_input": True}},
    "selective recompute": {
        "config": {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    },
    **{
        f"probabilities of {router_dtype}, rows of {dtype}": {
            "routing": "router",
            "dtype": dtype,
            "config": {"moe_router_dtype": router_dtype},
        }
        for router_dtype in (None, "fp64")
        for dtype in ("float32", "bfloat16")
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_layer(pools: Pools, case: Case, setting: str) -> None:
    pools[4].run(compare, dataclasses.replace(case, **SETTINGS[setting]), CHUNKS)


@pytest.mark.parametrize("factor", [0.75, 2.0])
def test_pad_to_capacity(pools: Pools, case: Case, factor: float) -> None:
    """Permuted tokens, by name or as auto chooses; chains of tokens are refused."""
    config = {"moe_expert_capacity_factor": factor, "moe_pad_expert_input_to_capacity": True}
    case = dataclasses.replace(case, routing="router")
    chain = case.options["moe_monta_chain"]
    if CHAINS[chain].rows == "tokens":
        padded = dataclasses.replace(case, config=config)
        for refused in pools[4].run(refusal_of, [padded] * 4, [{}] * 4):
            assert refused.startswith(f"moe_monta_chain: {chain} cannot run here: its rows are tok")
        case = dataclasses.replace(case, options=case.options | {"moe_monta_chain": "auto"})
        pools[4].run(compare_steps, dataclasses.replace(case, config=config), None, [[24] * 4])
        return
    pools[4].run(compare, dataclasses.replace(case, config=config), CHUNKS)


@pytest.mark.parametrize("num_chunks", CHUNKS)
def test_router_padding(pools: Pools, case: Case, num_chunks: int) -> None:
    pools[4].run(compare_padded_for_quantization, case, num_chunks, 16)
    # As Transformer Engine's grouped tensors need it, in bf16 too.
    case = dataclasses.replace(case, dtype="bfloat16", num_tokens=300)
    pools[4].run(compare_padded_for_quantization, case, num_chunks, 256)


# Chains that add a token's rows in the order of Megatron's batch-invariant mode.
ORDERED = ("alltoall", "alltoall_allgather")
# Tokens with two or three experts on most ranks.
MANY_EXPERTS = Case(ep=4, num_local_experts=4, topk=9)


def needs_batch_invariant_sums(pools: Pools) -> None:
    if not all(pools[4].run(knows_batch_invariant_sums)):
        pytest.skip("needs Megatron-Core >= 0.20, which orders a token's sum in this mode")


def with_chain(chain: str) -> Case:
    options = {"moe_monta_chain": chain, "moe_monta_ranks_per_node": 2}
    return dataclasses.replace(MANY_EXPERTS, options=options)


@pytest.mark.parametrize("num_chunks", CHUNKS)
@pytest.mark.parametrize("chain", ORDERED)
def test_batch_invariant_sums(pools: Pools, chain: str, num_chunks: int) -> None:
    needs_batch_invariant_sums(pools)
    num_chunks = 1 if chain == "alltoall" else num_chunks
    pools[4].run(compare_batch_invariant, with_chain(chain), num_chunks)


def test_batch_invariant_sums_with_expert_tensor_parallelism(pools: Pools) -> None:
    needs_batch_invariant_sums(pools)
    case = dataclasses.replace(with_chain("alltoall_allgather"), tp=2, ep=2, etp=2, topk=6)
    pools[4].run(compare_batch_invariant, case, 3)


# The second has tokens with fewer experts than top-k; the third attributes of the shared experts.
CAPTURED: tuple[dict[str, Any], ...] = (
    {},
    {"routing": "fewer"},
    {"config": SETTINGS["shared experts overlap"]["config"] | {"moe_shared_expert_gate": True}},
)


@pytest.mark.parametrize("num_chunks", CHUNKS)
def test_cuda_graph_attributes_replay(pools: Pools, case: Case, num_chunks: int) -> None:
    for changes in CAPTURED:
        changed = dataclasses.replace(case, **changes)
        pools[4].run(replay_cuda_graph_attributes, changed, num_chunks)


@pytest.mark.parametrize("num_local_experts", [1, 2])
def test_overlap_schedule(pools: Pools, case: Case, num_local_experts: int) -> None:
    # With top-2 and whole experts every chain adds the same two terms, so all are equal to the bit.
    etp = case.etp if case.exact_sums else 1
    if num_local_experts == etp == 1 and metadata.version("megatron-core").startswith("0.16"):
        pytest.skip(
            "0.16 frees what a single local expert still needs, with stock's dispatcher too"
        )
    config = {
        "num_layers": 4,
        "moe_layer_freq": [1, 0, 1, 1],
        "overlap_moe_expert_parallel_comm": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    case = dataclasses.replace(
        case,
        ep=4 // etp,
        etp=etp,
        num_local_experts=num_local_experts,
        dtype="bfloat16",
        config=config,
    )
    pools[4].run(compare_under_overlap_schedule, case, 3)


def test_configuration_made_in_code(pools: Pools) -> None:
    for built in pools[4].run(options_survive_copies, CASE):
        assert built == [("MontaTokenDispatcher", "alltoall_allgather", 3)] * 4


def test_layer_spec_patches_nothing(pools: Pools) -> None:
    for built in pools[4].run(build_from_spec, CASE):
        assert built == ("MontaTokenDispatcher", "MoEAlltoAllTokenDispatcher")


def test_layer_spec_under_the_overlap_schedule_is_refused(pools: Pools) -> None:
    case = Case(dtype="bfloat16", config={"overlap_moe_expert_parallel_comm": True})
    for error in pools[4].run(error_of, build_from_spec, case):
        assert error.startswith("overlap_moe_expert_parallel_comm: got True, must be False")


@pytest.mark.parametrize("low_precision", [{}, {"fp8": "hybrid", "first_last_layers_bf16": True}])
def test_the_overlap_schedule_frees_no_experts_input(low_precision: dict[str, Any]) -> None:
    ask = answer_should_free_input(lambda name, is_moe, config: True)
    stock, ours = (
        SimpleNamespace(moe_token_dispatcher_type=name, **low_precision)
        for name in ("alltoall", "monta")
    )
    nodes = ("moe_dispatch", "mlp", "moe_combine")
    assert [ask(node, True, stock) for node in nodes] == [True, True, True]
    assert [ask(node, True, ours) for node in nodes] == [True, False, True]


CAPTURES_IT = "^cuda_graph_impl: not supported"


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"cuda_graph_impl": "full_iteration"}, CAPTURES_IT),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe"]}, CAPTURES_IT),
        # No list means everything.
        ({"cuda_graph_impl": "local", "cuda_graph_modules": []}, CAPTURES_IT),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, CAPTURES_IT),
        ({"cuda_graph_impl": "none"}, None),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "moe_preprocess"]}, None),
        ({"moe_dispatch_fwd_dtype": "bf16"}, None),
        ({"moe_dispatch_fwd_dtype": "mxfp8"}, "^moe_dispatch_fwd_dtype: .* flex dispatcher "),
        ({"moe_combine_bwd_dtype": "mxfp8"}, "^moe_combine_bwd_dtype: .* flex dispatcher "),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], refusal: str | None) -> None:
    with nullcontext() if refusal is None else pytest.raises(ValueError, match=refusal):
        check_supported(SimpleNamespace(**settings))
