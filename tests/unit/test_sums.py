"""Sums of rows: one term after the other, in order, from +0.0; the same bits as a loop."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from monta_megatron.exchange.rows import sum_ranks, sum_rows

# From small to large and back: added in another order, most sums have other bits.
SCALES = (1e-8, 1.0, 1e8, -1e8, 1e-40, 3e7, 1e-3, -1.0, 1e5)


def terms(num_rows: int, hidden_size: int) -> torch.Tensor:
    torch.manual_seed(0)
    scales = torch.tensor(SCALES)[torch.randint(len(SCALES), (num_rows, hidden_size))]
    rows = torch.randn(num_rows, hidden_size) * scales
    return torch.where(torch.rand(rows.shape) < 0.3, -0.0, rows)


def added(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """[P, H] -> [H]."""
    total = np.zeros(rows.shape[1:], dtype=np.float32)
    for row in rows:
        total = total + row
    return total


def assert_same_bits(actual: torch.Tensor, expected: NDArray[np.float32]) -> None:
    assert torch.equal(actual.view(torch.int32), torch.from_numpy(expected.view(np.int32)))


@pytest.mark.parametrize("hidden_size", [1, 8, 72, 1000])
def test_rows_are_added_in_their_order(hidden_size: int) -> None:
    rows = terms(60, hidden_size)
    lengths = [0, 1, 2, 3, 4, 5, 7, 9, 16]
    order = torch.randperm(60)[: sum(lengths)]
    starts = torch.tensor(np.cumsum([0, *lengths]))
    groups = [rows[of_row].numpy() for of_row in order.split(lengths)]
    assert_same_bits(sum_rows(rows, order, starts), np.stack([added(group) for group in groups]))


@pytest.mark.parametrize(
    "num_parts, ranks_per_sum", [(1, 1), (4, 4), (5, 5), (8, 8), (9, 3), (8, 2)]
)
def test_parts_are_added_in_the_order_of_ranks(num_parts: int, ranks_per_sum: int) -> None:
    parts = terms(num_parts * 3, 72)
    total = torch.empty(3, 72)
    sum_ranks(total, parts, torch.float32, ranks_per_sum)
    # [P, N, H] -> sums of adjacent parts -> their sum
    by_rank = parts.view(num_parts // ranks_per_sum, ranks_per_sum, 3, 72).numpy()
    assert_same_bits(total, added(np.stack([added(group) for group in by_rank])))


def test_a_single_row_may_end_before_its_stride() -> None:
    """Its stride says nothing of the memory behind it: 9 columns of a row of 16."""
    rows = torch.empty(9).as_strided((1, 9), (16, 1)).fill_(2)
    sums = sum_rows(rows, torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]))
    assert torch.equal(sums, torch.full((1, 9), 4.0))


def test_a_rank_s_part_of_a_sum_is_not_rounded() -> None:
    # Two copies of one row of three values; the first copy is this rank's, before rounding.
    copies = torch.tensor([[1.0, torch.inf, torch.inf], [1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    unrounded = torch.tensor([[1 + 2**-8, torch.inf, 3.4e38]])
    total = torch.empty(1, 3, dtype=torch.bfloat16)
    sum_ranks(total, copies, torch.float32, 2, unrounded, rank=0)
    # 2 + 2**-8 is rounded to even; the last value is infinite in bf16, which ends before it.
    assert total.tolist() == [[2.0, torch.inf, torch.inf]]
    unrounded[0, 0] = 1 + 2**-7 + 2**-8
    sum_ranks(total, copies, torch.float32, 2, unrounded, rank=0)
    assert total[0, 0] == 2 + 2**-6
