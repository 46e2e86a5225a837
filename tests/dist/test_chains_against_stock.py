"""Every chain against stock on a whole MoE layer."""

import pytest
from layers import Case, compare_many
from pool import Pools

from monta_megatron.chains import CHAINS

# (tp, ep, etp, ranks per node), on 4 ranks.
LAYOUTS = {
    "alltoall": [(1, 4, 1, 2), (2, 2, 2, 2), (1, 2, 2, 4)],
    "allgather": [(1, 4, 1, 2), (2, 2, 2, 2), (1, 2, 2, 4)],
    "alltoall_dedup": [(1, 4, 1, 4), (2, 4, 1, 2), (4, 2, 1, 3)],
    "hierarchical_allgather": [(1, 4, 1, 2), (2, 2, 2, 2), (4, 1, 4, 4), (1, 4, 1, 1)],
    "hierarchical_alltoall": [(1, 4, 1, 2), (2, 4, 1, 4), (1, 4, 1, 1)],
}
ROUTINGS = ["uniform", "rank0_empty", "expert0_empty", "one_expert", "few_tokens"]


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
        for num_local_experts in (1, 3)
        for routing in ROUTINGS
        if not (routing == "expert0_empty" and ep * num_local_experts < 4)
    ]
    chunks = [1] if CHAINS[chain].serial else [1, 2, 5]
    pools[4].run(compare_many, cases, chunks)
