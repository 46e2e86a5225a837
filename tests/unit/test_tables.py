"""Tables and progress: aligned columns, harmless texts, lines."""

import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from monta_megatron.common import tables
from monta_megatron.common.tables import Progress, table

COLUMNS = ["chain", ">us", "why"]
ROWS: list[Sequence[object]] = [
    ["alltoall", "1,234", "chosen"],
    ["[bold]alltoall[/bold]", None, "one\nline, \x1b[31mnot red"],
]
PLAIN = r"""
head
chain                    us  why
alltoall              1,234  chosen
[bold]alltoall[/bold]     -  one\nline, \x1b[31mnot red
"""

MODULES_OF_A_RUN = """
import json, sys
from monta_megatron.integration import dispatcher, layer
from monta_megatron.planner import plan
print(json.dumps(sorted(sys.modules)))
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
            patch.setattr(tables, "SECONDS_BETWEEN_LINES", -1.0)
            progress.step()
    assert capsys.readouterr().err == "monta bench: first\nmonta bench: first: 2 of 2\n"


def test_a_training_run_does_not_import_tables() -> None:
    command = [sys.executable, "-W", "ignore", "-c", MODULES_OF_A_RUN]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    modules = set(json.loads(result.stdout))
    assert not modules & {"monta_megatron.common.tables", "matplotlib"}
