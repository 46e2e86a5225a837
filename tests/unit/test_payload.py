"""Sums over the copies of a row that came from several ranks."""

import torch

from monta_megatron.exchange.payload import OwnPart, Payload


def test_a_rank_s_own_part_is_not_rounded_and_infinity_stays() -> None:
    # Two copies of one row of three values; the first copy is this rank's own, before rounding.
    copies = torch.tensor([[1.0, torch.inf, torch.inf], [1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    own = torch.tensor([[1 + 2**-8, torch.inf, 3.4e38]])
    payload = Payload.of([copies], packed=False)
    total = payload.allocate(1)
    payload.sum_of_copies(total, [copies], 2, torch.float32, OwnPart(rows=own, copy=0), 2)
    # 2 + 2**-8 is rounded to even; the last value is infinite on the wire, as bf16 ends before it.
    assert total[0].tolist() == [[2.0, torch.inf, torch.inf]]
    own[0, 0] = 1 + 2**-7 + 2**-8
    payload.sum_of_copies(total, [copies], 2, torch.float32, OwnPart(rows=own, copy=0), 2)
    assert total[0][0, 0] == 2 + 2**-6
