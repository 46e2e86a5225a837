"""docs/claims.md is what the cost model predicts now."""

import re
import sys

import pytest
from pages import REPOSITORY, check_current

SCRIPTS = REPOSITORY / "scripts"
sys.path.insert(0, str(SCRIPTS))

from studies import PAGE, break_even, gain_pct, monta_steps, network_us, points  # noqa: E402


def test_the_page_is_current() -> None:
    check_current(PAGE, SCRIPTS / "studies.py")


def test_the_page_shows_its_pictures() -> None:
    shown = re.findall(r"\((pictures/\w+\.png)\)", PAGE.read_text(encoding="utf-8"))
    assert len(shown) == 3 and all((PAGE.parent / path).is_file() for path in shown)


def test_step_0_sends_eight_times_the_bytes() -> None:
    of = monta_steps(1, 12.5)
    # A pass's AllToAll starts in 30 us, on both sides of the ratio.
    start_us = 4 * 30
    rows_us = network_us(of.duplicated) - start_us
    # Not exactly, because probabilities go in messages of their own on one side.
    assert rows_us == pytest.approx(8 * (network_us(of.serial) - start_us), rel=0.005)


def test_where_serial_wins() -> None:
    assert break_even([0.9, 0.95, 1.05, 1.1, 1.2, 1.2, 1.2]) == pytest.approx(1.375)
    assert break_even([1.1] * 7) == 1 and break_even([0.9] * 7) is None


def test_the_choice_is_never_slower_than_alltoall() -> None:
    """A gain is over the best layout with alltoall, which the planner may choose as well."""
    every = [point for point in points("gpt_oss_120b", 256) if point.fits]
    assert gain_pct(every) >= 0 and gain_pct(every, " 1F1B") >= 0
    assert all(
        point.iterations["chosen"].total_ms <= point.iterations["alltoall"].total_ms * (1 + 1e-9)
        for point in every
        if point.price.chain.name == "alltoall"
    )
