"""A dispatcher takes whatever stock's takes and gives what stock's gives, whatever the routing map.

Shapes, dtypes and settings are those of Megatron-LM's own test_a2a_token_dispatcher.py, and their
kin, on 4 ranks: every chain that can run on a layout is called, with the check at first use on.
Then they are drawn together at random.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from exchanges import DTYPES, ROUTINGS, SHAPES, cases_on
from layers import Case, build_layer, check, error_of, forward_backward
from pool import Pools, on_ranks
from test_exchange_properties import run_cases

from monta_megatron.integration.dispatcher import MontaTokenDispatcher

TABLES = yaml.safe_load(Path(__file__).with_name("calls.yaml").read_text())
CALLS: dict[str, dict[str, Any]] = TABLES["calls"]
DROPPED, PADDED = "what a router has dropped", "padded to capacity"
DEFAULT_LAYOUTS = [(1, 4, 1), (2, 2, 2)]


@pytest.mark.parametrize(
    ("layout", "call"),
    [(layout, call) for call in CALLS for layout in TABLES["layouts"].get(call, DEFAULT_LAYOUTS)],
    ids=str,
)
def test_a_call(pools: Pools, layout: tuple[int, int, int], call: str) -> None:
    """Every chain that can run there, and those of tokens with their experts in the pipeline."""
    tp, ep, etp = layout
    fields = {"num_local_experts": 8 // ep, "num_chunks": 2, "tokens": (12,), **CALLS[call]}
    cases = cases_on([(ep, etp, 2)], Case, tp=tp, by_value=True, **fields)
    cases += [replace(case, pipelined=True) for case in cases if case.has_tokens]
    if call == PADDED:
        cases = [case for case in cases if not case.has_tokens]
    run_cases(pools[4], check, iter(cases))


# In the ordinary test run; `scripts/property_tests.py --against stock` runs more.
NUM_CASES = 48
# Megatron makes some twenty groups for a layout, and each keeps threads as long as its processes:
# so few layouts in each life of the ranks, of so many cases.
SHAPES_PER_POOL = 3
CASES_PER_POOL = 400


def draw_cases(world_size: int, seed: int) -> Iterator[Case]:
    """Calls with other options and data without end, on a few shapes, some with `auto`."""
    draw = random.Random(seed)
    places = cases_on(draw.sample(SHAPES[world_size], SHAPES_PER_POOL), Case, by_value=True)
    while True:
        case, is_auto = draw.choice(places), draw.random() < 0.05
        dtype, probs_dtype = draw.choice(DTYPES)
        num_local_experts = draw.randint(1, 3)
        changes = {
            "num_local_experts": num_local_experts,
            "topk": draw.randint(1, min(case.ep * num_local_experts, 4)),
            "tokens": tuple(draw.randint(0, 24) for _ in range(world_size)),
            "dtype": dtype,
            "probs_dtype": probs_dtype,
            "hidden": draw.choice([8, 32, 40, 64]),
            "routing": draw.choice([*ROUTINGS, "no_expert", "empty_rank"]),
            "num_chunks": draw.randint(1, 7),
            "recompute": draw.choice(["", "", "reentrant", "not reentrant"]),
            "strided": draw.random() < 0.3,
            "log_probs": draw.random() < 0.2,
            "evaluating": draw.choice([None] * 4 + [draw.randrange(world_size)]),
            "pipelined": case.has_tokens and draw.random() < 0.25,
            "checked": draw.random() < 0.1,
            "seed": draw.randrange(2**31),
            **CALLS[draw.choice(list(CALLS))],
        }
        if is_auto:
            # A planner takes longer than a case: one configuration, which it is asked for again.
            changes |= {"chain": "auto", "num_local_experts": 2, "topk": 2, "num_chunks": None}
            changes |= {"options": {"tune_steps": draw.choice([0, 6])}, "num_steps": 12}
            changes["micro_batches"] = tuple(draw.randint(1, 3) for _ in range(12))
            # Tokens are drawn anew for every micro-batch; padding needs as many on all ranks.
            if changes.get("config") != CALLS[PADDED]["config"]:
                tokens = tuple(draw.randint(0, 24) for _ in range(12 + world_size))
                changes |= {"tokens": tokens, "batch": 1}
        changed = replace(case, **changes)
        if changed.config == CALLS[PADDED]["config"] and changed.has_tokens:
            changed = replace(changed, config=CALLS[DROPPED]["config"])
        if not changed.is_training:
            changed = replace(changed, recompute="")
        if changed.dtype == "float64":
            # Stock reduces over ETP in the dtype of the probabilities.
            changed = replace(changed, probs_dtype="float64")
        if changed.dtype == "float16" and changed.probs_dtype == "bfloat16":
            # No router of Megatron's has them; stock would round sums over ETP to 8 bits.
            changed = replace(changed, probs_dtype="float32")
        yield changed


@pytest.mark.timeout(600)
def test_every_dispatcher_gives_what_stock_gives(pools: Pools) -> None:
    run_cases(pools[4], check, islice(draw_cases(4, seed=0), NUM_CASES))


# TP, then EP, ETP, ranks per node.
LAYERS = [
    *((1, (4, 1, ranks_per_node)) for ranks_per_node in (4, 3, 2, 1)),
    *((1, (2, 2, ranks_per_node)) for ranks_per_node in (4, 2)),
    *((2, shape) for shape in ((4, 1, 2), (2, 2, 2))),
    *((4, shape) for shape in ((2, 1, 3), (1, 4, 4))),
]


@pytest.mark.parametrize("place", range(len(LAYERS)), ids=map(str, LAYERS))
def test_a_layer(pools: Pools, place: int) -> None:
    """Every chain with Megatron's experts: what they get, the output, all gradients."""
    tp, shape = LAYERS[place]
    cases = cases_on([shape], Case, tp=tp, checked=False)
    if tp == 2:
        cases += [replace(case, pipelined=True) for case in cases if case.has_tokens]
    changed = []
    # Stock runs a batch once for all chains.
    for (batch, changes), case in product(enumerate(TABLES["batches"], start=place), cases):
        # Rows are moved whatever they hold: each case meets one number of chunks, and a batch one
        # number of experts on each layout.
        num_local_experts = batch % 3 + 1
        more = {
            "num_local_experts": num_local_experts,
            "topk": min(3, shape[0] * num_local_experts - 1) or 1,
            "num_chunks": len(changed) % 7 + 1,
            "dtype": ("float32", "bfloat16")[batch % 2],
        }
        changed.append(replace(case, **(more | changes)))
    run_cases(pools[4], check, iter(changed))


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


@on_ranks(4)
def test_a_map_with_more_experts_than_were_permuted() -> None:
    case = Case(routing="every_expert")
    layer = build_layer(case)
    error = error_of(forward_backward, case, layer)
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
