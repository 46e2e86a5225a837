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
