"""The helper that compares tensors in tests: what it says of a mismatch, and that it sees each."""

import pytest
import torch
from equal import assert_equal, difference

EXPECTED = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
LARGER = EXPECTED + torch.tensor([[0.0, 0.0], [0.0, 0.5]])
NAN = torch.full((), torch.nan)


@pytest.mark.parametrize(
    ("actual", "expected", "bound", "text"),
    [
        (EXPECTED.clone(), EXPECTED, None, None),
        (EXPECTED[:0], EXPECTED[:0], None, None),
        (EXPECTED.bool(), EXPECTED.bool(), None, None),
        (LARGER, EXPECTED.double(), 0.5, None),
        # A bound of each value.
        (LARGER, EXPECTED, LARGER - EXPECTED, None),
        (LARGER, EXPECTED, 0.25, "1 of 4 values differ by up to 0.5, the first at [1, 1]: 4.5, "),
        (-EXPECTED, EXPECTED, None, "4 of 4 values differ by up to 8, the first at [0, 0]: -1.0, "),
        (EXPECTED[:1], EXPECTED, None, "shape (1, 2), expected (2, 2)"),
        (EXPECTED.double(), EXPECTED, None, "torch.float64, expected torch.float32"),
        (NAN, NAN, None, "1 of 1 values differ by up to nan, the first at []: nan, expected nan"),
        (NAN, NAN, 1.0, "1 of 1 values differ by up to nan, the first at []: nan, expected nan"),
    ],
)
def test_a_mismatch_says_where_it_starts_and_both_values(
    actual: torch.Tensor, expected: torch.Tensor, bound: float | None, text: str | None
) -> None:
    if text is None:
        assert_equal(actual, expected, "rows", bound)
        return
    assert str(difference(actual, expected, bound)).startswith(text)
    with pytest.raises(AssertionError, match=r"^rows: "):
        assert_equal(actual, expected, "rows", bound)
