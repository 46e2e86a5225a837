"""The first use of a chain is compared with stock's dispatcher, and a difference ends the run.

That nothing differs where all is well is what every test of a layer shows: the check is on.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import Pools
from layers import Case
from self_checks import (
    error_with,
    kernel_error,
    random_numbers_are_left_alone,
    round_trips,
)

from monta_megatron.integration.self_check import RoundTrip, difference, random_rows

CHAIN = {"moe_monta_chain": "hierarchical_alltoall", "moe_monta_ranks_per_node": 2}
CASE = Case(options={**CHAIN, "moe_monta_num_chunks": 2})


def test_a_fault_is_named_on_every_rank(pools: Pools) -> None:
    errors = pools[4].run(error_with, CASE, "combine")
    assert len(set(errors)) == 1
    for text in (
        "moe_monta_check: chain hierarchical_alltoall in 2 chunks",
        "on rank 1 of the ranks 0, 1, 2, 3; on rank 1 output differs at [23, 0, 15]: ",
        "moe_token_dispatcher_type alltoall",
    ):
        assert text in errors[0]


def test_a_fault_at_the_experts_is_one(pools: Pools) -> None:
    assert "on rank 1 rows differs at [" in pools[4].run(error_with, CASE, "dispatch")[0]


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
    assert set(pools[4].run(error_with, off, "combine")) == {""}


def test_a_chain_is_checked_once_for_all_layers(pools: Pools) -> None:
    assert set(pools[4].run(round_trips, CASE, 2)) == {1}
    pools[4].run(random_numbers_are_left_alone, CASE)


@pytest.mark.parametrize(
    ("dtype", "num_experts_each", "etp", "largest"),
    [
        # 8 terms of at most 2 * 3 are 48: bf16 holds every integer up to 256.
        (torch.bfloat16, 8, 1, 3),
        # 32 * 2 terms: 256 // (2 * 64) is 2.
        (torch.bfloat16, 32, 2, 2),
        (torch.bfloat16, 128, 4, 1),
        (torch.float16, 128, 1, 3),
    ],
)
def test_sums_of_the_random_rows_are_exact(
    dtype: torch.dtype, num_experts_each: int, etp: int, largest: int
) -> None:
    routing_map = torch.zeros(2, 512, dtype=torch.bool)
    routing_map[1, :num_experts_each] = True
    dispatcher = SimpleNamespace(
        config=SimpleNamespace(params_dtype=dtype),
        layout=SimpleNamespace(rank=3, etp=etp),
        probs=torch.zeros(2, 512),
        routing_map=routing_map,
        hidden_shape=(64, 1, 16),
        drop_and_pad=False,
    )
    rows = random_rows(dispatcher)
    assert rows.dtype == dtype
    assert set(rows.flatten().tolist()) == set(range(largest + 1))


def test_a_wrong_shape_is_a_difference() -> None:
    trip = RoundTrip(*(torch.zeros(3, 2) for _ in range(4)))
    assert difference(trip, trip) == ""
    short = replace(trip, probs=torch.zeros(2, 2))
    assert difference(short, trip) == "probs has shape [2, 2], stock's [3, 2]"
