"""What the checks of a benchmark accept and refuse, on tensors made by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_bench_numbers import SPLIT

from monta_megatron.tools.bench import measure
from monta_megatron.tools.bench.candidates import Passed
from monta_megatron.tools.bench.measure import in_eight_bits, rounding_differences


def ours(rows: str = "permuted tokens") -> Any:
    """A candidate of ours with only the attributes that the checks read."""
    return SimpleNamespace(kind="monta", rows=rows, experts_pipelined=False)


def test_a_sum_that_is_not_a_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.dist, "all_reduce", lambda values: None)
    rows = torch.ones(2, 4)
    reference = measure.Reference(exact=rows.double(), once=rows)

    def lines(mine: torch.Tensor) -> list[str]:
        return measure._rounded("output", mine, rows + 1e-3, reference, ours(), SPLIT)

    assert lines(rows) == []
    for wrong in (rows + 1, rows * math.nan):
        (line,) = lines(wrong)
        assert line.startswith("rms error of the output is ")


def test_a_gradient_of_probabilities_that_is_nan_is_wrong() -> None:
    def passed(gradient: float) -> Passed:
        return Passed(
            expert_rows=torch.ones(2, 4),
            tokens_per_expert=torch.tensor([2]),
            row_probs=torch.ones(2),
            output=torch.ones(2, 1, 4),
            input_gradient=torch.ones(2, 1, 4),
            probs_gradient=torch.full((2, 8), gradient),
        )

    assert measure._moved(ours(), passed(1.0), passed(1.0)) == []
    for wrong in (math.nan, 1.001):
        (line,) = measure._moved(ours(), passed(wrong), passed(1.0))
        assert line.startswith("gradient of the probabilities is off by up to ")


@pytest.mark.parametrize(
    ("rows", "ep", "etp", "exact"),
    [
        ("permuted tokens", 4, 1, True),
        ("permuted tokens", 2, 2, True),
        ("permuted tokens", 1, 4, False),
        ("tokens", 4, 1, False),
    ],
)
def test_which_sums_have_to_be_stocks_to_the_bit(rows: str, ep: int, etp: int, exact: bool) -> None:
    assert measure.has_stocks_order(ours(rows), replace(SPLIT, ep=ep, etp=etp)) == exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_eight_bits_round_is_accepted_and_no_more(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-6, 6, 20)[:, None, None]
    hidden = (torch.randn(20, 1, 300, generator=generator) * sizes).to(dtype)
    arrived = in_eight_bits(hidden)
    assert not torch.equal(arrived, hidden) and rounding_differences(arrived, hidden) == []
    # One value of a group with another scale, twice its half step off; then a row at another place.
    arrived[3, 0, 200] = hidden[3, 0, 200] * (1 + 2.0**-3)
    assert rounding_differences(arrived, hidden)[0].startswith("1 values in eight bits are off")
    assert rounding_differences(in_eight_bits(hidden.roll(1, dims=0)), hidden) != []
    assert rounding_differences(torch.full_like(hidden, torch.nan), hidden) != []
