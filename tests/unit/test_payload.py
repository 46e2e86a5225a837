"""Sums over the copies of a row that came from several ranks."""

import torch

from monta_megatron.exchange.sums import sum_ranks


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
