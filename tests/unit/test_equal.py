"""The helper that compares tensors in tests: what it says of a mismatch, and that it sees each."""

import pytest
import torch
from equal import assert_equal, difference

EXPECTED = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def test_a_mismatch_says_where_it_starts_and_both_values() -> None:
    actual = torch.tensor([[1.0, 2.0], [3.5, 6.0]])
    line = "2 of 4 values differ by up to 2, the first at [1, 0]: 3.5, expected 3.0"
    assert difference(actual, EXPECTED) == line
    with pytest.raises(AssertionError, match="rows: 2 of 4 values differ"):
        assert_equal(actual, EXPECTED, "rows")


def test_shape_dtype_and_nan_are_seen_too() -> None:
    assert difference(EXPECTED[:1], EXPECTED) == "shape (1, 2), expected (2, 2)"
    assert difference(EXPECTED.double(), EXPECTED) == "torch.float64, expected torch.float32"
    nan = torch.full((), torch.nan)
    assert difference(nan, nan) == (
        "1 of 1 values differ by up to nan, the first at []: nan, expected nan"
    )
    assert difference(nan, nan, bound=1.0) is not None


def test_what_is_equal_is_no_mismatch() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.int32, torch.bool):
        assert_equal(EXPECTED.to(dtype), EXPECTED.to(dtype), dtype)
    assert_equal(EXPECTED[:0], EXPECTED[:0], "nothing")


def test_a_bound_is_of_each_value_or_of_all() -> None:
    actual = EXPECTED + torch.tensor([[0.0, 0.0], [0.0, 0.5]])
    assert_equal(actual, EXPECTED.double(), "all", bound=0.5)
    assert_equal(actual, EXPECTED, "each", bound=torch.tensor([[0.0, 0.0], [0.0, 0.5]]))
    assert difference(actual, EXPECTED, bound=0.25) == (
        "1 of 4 values differ by up to 0.5, the first at [1, 1]: 4.5, expected 4.0"
    )
