"""Pieces of an HTML page. Whatever they are given is text: it is escaped here, and only here."""

import base64
from collections.abc import Collection, Iterable, Sequence
from html import escape


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph; `kind` is a class of the page's style."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def heading(text: str) -> str:
    """A heading inside a section."""
    return f"<h3>{escape(text)}</h3>"


def bullets(texts: Iterable[str]) -> str:
    """A list."""
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """Names with what they stand for; pairs with the same name follow each other below it."""
    rows, last = [], None
    for name, text in pairs:
        shown = "" if name == last else escape(name)
        rows.append(f"<dt>{shown}</dt><dd>{escape(text)}</dd>")
        last = name
    return f"<dl>{''.join(rows)}</dl>"


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], marked: Collection[int] = ()
) -> str:
    """A table; the arguments are those of `common.tables.table`.

    Args:
        columns: the headings; one that begins with ">" aligns its column right.
        rows: a cell for each column: any object, None for "-".
        marked: numbers of the rows to set apart from the others.
    """
    kinds = [' class="number"' if column.startswith(">") else "" for column in columns]

    def line(tag: str, cells: Iterable[str]) -> str:
        return "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)
        )

    head = line("th", (column.removeprefix(">") for column in columns))
    body = "".join(
        f"<tr{' class=marked' if number in marked else ''}>"
        f"{line('td', ('-' if cell is None else str(cell) for cell in row))}</tr>"
        for number, row in enumerate(rows)
    )
    wide = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    # A wide table scrolls by itself on a narrow screen.
    return f'<div class="scrolls">{wide}</div>'


def details(summary: str, content: str) -> str:
    """What is folded away until the reader opens it; `content` is HTML."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def picture(png: bytes, describes: str) -> str:
    """A picture that is part of the page."""
    data = base64.b64encode(png).decode()
    return f'<img src="data:image/png;base64,{data}" alt="{escape(describes)}">'
