"""Tables and progress of the tools, as plain text."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from monta_megatron.common.text import shown


def print_json(document: Any) -> None:
    """Print the one JSON document of --json."""
    print(json.dumps(document, indent=2))


# Of a report's lines.
WIDTH = 80


class Report(Protocol):
    """Result of a command."""

    def document(self) -> Any:
        """Plain data for JSON."""

    def text(self) -> str:
        """The same in words and tables."""


def print_report(report: Report, as_json: bool) -> None:
    """Print a report on standard output."""
    if as_json:
        print_json(report.document())
    else:
        print(report.text())


def tell(command: str, line: str) -> None:
    """Print a line of a command on standard error: standard output is for its report."""
    print(shown(f"monta {command}: {line}"), file=sys.stderr, flush=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    """A table as text, without a line break at its end.

    Args:
        columns: the headings; one that begins with ">" aligns its column right.
        rows: a cell for each column: any object, None for "-".
        title: a line above the table.
    """
    names = [column.removeprefix(">") for column in columns]
    sides = [">" if column.startswith(">") else "<" for column in columns]
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    # One space is enough before what aligns right, whose cells hardly ever fill their column.
    lines = [
        "".join(
            f"{' ' if side == '>' else '  '}{cell:{side}{width}}"
            for cell, side, width in zip(row, sides, widths, strict=True)
        )
        for row in [names, *cells]
    ]
    margin = 1 if sides[0] == ">" else 2
    return "\n".join(([title] if title else []) + [line[margin:].rstrip() for line in lines])


SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Progress of a long piece of work, phase by phase.

    Args:
        command: the sub-command of `monta` that prints lines; None where nothing is shown, as on
            all ranks but the first.
    """

    def __init__(self, command: str | None = None) -> None:
        self._command = command

    def phase(self, text: str, total: int) -> None:
        """A new phase of `total` steps begins."""
        self._text, self._done, self._total = text, 0, total
        self._tell(text)

    def step(self, done: int | None = None) -> None:
        """So many steps are done, or one more: a line every few seconds."""
        self._done = self._done + 1 if done is None else done
        if time.monotonic() - self._told_s > SECONDS_BETWEEN_LINES:
            self._tell(f"{self._text}: {self._done} of {self._total}")

    def _tell(self, line: str) -> None:
        self._told_s = time.monotonic()
        if self._command is not None:
            tell(self._command, line)
