"""Text for users: suggestions, quantities in units, tables, reports and progress."""

import json
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Protocol

# Of a report's lines.
WIDTH = 80


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name, in lower case, that is most like `name`; None if none is close."""
    return next(iter(get_close_matches(str(name).lower(), list(known), n=1)), None)


def one_of(name: object, known: Collection[str]) -> str:
    """The rule that `name` breaks: "one of x, y", with " (did you mean x?)" where one is close."""
    meant = nearest(name, known)
    return f"one of {', '.join(known)}" + ("" if meant is None else f" (did you mean {meant}?)")


def advice(name: object, known: Collection[str]) -> str:
    """Suggestion in place of `name`: "did you mean x?", or "known: x, y" where none is close."""
    meant = nearest(name, known)
    return f"known: {', '.join(known)}" if meant is None else f"did you mean {meant}?"


def shown(text: object) -> str:
    r"""A text as one line of printable characters: a line break as \n, an escape as \x1b."""
    return "".join(
        character if character.isprintable() else repr(character)[1:-1] for character in str(text)
    )


def counted(number: int, noun: str) -> str:
    """1, "chunk" -> "1 chunk"; 4096, "token" -> "4,096 tokens"; nouns with a plural in s or es."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}" + ("" if number == 1 else plural)


def _in_units(number: float, largest: float, units: Sequence[tuple[str, float]]) -> str:
    """A number in three digits and the unit, of descending ones, that suits `largest`."""
    unit, size = next((each for each in units if largest >= 0.9995 * each[1]), units[-1])
    scaled = number / size
    return f"{scaled:.3g} {unit}" if scaled < 999.5 else f"{scaled:,.0f} {unit}"


def size_text(num_bytes: float | None) -> str:
    """Bytes, 1 GB being 1e9 of them, in three digits and a unit; "-" for none."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
    return _in_units(num_bytes, num_bytes, units) if num_bytes else "-"


def number_text(number: float) -> str:
    """A large number in three digits: "30.5 B", B being 1e9, "671 B", "85 M"."""
    return _in_units(number, number, (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0)))


def time_text(time_us: float, beside_us: float = 0.0) -> str:
    """A time in three digits and us, ms or s: the unit of the larger of it and `beside_us`."""
    return _in_units(time_us, max(time_us, beside_us), (("s", 1e6), ("ms", 1e3), ("us", 1.0)))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    """A table as text, without a line break at its end.

    Args:
        columns: the headings; one that begins with ">" aligns its column right.
        rows: a cell for each column: any object, None for "-".
        title: a line above the table.
    """
    names = [column.removeprefix(">") for column in columns]
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    # One space is enough before what aligns right, whose cells hardly ever fill their column.
    formats = [
        f" {{:>{width}}}" if column.startswith(">") else f"  {{:<{width}}}"
        for column, width in zip(columns, widths, strict=True)
    ]
    margin = len(formats[0].partition("{")[0])
    lines = ["".join(formats).format(*row)[margin:].rstrip() for row in (names, *cells)]
    return "\n".join(([title] if title else []) + lines)


class Report(Protocol):
    """Result of a command."""

    def document(self) -> Any:
        """Plain data for JSON."""

    def text(self) -> str:
        """The same in words and tables."""


def print_report(report: Report, as_json: bool) -> None:
    """Print a report on standard output: in words, or as the one JSON document of --json."""
    print(json.dumps(report.document(), indent=2) if as_json else report.text())


def tell(command: str, line: str) -> None:
    """Print a line of a command on standard error: standard output is for its report."""
    print(shown(f"monta {command}: {line}"), file=sys.stderr, flush=True)


SLOW_S = 2.0


@contextmanager
def told_if_slow(command: str, line: str) -> Iterator[None]:
    """Tell a line once if the work inside takes longer than 2 seconds, to people on a terminal."""
    timer = threading.Timer(SLOW_S, tell, (command, line))
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


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

    def note(self, lines: Iterable[str]) -> None:
        """Lines that belong to no phase."""
        for line in lines:
            self._tell(line)

    def _tell(self, line: str) -> None:
        self._told_s = time.monotonic()
        if self._command is not None:
            tell(self._command, line)
