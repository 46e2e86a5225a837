"""Tables of the tools: rich's on a terminal, plain columns elsewhere.

What is no terminal (a file, a pipe, a test) gets plain text whose lines are as long as they come.
So does a terminal where rich is missing: an installation with `pip install --no-deps` into a
container that holds numpy and PyYAML can still plan. A training imports this only for the table of
its tuning.
"""

import importlib.util
import sys
from collections.abc import Iterable, Sequence

from monta_megatron.common.texts import shown


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
