"""The README is short, says at once what was not measured, and its chart shows measured results."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from pages import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

from readme_chart import results

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CHART = REPOSITORY / "docs" / "pictures" / "auto_by_rate.png"
# What a window shows before one scrolls: predictions. The picture of what was measured is below.
FIRST_SCREEN_LINES = 20


def test_it_is_short() -> None:
    # Every line counts, those of code blocks and tables as well, and so does every word, which is
    # whatever stands between spaces or ends of lines, where it is shown.
    assert len(README.splitlines()) <= 150
    assert len(re.sub("<!--.*?-->", "", README, flags=re.DOTALL).split()) <= 900


def test_the_first_screen_says_what_was_not_measured() -> None:
    first, below = (
        "\n".join(lines)
        for lines in (
            README.splitlines()[:FIRST_SCREEN_LINES],
            README.splitlines()[FIRST_SCREEN_LINES : 2 * FIRST_SCREEN_LINES],
        )
    )
    assert "no GPU has been measured yet" in first and "measured on GPUs" in first
    picture = below.index(f"]({CHART.relative_to(REPOSITORY).as_posix()})")
    assert "*Measured on an emulated cluster*" in below[picture:]


def test_ratios_that_it_quotes_were_measured() -> None:
    measured = [float(row["times faster"]) for row in results()]
    assert len(measured) == 24
    quoted = [float(number) for number in re.findall(r"(\d\.\d+) to (\d\.\d+) times", README)[0]]
    quoted += [float(number) for number in re.findall(r"\((\d\.\d+) times as fast, emul", README)]
    assert len(quoted) == 3
    for ratio in quoted:
        assert any(round(m, 1) == ratio or m == ratio for m in measured), ratio


@pytest.mark.timeout(120)
def test_its_chart_is_drawn_from_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    script = REPOSITORY / "scripts" / "readme_chart.py"
    drawn = tmp_path / "chart.png"
    result = subprocess.run(
        [sys.executable, str(script), str(drawn)], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    # Two dots for each pixel of the README's width; fonts move an edge by some pixels.
    for path in (drawn, CHART):
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert (width, height) == (1660, 740)
