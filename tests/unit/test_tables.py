"""Tables and progress: plain where nobody looks, no wider than a terminal, harmless texts."""

import importlib.util
import io
import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from monta_megatron.common.tables import show_progress, table

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


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard output and error a terminal of 60 columns that knows no colour."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    for name, value in {"COLUMNS": "60", "LINES": "20", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, value)
    return terminal


def test_a_table_is_plain_where_nobody_looks() -> None:
    assert table(COLUMNS, ROWS, "head") == PLAIN.strip("\n")
    long = [["alltoall", 1, "why " * 200]]
    assert "why " * 199 in table(COLUMNS, long)
    assert table(COLUMNS, []) == "chain us  why"


def test_a_table_is_no_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    open_terminal(monkeypatch)
    text = table(COLUMNS, [*ROWS, ["alltoall", 1, "why " * 40]], "head")
    lines = "".join(text.replace("\x1b[1m", "").replace("\x1b[0m", "")).splitlines()
    assert max(map(len, lines)) <= 60
    assert "\x1b[1mhead" in text
    # Nothing is lost, and nothing acts.
    assert "".join(lines).count("why") == 41 and text.count("1,234") == 1
    assert "[bold]alltoall[/bold]" in text and "\x1b[31m" not in text


def test_a_table_without_rich_has_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    open_terminal(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert table(COLUMNS, ROWS, "head") == PLAIN.strip("\n")


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with show_progress("bench", is_first_rank=True) as progress:
        for phase in ("first [1/2]", "second [2/2]"):
            progress.phase(phase, 2)
            progress.step()
            progress.step()
    shown = terminal.getvalue()
    assert "first [1/2]" in shown and "second [2/2]" in shown
    assert "0/2" in shown and "1/2" in shown and "2/2" in shown


def test_progress_is_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    for is_first_rank in (False, True):
        with show_progress("bench", is_first_rank) as progress:
            progress.phase("first", 2)
            progress.step()
    assert capsys.readouterr().err == "monta bench: first\n"


def test_a_training_run_does_not_import_rich() -> None:
    command = [sys.executable, "-W", "ignore", "-c", MODULES_OF_A_RUN]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    modules = set(json.loads(result.stdout))
    assert not modules & {"rich", "monta_megatron.common.tables", "matplotlib"}
