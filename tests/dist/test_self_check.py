"""The first use of a chain: a round trip with known answer. A fault on one rank ends it on all."""

import re
from dataclasses import replace
from itertools import product

import pytest
from exchanges import Case
from pool import Pools
from self_checks import error_of, error_of_failure, errors_of, num_passes

from monta_megatron.chains import CHAINS

CASE = Case(chain="hierarchical_alltoall", num_local_experts=4, topk=3, hidden=24, num_chunks=3)
# EP, ETP, ranks per node: two nodes of two ranks, then four ranks in a node, a rail, an ETP group.
LAYOUTS = [(4, 1, 2), (2, 2, 2), (4, 1, 4), (4, 1, 1), (1, 4, 4)]


def cases_on(layout: tuple[int, int, int], **fields: object) -> list[Case]:
    """Every chain that can run there, in 1 and 3 chunks; top-k of 8 experts, if not said."""
    ep, etp, ranks_per_node = layout
    fields = {"num_local_experts": 8 // ep, "hidden": 24, **fields}
    cases = [
        Case(chain=name, ep=ep, etp=etp, ranks_per_node=ranks_per_node, num_chunks=n, **fields)
        for name, n in product(CHAINS, (1, 3))
        if n == 1 or not CHAINS[name].serial
    ]
    return [each for each in cases if not CHAINS[each.chain].incompatibility(each.layout(0))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_right_passes(pools: Pools, layout: tuple[int, int, int]) -> None:
    cases = [
        *cases_on(layout, topk=1, dtype="float16"),
        *cases_on(layout, topk=2, dtype="bfloat16", probs_dtype="bfloat16"),
        *cases_on(layout, topk=3, dtype="float32"),
        *cases_on(layout, topk=5, dtype="bfloat16", probs_dtype="float64"),
        *cases_on(layout, topk=8, dtype="float64", probs_dtype="float64"),
        # More experts than tokens.
        *cases_on(layout, topk=8, num_local_experts=256),
    ]
    assert pools[4].run(errors_of, cases) == [[]] * 4


def test_sums_of_many_terms_pass(pools: Pools) -> None:
    """64, and no more where a token of the training has 128 experts."""
    fields = {"dtype": "bfloat16", "num_local_experts": 64}
    cases = [*cases_on(LAYOUTS[0], topk=64, **fields), *cases_on(LAYOUTS[1], topk=128, **fields)]
    assert pools[4].run(errors_of, cases) == [[]] * 4


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("experts swapped", "dispatch: "),
        ("peers rotated", "dispatch: "),
        ("row written twice", "dispatch: "),
        ("neighbour's probability", "dispatch of probabilities: "),
        ("chunk of combine backward missing", "combine backward: 0 at "),
        ("chunk of dispatch backward missing", "dispatch backward: 0 at "),
    ],
)
@pytest.mark.parametrize("chain", ["hierarchical_alltoall", "alltoall_allgather"])
def test_a_fault_is_named_on_every_rank(pools: Pools, chain: str, fault: str, where: str) -> None:
    errors = pools[4].run(error_of, replace(CASE, chain=chain), fault)
    assert len(set(errors)) == 1
    pattern = (
        rf"moe_monta_check: {chain} in 3 chunks: wrong on rank [0-3, ]+ of 0, 1, 2, 3; on rank \d: "
        rf"{where}.*, must be \S+ \(token \d+ of rank \d, experts .*\); [0-9,]+ of [0-9,]+ values "
        "are wrong. Report it, and train with moe_token_dispatcher_type alltoall; .* to debug it"
    )
    assert re.fullmatch(pattern, errors[0]), errors[0]


@pytest.mark.parametrize(
    ("chain", "etp", "ranks_per_node", "stage"),
    [
        ("allgather", 1, 2, "copy per expert"),
        ("allgather", 1, 2, "sum of allgather"),
        ("allgather", 4, 4, "sum of allgather"),
        ("alltoall", 4, 4, "sum of allgather"),
        ("alltoall_allgather", 4, 4, "sum of allgather"),
        ("alltoall_dedup", 1, 4, "copy per expert"),
        ("alltoall_dedup", 1, 4, "copy per rank"),
        ("hierarchical_allgather", 1, 2, "copy per expert"),
        ("hierarchical_allgather", 1, 4, "sum of allgather in node"),
        ("hierarchical_allgather", 1, 1, "copy per node"),
        ("hierarchical_allgather", 4, 4, "sum of allgather in node"),
        ("hierarchical_alltoall", 1, 2, "copy per expert"),
        ("hierarchical_alltoall", 1, 4, "copy per rank"),
        ("hierarchical_alltoall", 1, 1, "copy per node"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sum_in_another_order_is_a_fault(
    pools: Pools, dtype: str, chain: str, etp: int, ranks_per_node: int, stage: str
) -> None:
    fields = {"chain": chain, "etp": etp, "ep": 4 // etp, "ranks_per_node": ranks_per_node}
    case = replace(CASE, **fields, dtype=dtype, num_chunks=1 if chain == "alltoall" else 3)
    errors = pools[4].run(error_of, case, "sum backwards", stage)
    assert len(set(errors)) == 1
    # A rank's sum may be a part of another's.
    assert re.search(r"; on rank \d: combine: 0.00012207 at .* must be 0 ", errors[0]), errors[0]


def test_wrong_counts_end_it_before_rows_are_sent(pools: Pools) -> None:
    for chain in ("alltoall_allgather", "allgather"):
        errors = pools[4].run(error_of, replace(CASE, chain=chain), "count wrong")
        assert len(set(errors)) == 1
        assert "on rank 1: counts by source rank and local expert: " in errors[0]
        assert " at [0, 0], must be " in errors[0]


@pytest.mark.parametrize("fault", ["", "wrong kernel"])
def test_a_wrong_kernel_is_a_fault(pools: Pools, fault: str) -> None:
    errors = pools[4].run(error_of, replace(CASE, topk=2), fault, "", True)
    assert len(set(errors)) == 1
    assert ("alltoall or moe_monta_kernels torch; " in errors[0]) == bool(fault)
    assert bool(errors[0]) == bool(fault)


def test_an_error_names_the_check(pools: Pools) -> None:
    """The first pass fails on every rank."""
    for error in pools[4].run(error_of_failure, CASE):
        assert error.startswith(
            "moe_monta_check: hierarchical_alltoall in 3 chunks: the round trip failed: "
            "RuntimeError: split sizes do not match. Report it"
        )


def test_it_is_made_once_for_a_chain_and_its_chunks(pools: Pools) -> None:
    assert pools[4].run(num_passes, [CASE, replace(CASE, num_chunks=2)]) == [2 * 4] * 4
