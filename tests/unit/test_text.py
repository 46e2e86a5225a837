"""Times and progress as texts: three digits, lines of the first rank."""

import time

import pytest

from monta_megatron.common import text
from monta_megatron.common.text import Progress, time_text


def test_progress_is_lines_of_the_first_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (None, "bench"):
        progress = Progress(command)
        progress.phase("first", 2)
        progress.step()
        with monkeypatch.context() as patch:
            patch.setattr(text, "SECONDS_BETWEEN_LINES", -1.0)
            progress.step()
    assert capsys.readouterr().err == "monta bench: first\nmonta bench: first: 2 of 2\n"


def test_times_have_three_digits() -> None:
    times_us = [0.0, 3.456, 999.4, 999.5, 99_600.0, 999_499.0, 10_840_000.0, 1.234e9]
    texts = ["0 us", "3.46 us", "999 us", "1 ms", "99.6 ms", "999 ms", "10.8 s", "1,234 s"]
    assert list(map(time_text, times_us)) == texts
    # Those of one line have one unit.
    assert time_text(250.0, beside_us=1_200.0) == "0.25 ms"
    assert time_text(1_200.0, beside_us=250.0) == "1.2 ms"


@pytest.mark.parametrize(
    ("is_terminal", "takes_s", "says"),
    [(True, 1.0, "monta plan: still planning\n"), (True, 0.0, ""), (False, 0.1, "")],
)
def test_slow_work_is_told_once_to_a_terminal(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    takes_s: float,
    says: str,
) -> None:
    # Work that takes no time ends well before half a second.
    monkeypatch.setattr(text, "SLOW_S", 0.5 if takes_s == 0.0 else 0.01)
    monkeypatch.setattr(text.sys.stderr, "isatty", lambda: is_terminal)
    with text.told_if_slow("plan", "still planning"):
        time.sleep(takes_s)
    assert capsys.readouterr().err == says
