"""Tables and progress of the tools: rich on a terminal, plain text elsewhere.

A file, a pipe or a test gets plain text with lines of any length. So does a terminal without rich:
an installation with `pip install --no-deps` into a container that holds numpy and PyYAML can still
plan. A training imports this only for the table of its tuning.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias

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


def has_rich() -> bool:
    """Whether rich is installed."""
    return importlib.util.find_spec("rich") is not None


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    r"""A table as text for standard output, without a line break at its end.

    On a terminal it is no wider than that: long cells are broken into lines, and nothing is left
    out. Texts are shown as they are: brackets are no markup, and an escape sequence is written out.

    Args:
        columns: the headings; one that begins with ">" aligns its column right.
        rows: a cell for each column: any object, None for "-".
        title: a line above the table.
    """
    if sys.stdout.isatty() and has_rich():
        return _rich_table(*_texts(columns, rows), shown(title))
    return plain_table(columns, rows, title)


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    """The same in plain columns, on a terminal too: for a log."""
    names, sides, cells = _texts(columns, rows)
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
    return "\n".join(([shown(title)] if title else []) + [line[margin:].rstrip() for line in lines])


def _texts(
    columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> tuple[list[str], list[str], list[list[str]]]:
    """The headings, the side to which each column is aligned, and the cells."""
    names = [shown(column.removeprefix(">")) for column in columns]
    sides = [">" if column.startswith(">") else "<" for column in columns]
    return names, sides, [["-" if cell is None else shown(cell) for cell in row] for row in rows]


def _rich_table(
    names: Sequence[str], sides: Sequence[str], cells: Iterable[Sequence[str]], title: str
) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, side in zip(names, sides, strict=True):
        drawn.add_column(Text(name), justify="right" if side == ">" else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*map(Text, row))
    console = Console()
    with console.capture() as captured:
        if title:
            console.print(Text(title, style="bold"))
        console.print(drawn)
    return captured.get().rstrip("\n")


SECONDS_BETWEEN_LINES = 5.0

Show: TypeAlias = Callable[[str, int, int], None]


class Progress:
    """Progress of a long piece of work, phase by phase.

    Args:
        show: (name of the phase, steps done, steps in all) -> None; without it nothing is shown.
    """

    def __init__(self, show: Show = lambda text, done, total: None) -> None:
        self._show = show

    def phase(self, text: str, total: int) -> None:
        """A new phase of `total` steps begins."""
        self._text, self._done, self._total = text, 0, total
        self._show(text, 0, total)

    def step(self) -> None:
        """One more step is done."""
        self._done += 1
        self._show(self._text, self._done, self._total)


@contextmanager
def show_progress(command: str, is_first_rank: bool) -> Iterator[Progress]:
    """Progress as this rank shows it: a bar on a terminal if rich is installed, else lines.

    Args:
        command: the sub-command of `monta`.
        is_first_rank: whether this rank shows it; the others are silent.
    """
    if not is_first_rank:
        yield Progress()
    elif sys.stderr.isatty() and has_rich():
        with _bar() as show:
            yield Progress(show)
    else:
        yield Progress(_lines(command))


def _lines(command: str) -> Show:
    """Prints a line when a phase begins, and then every few seconds."""
    said_s = 0.0

    def show(text: str, done: int, total: int) -> None:
        nonlocal said_s
        if done == 0 or time.monotonic() - said_s > SECONDS_BETWEEN_LINES:
            said_s = time.monotonic()
            state = f"{text}: {done} of {total}" if done else text
            tell(command, state)

    return show


@contextmanager
def _bar() -> Iterator[Show]:
    """One bar for all phases, so that any terminal is tall enough."""
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    # Drawn only between measurements: a thread that draws during them would be measured too.
    with progress.Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("")

        def show(text: str, done: int, total: int) -> None:
            if done == 0:
                bar.reset(task, description=text, total=total)
            bar.update(task, completed=done, refresh=True)

        yield show
