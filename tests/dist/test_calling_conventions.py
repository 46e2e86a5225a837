"""A dispatcher takes whatever stock's takes: the calls of Megatron-LM's own tests, and their kin.

Shapes, dtypes and settings are those of its test_a2a_token_dispatcher.py, on 4 ranks; every chain
that can run on a layout is called, with the check at first use on.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conventions import Call, follows_the_map, pads_for_quantization, pads_to_capacity, restores
from layers import Case, replay_cuda_graph_attributes
from pool import Pools

from monta_megatron.integration.dispatcher import MicroBatch, MontaTokenDispatcher

# (tp, ep, etp) and how many dispatchers run there: stock's, and a chain each.
LAYOUTS = {
    (1, 4, 1): 7,
    (4, 1, 4): 4,
    (2, 2, 2): 5,
    (2, 4, 1): 7,
    # Never tested by stock: expert tensor parallelism of its own.
    (1, 1, 4): 4,
    (1, 2, 2): 5,
}
IN_TWO = Call(shape=(16,))
IN_THREE = Call(shape=(32, 8))


def case_on(layout: tuple[int, int, int], **more: Any) -> Case:
    """8 experts, top-2; the router decides."""
    tp, ep, etp = layout
    return Case(tp=tp, ep=ep, etp=etp, num_local_experts=8 // ep, topk=2, routing="router", **more)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dispatch_and_combine_restore(pools: Pools, layout: tuple[int, int, int]) -> None:
    for call in (IN_TWO, IN_THREE):
        for called in pools[4].run(restores, case_on(layout), call):
            assert len(called) == LAYOUTS[layout], called


@pytest.mark.parametrize(
    "call",
    [
        Call(shape=(16,), dtype="bfloat16"),
        Call(shape=(4, 4), dtype="float16"),
        # Not the dtype of the parameters.
        Call(shape=(16,), dtype="float64"),
        Call(shape=(16,), contiguous=False),
        Call(shape=(8, 2), with_gradient=False),
        Call(shape=(16,), with_gradient=False),
        Call(shape=(0,)),
        Call(shape=(0, 4)),
    ],
    ids=str,
)
def test_other_tensors(pools: Pools, call: Call) -> None:
    dtype = call.dtype if call.dtype == "bfloat16" else "float32"
    for layout in ((1, 4, 1), (2, 2, 2)):
        pools[4].run(restores, case_on(layout, dtype=dtype), call)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_capacity(pools: Pools, layout: tuple[int, int, int]) -> None:
    config = {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "probs"}
    pools[4].run(restores, case_on(layout, config=config), IN_TWO)
    config |= {"moe_expert_capacity_factor": 0.6}
    for called in pools[4].run(pads_to_capacity, case_on(layout, config=config), IN_TWO):
        # Stock's, and the chains of permuted tokens.
        assert len(called) == 3, called


@pytest.mark.parametrize("layout", LAYOUTS)
def test_router_padding(pools: Pools, layout: tuple[int, int, int]) -> None:
    pools[4].run(pads_for_quantization, case_on(layout), Call(shape=(32,)))


@pytest.mark.parametrize("routing", ["fewer", "none", "more", "mixed", "unrouted"])
def test_maps_without_topk_experts(pools: Pools, routing: str) -> None:
    """As it is, where no token has more; and where a framework has patched stock for such maps."""
    holds_more = routing in ("more", "mixed")
    for tp, ep, etp in ((1, 4, 1), (2, 2, 2)):
        case = Case(tp=tp, ep=ep, etp=etp, topk=2, routing=routing)
        pools[4].run(follows_the_map, case, 2, holds_more)
    if routing == "unrouted":
        pools[4].run(follows_the_map, case, 2, True)


def test_one_rank_has_no_routed_token(pools: Pools) -> None:
    """Its capacity has dropped all of them, in its first micro-batch."""
    config = {"moe_expert_capacity_factor": 1.0}
    case = Case(ep=2, num_local_experts=1, topk=1, routing="rank1_unrouted", config=config)
    for called in pools[2].run(follows_the_map, case, 2, False):
        assert "alltoall_dedup" in called


@pytest.mark.parametrize("chain", ["alltoall", "alltoall_allgather", "hierarchical_alltoall"])
def test_a_captured_permutation_has_fewer(pools: Pools, chain: str) -> None:
    options = {"moe_monta_chain": chain, "moe_monta_ranks_per_node": 2}
    for routing in ("fewer", "uniform"):
        pools[4].run(replay_cuda_graph_attributes, Case(routing=routing, options=options), 1)


def permuted(fused: bool, num_source_rows: int) -> SimpleNamespace:
    """A dispatcher in the middle of a micro-batch of 12 tokens, of which 24 rows were permuted."""
    exchange: Any = SimpleNamespace(bound_chain=SimpleNamespace(num_source_rows=num_source_rows))
    return SimpleNamespace(
        micro_batch=MicroBatch(choice=None, exchanges=[exchange]),
        config=SimpleNamespace(moe_permute_fusion=fused),
        reversed_local_input_permutation_mapping=torch.zeros(12, 9),
    )


def test_a_map_with_more_experts_than_were_permuted() -> None:
    with pytest.raises(
        ValueError, match="routing_map: holds 26 token-expert pairs, must hold at most"
    ):
        MontaTokenDispatcher._as_counted(permuted(False, 26), torch.zeros(24, 8), torch.zeros(24))


def test_a_fused_permutation_keeps_its_mapping() -> None:
    """Transformer Engine's has a row for each token, whatever was permuted."""
    dispatcher = permuted(True, 20)
    rows, probs = MontaTokenDispatcher._as_counted(dispatcher, torch.zeros(24, 8), torch.zeros(24))
    assert (len(rows), len(probs)) == (20, 20)
    assert len(dispatcher.reversed_local_input_permutation_mapping) == 12
