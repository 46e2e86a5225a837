"""Progress: lines of the first rank. Tables are in the golden files of the commands."""

import pytest

from monta_megatron.common import text
from monta_megatron.common.text import Progress


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
