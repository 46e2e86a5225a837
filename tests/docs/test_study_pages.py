"""docs/claims.md is what the cost model predicts now."""

import sys

import pytest
from pages import REPOSITORY, check_current

SCRIPTS = REPOSITORY / "scripts"
sys.path.insert(0, str(SCRIPTS))

from studies.contention import break_even  # noqa: E402
from studies.monta_claims import monta_steps, network_us  # noqa: E402
from studies.scale_points import all_to_all_ratio, points, ring_ratio  # noqa: E402
from study_pages import PAGE, STUDIES  # noqa: E402


def test_the_page_is_current() -> None:
    check_current(PAGE, SCRIPTS / "study_pages.py")


@pytest.mark.parametrize("name", STUDIES)
def test_the_page_shows_a_picture(name: str) -> None:
    assert f"pictures/{name}.png" in PAGE.read_text(encoding="utf-8")
    assert (REPOSITORY / "docs" / "pictures" / f"{name}.png").is_file()


def test_links_between_pods() -> None:
    # 512 ranks are two pods, half of the bytes of each rank cross: at 4:1 they need twice the time.
    assert all_to_all_ratio(512, 4) == 0.5
    assert all_to_all_ratio(512, 1) == all_to_all_ratio(256, 4) == 1
    # A ring whose neighbours lie a pod apart crosses with every byte, 8 rings cross with 8 of 256.
    assert ring_ratio(256, 4) == 0.25
    assert ring_ratio(8, 4) == ring_ratio(64, 4) == 1


def test_step_0_sends_eight_times_the_bytes() -> None:
    of = monta_steps(1, 0.5)
    # A pass's AllToAll starts in 30 us, on both sides of the ratio.
    start_us = 4 * 30
    rows_us = network_us(of.duplicated) - start_us
    # Not exactly, because probabilities go in messages of their own on one side.
    assert rows_us == pytest.approx(8 * (network_us(of.serial) - start_us), rel=0.005)


def test_where_serial_wins() -> None:
    assert break_even([0.9, 0.95, 1.05, 1.1, 1.2, 1.2, 1.2]) == pytest.approx(1.375)
    assert break_even([1.1] * 7) == 1 and break_even([0.9] * 7) is None


def test_more_oversubscription_never_helps() -> None:
    name = "deepseek_v3"
    for one, four in zip(points(name, 4096, 1), points(name, 4096, 4), strict=True):
        assert one.settings == four.settings
        assert four.stock.total_ms >= one.stock.total_ms
