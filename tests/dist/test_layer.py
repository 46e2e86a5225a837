"""A whole MoE layer equals stock's: what the experts get, the output, all gradients."""

import pytest
from layers import Case, compare_many, second_derivative
from pool import Pools

LAYOUTS = [(1, 4, 1), (2, 4, 1), (2, 2, 2), (1, 2, 2), (4, 1, 4), (4, 2, 1)]
ROUTINGS = ["uniform", "rank0_empty", "expert0_empty", "one_expert", "few_tokens"]
CHUNKS = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tp", "ep", "etp"), LAYOUTS)
def test_layer_equals_stock(pools: Pools, tp: int, ep: int, etp: int, dtype: str) -> None:
    cases = [
        Case(
            tp=tp,
            ep=ep,
            etp=etp,
            dtype=dtype,
            num_local_experts=num_local_experts,
            routing=routing,
            topk=1 if routing == "one_expert" or ep * num_local_experts <= 2 else 2,
        )
        for num_local_experts in (1, 2, 3)
        for routing in ROUTINGS
        # Sparing one expert of one leaves none.
        if not (routing == "expert0_empty" and ep * num_local_experts < 3)
    ]
    # Rows are moved whatever they hold, so each case meets some of the numbers of chunks.
    for first in range(3):
        reports = pools[4].run(compare_many, cases[first::3], CHUNKS[first::3])
        for of_rank in reports:
            assert {report["dispatcher"] for report in of_rank} == {"MontaTokenDispatcher"}
        assert sum(report["bytes"]["intra"] for of_rank in reports for report in of_rank) > 0


def test_a_second_derivative_is_refused_by_name(pools: Pools) -> None:
    for num_chunks in (1, 3):
        for error in pools[4].run(second_derivative, Case(), num_chunks):
            assert "once_differentiable" in error
