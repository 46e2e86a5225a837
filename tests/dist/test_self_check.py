"""The first use of a chain is compared with stock's dispatcher, and a difference ends the run.

That nothing differs where all is well is what every test of a layer shows: the check is on.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from layers import Case
from pool import Pools
from self_checks import (
    check_all,
    error_if_stock_fails,
    errors_with,
    kernel_error,
    random_numbers_are_left_alone,
    round_trips,
)

from monta_megatron.integration.checks import RoundTrip, difference, random_batch

CHAIN = {"moe_monta_chain": "hierarchical_alltoall", "moe_monta_ranks_per_node": 2}
CASE = Case(options={**CHAIN, "moe_monta_num_chunks": 2})


def test_a_fault_is_named_on_every_rank(pools: Pools) -> None:
    """In a second pass as well: what has failed was not checked."""
    first, second = pools[4].run(errors_with, CASE, "combine", 2)[0]
    assert first == second
    # 255 tokens: one less than on rank 0.
    for text in (
        "moe_monta_check: chain hierarchical_alltoall in 2 chunks",
        "on rank 1 of the ranks 0, 1, 2, 3; on rank 1 output differs at [254, 15]: ",
        "moe_token_dispatcher_type alltoall",
    ):
        assert text in first


def test_a_fault_at_the_experts_is_one(pools: Pools) -> None:
    assert "on rank 1 rows differs at [" in pools[4].run(errors_with, CASE, "dispatch")[0][0]


def test_a_check_that_fails_names_itself(pools: Pools) -> None:
    for error in pools[4].run(error_if_stock_fails, CASE):
        assert error.startswith(
            "moe_monta_check: a round trip of stock's dispatcher failed: RuntimeError: split sizes"
        )


def test_chains_are_checked_beside_a_micro_batch_of_another(pools: Pools) -> None:
    options = {
        "moe_monta_chain": "auto",
        "moe_monta_ranks_per_node": 2,
        "moe_monta_tune_steps": 0,
    }
    chains = [("alltoall_dedup", 2), ("hierarchical_alltoall", 3), ("alltoall", 1)]
    counted = pools[4].run(check_all, Case(options=options), chains)
    # What auto has chosen may be one of them.
    assert len(set(counted)) == 1 and counted[0] in (3, 4)


def test_a_kernel_that_differs_on_one_rank_ends_all(pools: Pools) -> None:
    errors = pools[4].run(kernel_error, "kernel reduce: rows differs at [1, 2]")
    assert len(set(errors)) == 1
    for text in (
        "on rank 1 of the ranks 0, 1, 2, 3; on rank 1 kernel reduce: rows differs at [1, 2]",
        "moe_monta_kernels torch",
    ):
        assert text in errors[0]
    assert set(pools[4].run(kernel_error, "")) == {""}


def test_it_can_be_switched_off(pools: Pools) -> None:
    off = Case(options={**CASE.options, "moe_monta_check": 0})
    assert pools[4].run(errors_with, off, "combine") == [[""]] * 4


def test_a_chain_is_checked_once_for_all_layers(pools: Pools) -> None:
    assert set(pools[4].run(round_trips, CASE, 2)) == {2}
    pools[4].run(random_numbers_are_left_alone, CASE)


@pytest.mark.parametrize(
    ("dtype", "topk", "etp", "largest"),
    [
        # 8 terms of at most 2 * 3 are 48: bf16 holds every integer up to 256.
        (torch.bfloat16, 8, 1, 3),
        # 32 * 2 terms: 256 // (2 * 64) is 2.
        (torch.bfloat16, 32, 2, 2),
        (torch.bfloat16, 128, 4, 1),
        (torch.float16, 128, 1, 3),
        (torch.float64, 8, 1, 3),
    ],
)
def test_sums_of_the_random_rows_are_exact(
    dtype: torch.dtype, topk: int, etp: int, largest: int
) -> None:
    batch = random_batch(dispatcher_with(dtype, topk, etp))
    assert batch.tokens.dtype == dtype
    assert set(batch.tokens.flatten().tolist()) == set(range(largest + 1))
    assert (batch.routing_map.sum(dim=1) == topk).all()
    assert torch.equal(batch.probs > 0, batch.routing_map)


def test_a_batch_is_small_whatever_is_under_way() -> None:
    """Ranks have different numbers of tokens, unless experts are filled to capacity."""
    made = dispatcher_with(torch.float32, 2, 1)
    assert [len(tensor) for tensor in random_batch(made)] == [253] * 3
    made.drop_and_pad = True
    assert [len(tensor) for tensor in random_batch(made)] == [256] * 3


def dispatcher_with(dtype: torch.dtype, topk: int, etp: int) -> SimpleNamespace:
    """All that a batch is made by; the micro-batch under way has no experts."""
    return SimpleNamespace(
        config=SimpleNamespace(
            params_dtype=dtype, moe_router_topk=topk, moe_router_padding_for_quantization=False
        ),
        layout=SimpleNamespace(rank=3, etp=etp, num_experts=512),
        probs=torch.zeros(2, 512),
        routing_map=torch.zeros(2, 512, dtype=torch.bool),
        hidden_shape=(2, 16),
        drop_and_pad=False,
    )


def test_a_wrong_shape_is_a_difference() -> None:
    trip = RoundTrip(*(torch.zeros(3, 2) for _ in range(4)))
    assert difference(trip, trip) == ""
    short = replace(trip, probs=torch.zeros(2, 2))
    assert difference(short, trip) == "probs has shape [2, 2], stock's [3, 2]"
