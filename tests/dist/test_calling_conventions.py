"""A dispatcher takes whatever stock's takes: the calls of Megatron-LM's own tests, and their kin.

Shapes, dtypes and settings are those of its test_a2a_token_dispatcher.py, on 4 ranks; every chain
that can run on a layout is called, with the check at first use on.
"""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import exchanges
import pytest
import torch
from dispatchers import DROP, PAD, check_many, run_phases
from layers import Case, build_layer, error_of, make_batch
from pool import Pools, on_ranks
from test_exchange_properties import failures_of

from monta_megatron.chains import CHAINS
from monta_megatron.integration.dispatcher import MontaTokenDispatcher

# (tp, ep, etp) -> chains that run there.
LAYOUTS = {
    (1, 4, 1): 6,
    (4, 1, 4): 3,
    (2, 2, 2): 4,
    (2, 4, 1): 6,
    # Never tested by stock: expert tensor parallelism of its own.
    (1, 1, 4): 3,
    (1, 2, 2): 4,
}
IN_TWO = {"flat": True, "tokens": (16,)}
IN_THREE = {"batch": 4, "tokens": (16,)}
FP64_ROWS = {"dtype": "float64", "params_dtype": "float32"}
CALLS: dict[str, dict[str, Any]] = {
    "flat": IN_TWO,
    "sequences side by side": {"batch": 8, "tokens": (256,)},
    "bf16": {**IN_TWO, "dtype": "bfloat16"},
    "fp16 rows of an fp32 layer": {**IN_THREE, "dtype": "float16", "params_dtype": "float32"},
    # Stock reduces over ETP in the dtype of the probabilities.
    "fp64 rows, fp32 probabilities": {**IN_TWO, **FP64_ROWS},
    "fp64 rows and probabilities": {**IN_TWO, **FP64_ROWS, "probs_dtype": "float64"},
    "strided": {**IN_THREE, "strided": True},
    "evaluation, then training": {**IN_THREE, "is_training": False, "num_steps": 2},
    "no tokens": {**IN_TWO, "tokens": (0,)},
    "no sequences": {**IN_THREE, "tokens": (0,)},
    "a latent width": {"width": 12},
    "other tokens in every step": {"tokens": (24, 3, 0, 7, 0, 0, 0, 0, 100), "num_steps": 6},
    "what a router has dropped": {**IN_TWO, "routing": "capacity", "config": DROP},
    "padded to capacity": {**IN_TWO, "config": PAD},
    # Each as it is, where no token has more than top-k, and where a framework has patched stock.
    **{
        f"{routing}, seed {seed}": {"routing": routing, "seed": seed}
        for routing in ("capacity", "no_expert", "any_number", "every_expert", "mixed")
        for seed in (0, 1)
    },
    # Dropped in its first micro-batch.
    "one rank has no routed token": {"routing": "empty_rank", "config": DROP, "seed": 2},
}
ON_LAYOUTS: dict[str, Iterable[tuple[int, int, int]]] = {
    **dict.fromkeys(
        ("sequences side by side", "what a router has dropped", "padded to capacity"), LAYOUTS
    ),
    "fp64 rows, fp32 probabilities": [(1, 4, 1), (2, 4, 1)],
}


def cases_on(layout: tuple[int, int, int], **call: Any) -> list[Case]:
    """A dispatcher of every chain that can run there, and one with its experts in the pipeline."""
    tp, ep, etp = layout
    call = {"num_local_experts": 8 // ep, "num_chunks": 2, "tokens": (12,), **call}
    cases = []
    for name, chain in CHAINS.items():
        place = exchanges.Case(chain=name, ep=ep, etp=etp).layout(0)
        is_padded = call.get("config") == PAD and chain.rows == "tokens"
        if chain.incompatibility(place) is None and not is_padded:
            case = Case(chain=name, tp=tp, ep=ep, etp=etp, **call)
            cases.append(replace(case, num_chunks=1) if chain.serial else case)
            if chain.rows == "tokens":
                cases.append(replace(case, pipelined=True))
    return cases


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_chain_is_called(layout: tuple[int, int, int]) -> None:
    assert len({case.chain for case in cases_on(layout)}) == LAYOUTS[layout]


@pytest.mark.parametrize(
    ("layout", "call"),
    [(layout, call) for call in CALLS for layout in ON_LAYOUTS.get(call, [(1, 4, 1), (2, 2, 2)])],
    ids=str,
)
def test_a_call(pools: Pools, layout: tuple[int, int, int], call: str) -> None:
    failures = failures_of(pools[4], check_many, cases_on(layout, **CALLS[call]))
    assert not failures, "\n".join(failures)


@on_ranks(4)
def test_a_map_with_more_experts_than_were_permuted() -> None:
    case = Case(routing="every_expert")
    layer = build_layer(case)
    error = error_of(run_phases, case, layer.token_dispatcher, make_batch(case, layer))
    assert error.startswith(
        "routing_map: holds 192 token-expert pairs, must hold at most the 48 of moe_router_topk"
    )


def test_a_fused_permutation_keeps_its_mapping() -> None:
    """Transformer Engine's has a row for each token, whatever was permuted: 24 rows of 12."""
    dispatcher: Any = SimpleNamespace(
        config=SimpleNamespace(moe_permute_fusion=True),
        reversed_local_input_permutation_mapping=torch.zeros(12, 9),
    )
    rows, probs = MontaTokenDispatcher._as_counted(
        dispatcher, torch.zeros(24, 8), torch.zeros(24), 20
    )
    assert (len(rows), len(probs)) == (20, 20)
    assert len(dispatcher.reversed_local_input_permutation_mapping) == 12
