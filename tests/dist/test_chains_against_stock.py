"""Every chain against stock on a whole MoE layer: what experts get, the output, all gradients."""

import pytest
from layers import Case, compare_many, second_derivative
from pool import Pools

from monta_megatron.chains import CHAINS

# (tp, ep, etp, ranks per node), on 4 ranks.
LAYOUTS = {
    "alltoall": [(1, 4, 1, 2), (2, 2, 2, 2), (1, 2, 2, 4)],
    "alltoall_allgather": [
        *((1, 4, 1, 4), (2, 4, 1, 4), (2, 2, 2, 4), (1, 2, 2, 4), (4, 1, 4, 4), (4, 2, 1, 4)),
    ],
    "allgather": [(1, 4, 1, 2), (2, 2, 2, 2), (1, 2, 2, 4)],
    "alltoall_dedup": [(1, 4, 1, 4), (2, 4, 1, 2), (4, 2, 1, 3)],
    "hierarchical_allgather": [(1, 4, 1, 2), (2, 2, 2, 2), (4, 1, 4, 4), (1, 4, 1, 1)],
    "hierarchical_alltoall": [(1, 4, 1, 2), (2, 4, 1, 4), (1, 4, 1, 1)],
}
ROUTINGS = ["uniform", "rank0_empty", "expert0_empty", "one_expert", "few_tokens"]
CHUNKS = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("chain", "layout"),
    [(chain, layout) for chain, layouts in LAYOUTS.items() for layout in layouts],
)
def test_chain(pools: Pools, chain: str, layout: tuple[int, int, int, int], dtype: str) -> None:
    tp, ep, etp, ranks_per_node = layout
    cases = [
        Case(
            tp=tp,
            ep=ep,
            etp=etp,
            dtype=dtype,
            num_local_experts=num_local_experts,
            routing=routing,
            options={"moe_monta_chain": chain, "moe_monta_ranks_per_node": ranks_per_node},
            topk=1 if routing == "one_expert" else min(3, ep * num_local_experts - 1) or 1,
        )
        for num_local_experts in (1, 2, 3)
        for routing in ROUTINGS
        # Sparing one expert of one leaves none.
        if not (routing == "expert0_empty" and ep * num_local_experts < 3)
    ]
    # Rows are moved whatever they hold, so each case meets some of the numbers of chunks.
    for first in range(3):
        chunks = [1] if CHAINS[chain].serial else CHUNKS[first::3]
        reports = pools[4].run(compare_many, cases[first::3], chunks)
        for of_rank in reports:
            assert {report["dispatcher"] for report in of_rank} == {"MontaTokenDispatcher"}
        assert sum(sum(report["bytes"].values()) for of_rank in reports for report in of_rank) > 0


def test_a_second_derivative_is_refused_by_name(pools: Pools) -> None:
    for num_chunks in (1, 3):
        for error in pools[4].run(second_derivative, Case(), num_chunks):
            assert "once_differentiable" in error
