"""Every chain against stock on a whole MoE layer: what experts get, the output, all gradients."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from layers import Case, build_layer, compare
from pool import on_ranks

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
# With the experts in the pipeline.
SPLIT_LAYOUTS = {
    "allgather": (2, 2, 2, 2),
    "alltoall_dedup": (2, 4, 1, 2),
    "hierarchical_allgather": (2, 2, 2, 2),
    "hierarchical_alltoall": (2, 4, 1, 2),
}
# What is changed of a case.
BATCHES: list[dict[str, Any]] = [
    {},
    {"tokens": (0, 24, 24, 24)},
    {"routing": "expert0_empty"},
    {"routing": "one_expert", "topk": 1},
    {"tokens": (2,)},
]
CHUNKS = [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("chain", "layout", "pipelined"),
    [
        *((chain, layout, False) for chain, layouts in LAYOUTS.items() for layout in layouts),
        *((chain, layout, True) for chain, layout in SPLIT_LAYOUTS.items()),
    ],
)
@on_ranks(4)
def test_chain(chain: str, layout: tuple[int, ...], pipelined: bool, dtype: str) -> None:
    tp, ep, etp, ranks_per_node = layout
    place = {"tp": tp, "ep": ep, "etp": etp, "ranks_per_node": ranks_per_node}
    case = Case(chain=chain, dtype=dtype, pipelined=pipelined, **place)
    for number, (num_local_experts, changes) in enumerate(product((1, 2, 3), BATCHES)):
        topk = min(3, ep * num_local_experts - 1) or 1
        each = replace(case, num_local_experts=num_local_experts, **{"topk": topk, **changes})
        # Rows are moved whatever they hold, so each case meets some of the numbers of chunks.
        compare(each, [1] if CHAINS[chain].serial else CHUNKS[number % 3 :: 3])


@pytest.mark.parametrize("num_chunks", [1, 3])
@on_ranks(4)
def test_a_second_derivative_is_refused_by_name(num_chunks: int) -> None:
    """The gradient of a gradient: stock has it, ours does not."""
    layer = build_layer(Case(num_chunks=num_chunks))
    hidden = torch.randn(4, 1, 16).requires_grad_()
    output, _ = layer(hidden)
    (gradient,) = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
