"""Tables and progress: aligned columns, lines."""

from collections.abc import Sequence

import pytest

from monta_megatron.common import text
from monta_megatron.common.text import Progress, table

COLUMNS = ["chain", ">us", "why"]
ROWS: list[Sequence[object]] = [
    ["alltoall", "1,234", "chosen"],
    ["alltoall_dedup", None, "slower"],
]
PLAIN = """
head
chain             us  why
alltoall       1,234  chosen
alltoall_dedup     -  slower
"""


def test_a_table_has_columns() -> None:
    assert table(COLUMNS, ROWS, "head") == PLAIN.strip("\n")
    long = [["alltoall", 1, "why " * 200]]
    assert "why " * 199 in table(COLUMNS, long)
    assert table(COLUMNS, []) == "chain us  why"


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
