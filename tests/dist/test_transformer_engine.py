"""On a GPU, with Transformer Engine: grouped GEMM and fused permutation, against stock."""

import importlib.util
import os
from contextlib import closing
from typing import Any

import pytest
import torch
from layers import Case, compare
from pool import Pool

missing = [
    what
    for what, there in (
        ("a GPU", torch.cuda.is_available() and os.environ.get("MONTA_CPU_RANKS") != "1"),
        (
            "Transformer Engine (pip install 'transformer-engine[pytorch]')",
            importlib.util.find_spec("transformer_engine") is not None,
        ),
    )
    if not there
]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")

# NCCL >= 2.30.3 runs several ranks on one GPU where NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
WORLD_SIZES = [1, 2] if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else [1]


IN_PIPELINE = {"chain": "alltoall_dedup", "pipelined": True}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("changes", "chunks"), [({}, [1, 3]), (IN_PIPELINE, [2, 3])])
def test_te_spec_equals_stock(world_size: int, changes: dict[str, Any], chunks: list[int]) -> None:
    """Experts in one call, and in the pipeline."""
    case = Case(
        ep=world_size,
        num_local_experts=4,
        dtype="bfloat16",
        routing="router",
        config={"moe_grouped_gemm": True, "moe_permute_fusion": True},
        ranks_per_node=None,
        **changes,
    )
    with closing(Pool(world_size, backend="nccl")) as pool:
        pool.run(compare, case, chunks)
