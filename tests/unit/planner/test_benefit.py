"""Speedup over stock: the numbers, and times as texts."""

from dataclasses import replace

import pytest

from monta_megatron.common.text import time_text
from monta_megatron.planner.plan import Benefit, share_of

# 2.16 times as fast; 3.6 ms for each of 24 layers and 32 micro-batches are 2.76 s.
FASTER = Benefit(chain="hierarchical_alltoall", chosen_us=3_100.0, alltoall_us=6_700.0)
ON_STAGE = replace(FASTER, num_moe_layers=24, num_micro_batches=32)


def test_the_numbers() -> None:
    numbers = ON_STAGE.document()
    assert (numbers["num_moe_layers"], numbers["num_micro_batches"]) == (24, 32)
    found = [numbers[name] for name in ("ratio", "saved_us", "saved_s_per_iteration")]
    assert found == pytest.approx([67 / 31, 3_600.0, 2.7648])
    assert numbers["text"] == (
        "2.16x stock alltoall: saves 3.6 ms x 24 MoE layers of a stage x 32 micro-batches = 2.76 s "
        "per iteration"
    )
    assert FASTER.document()["saved_s_per_iteration"] is None
    plain = replace(ON_STAGE, chain="alltoall", chosen_us=97.0, alltoall_us=97.0)
    assert (plain.ratio, plain.document()["saved_s_per_iteration"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("ran", "ran_ms", "saved_ms"),
    # 24 x 32 exchanges of 6.7 ms, of which the choice saves 3.6; another chain took 4 ms.
    [("alltoall", 6.7, 3.6), ("allgather", 4.0, 0.9), ("flex", None, None)],
)
def test_the_share_of_an_iteration(ran: str, ran_ms: float | None, saved_ms: float | None) -> None:
    ran_us = None if ran_ms is None else 1e3 * ran_ms
    share = share_of(9_000.0, ran, ran_us, ON_STAGE)
    if ran_ms is None or saved_ms is None:
        assert share.exchange_share is share.saved_share is None
    else:
        shares = (share.exchange_share, share.saved_share)
        assert shares == pytest.approx((ran_ms * 768 / 9000.0, saved_ms * 768 / 9000.0))
    with pytest.raises(ValueError, match=r"^--iteration-ms: got 9000, must be beside --global"):
        share_of(9_000.0, ran, ran_us, FASTER)


def test_times_have_three_digits() -> None:
    times_us = [0.0, 3.456, 999.4, 999.5, 99_600.0, 999_499.0, 10_840_000.0, 1.234e9]
    texts = ["0 us", "3.46 us", "999 us", "1 ms", "99.6 ms", "999 ms", "10.8 s", "1,234 s"]
    assert list(map(time_text, times_us)) == texts
    # Those of one line have one unit.
    assert time_text(250.0, beside_us=1_200.0) == "0.25 ms"
    assert time_text(1_200.0, beside_us=250.0) == "1.2 ms"
