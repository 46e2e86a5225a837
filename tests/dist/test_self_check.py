"""The first use of a chain: a round trip with known answer. A fault on one rank ends it on all."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import layers
import pytest
import torch
import torch.distributed as dist
import yaml
from exchanges import cases_on, uninitialised_memory_is_nan
from layers import Case, build_layer, forward_backward, gathered, same_on_all_ranks
from patches import in_interpreter
from pool import on_ranks
from self_checks import FAULTS

from monta_megatron.exchange import executor
from monta_megatron.integration import first_use

FAULTY_RANK = 1
# Its experts take rows of any dtype.
KIND = Case(hidden=24, by_value=True, is_training=False)
CASE = replace(KIND, chain="hierarchical_alltoall", num_local_experts=4, topk=3, num_chunks=3)
# EP, ETP, ranks per node: two nodes of two ranks, then four ranks in a node, a rail, an ETP group.
LAYOUTS = [(4, 1, 2), (2, 2, 2), (4, 1, 4), (4, 1, 1), (1, 4, 4)]
FOUND = yaml.safe_load(Path(__file__).with_name("faults_on_a_rank.yaml").read_text())


def error_of(case: Case, fault: str = "", stage: str = "", fused: bool = False) -> str:
    """The error of a first use on every rank, or "".

    FAULTY_RANK has the fault, perhaps in one stage alone.
    """
    first_use._passed.clear()
    layer = build_layer(case)
    is_faulty, state = fault and dist.get_rank() == FAULTY_RANK, torch.get_rng_state()
    with (
        uninitialised_memory_is_nan(),
        in_interpreter(layer.token_dispatcher) if fused else nullcontext(),
        FAULTS[fault](stage) if is_faulty else nullcontext(),
    ):
        error = layers.error_of(forward_backward, case, layer)
    assert any(first_use._passed.values()) == (error == "")
    assert torch.equal(torch.get_rng_state(), state), "random numbers were drawn"
    return same_on_all_ranks(error)


def errors_on(layout: tuple[int, int, int], **fields: Any) -> list[str]:
    """Of every chain that can run there; top-k of 8 experts, if not said."""
    fields = {"num_local_experts": 8 // layout[0], **fields}
    return [
        error
        for case in cases_on([layout], partial(replace, KIND), **fields)
        if (error := error_of(case))
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(4)
def test_what_is_right_passes(layout: tuple[int, int, int]) -> None:
    for number, fields in enumerate(
        (
            {"topk": 1, "dtype": "float16"},
            {"topk": 2, "dtype": "bfloat16", "probs_dtype": "bfloat16"},
            {"topk": 3, "dtype": "float32"},
            {"topk": 5, "dtype": "bfloat16", "probs_dtype": "float64"},
            {"topk": 8, "dtype": "float64", "probs_dtype": "float64"},
            # More experts than tokens.
            {"topk": 8, "num_local_experts": 80 if layout[0] == 4 else 320},
        )
    ):
        # Every chain meets both.
        assert not errors_on(layout, num_chunks=(1, 3)[number % 2], **fields)


@pytest.mark.parametrize(("layout", "topk"), [(LAYOUTS[0], 64), (LAYOUTS[1], 128)])
@on_ranks(4)
def test_sums_of_many_terms_pass(layout: tuple[int, int, int], topk: int) -> None:
    """64, and no more where a token of the training has 128 experts."""
    for num_chunks in (1, 3):
        fields = {"topk": topk, "dtype": "bfloat16", "num_local_experts": 64}
        assert not errors_on(layout, num_chunks=num_chunks, **fields)


@pytest.mark.parametrize("fault", FOUND["named"])
@pytest.mark.parametrize("chain", ["hierarchical_alltoall", "alltoall_allgather"])
@on_ranks(4)
def test_a_fault_is_named_on_every_rank(chain: str, fault: str) -> None:
    error, (where, _) = error_of(replace(CASE, chain=chain), fault), FOUND["named"][fault]
    pattern = (
        rf"moe_monta_check: {chain} in 3 chunks: wrong on rank [0-3, ]+ of 0, 1, 2, 3; on rank \d: "
        rf"{where}.*, must be \S+ \(token \d+ of rank \d, experts .*\); [0-9,]+ of [0-9,]+ values "
        "are wrong. Report it, and train with moe_token_dispatcher_type alltoall; .* to debug it"
    )
    assert re.fullmatch(pattern, error), error


@pytest.mark.parametrize("chain", ["hierarchical_alltoall", "hierarchical_allgather"])
@pytest.mark.parametrize("fault", ["", *FOUND["in a split layer"]])
@on_ranks(4)
def test_experts_run_in_the_pipeline_of_a_split_layer(fault: str, chain: str) -> None:
    error = error_of(replace(CASE, chain=chain, pipelined=True), fault)
    where = FOUND["named"][fault][0] if fault else "no fault"
    named = re.search(rf"{chain} in 3 chunks with their experts: .* on rank \d: {where}", error)
    assert bool(error) == bool(fault) == bool(named), error


@pytest.mark.parametrize("fault", FOUND["named"])
@on_ranks(4)
def test_the_comparison_with_stock_finds_it_too(fault: str) -> None:
    """On the ranks whose tokens it meets."""
    case = Case(tp=2, ep=2, etp=2, num_chunks=4, checked=False)
    with FAULTS[fault](""):
        found = "\n".join(map("\n".join, gathered(layers.check(case))))
    name = FOUND["named"][fault][1]
    assert re.search(name + r": \d+ of \d+ values differ .* first at \[\d+", found), found


@pytest.mark.parametrize(("chain", "etp", "ranks_per_node", "stage"), FOUND["sums"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@on_ranks(4)
def test_a_sum_in_another_order_is_a_fault(
    dtype: str, chain: str, etp: int, ranks_per_node: int, stage: str
) -> None:
    place = {"ep": 4 // etp, "etp": etp, "ranks_per_node": ranks_per_node}
    case = replace(CASE, chain=chain, dtype=dtype, **place)
    error = error_of(case, "sum backwards", stage)
    # A rank's sum may be a part of another's.
    assert re.search(r"; on rank \d: combine: 0.00012207 at .* must be 0 ", error), error


@pytest.mark.parametrize("chain", ["alltoall_allgather", "allgather"])
@on_ranks(4)
def test_wrong_counts_end_it_before_rows_are_sent(chain: str) -> None:
    error = error_of(replace(CASE, chain=chain), "count wrong")
    assert "on rank 1: counts by source rank and local expert: " in error
    assert " at [0, 0], must be " in error


@pytest.mark.parametrize("fault", ["", "wrong kernel"])
@on_ranks(4)
def test_a_wrong_kernel_is_a_fault(fault: str) -> None:
    error = error_of(replace(CASE, topk=2), fault, fused=True)
    assert ("alltoall or moe_monta_kernels torch; " in error) == bool(error) == bool(fault)


@on_ranks(4)
def test_an_error_names_the_check() -> None:
    """The first pass fails on every rank."""
    failure = RuntimeError("split sizes do not match")
    with mock.patch.object(first_use, "run", side_effect=failure):
        error = error_of(CASE)
    assert error.startswith(
        "moe_monta_check: hierarchical_alltoall in 3 chunks: the round trip failed: "
        "RuntimeError: split sizes do not match. Report it"
    )


@on_ranks(4)
def test_it_is_made_once_for_a_chain_and_its_chunks() -> None:
    with mock.patch.object(first_use, "run", side_effect=executor.run) as counted:
        assert error_of(CASE) == ""
        # Four passes each.
        assert counted.call_count == 4
        for num_chunks in (3, 2, 2):
            case = replace(CASE, num_chunks=num_chunks)
            layer = build_layer(case)
            forward_backward(case, layer)
        assert counted.call_count == 2 * 4
