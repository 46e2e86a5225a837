"""Speedups and their intervals."""

import numpy as np

from monta_megatron.tools.ratios import ratio_interval, ratio_of_medians


def test_ratio_of_medians() -> None:
    times_ms = np.arange(1.0, 12.0)
    assert ratio_of_medians(2 * times_ms, times_ms) == 2.0


def test_interval_of_a_ratio_keeps_repeats_together() -> None:
    # The machine is ten times slower in half of the repeats, for both: the ratio is exactly 2.
    times_ms = np.array([1.0, 10.0] * 10)
    assert ratio_interval(2 * times_ms, times_ms) == (2.0, 2.0)
    # Medians of 20 draws with a deviation of 10% have one of about 3%.
    noise = np.random.default_rng(0).normal(1.0, 0.1, size=(2, 20))
    low, high = ratio_interval(3 * noise[0], noise[1])
    assert low < 3 < high and 0.1 < high - low < 0.8
    assert ratio_interval(np.array([4.0]), np.array([2.0])) == (2.0, 2.0)
