"""Progress on standard error of the first rank: a bar where rich is installed, else lines."""

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SECONDS_BETWEEN_LINES = 5.0


class Progress(Protocol):
    """What a long measurement tells."""

    def phase(self, text: str, total: int) -> None:
        """Something new begins, in so many steps."""

    def step(self) -> None:
        """One more is done."""


class NoProgress:
    """Of every rank but the first."""

    def phase(self, text: str, total: int) -> None: ...

    def step(self) -> None: ...


class LineProgress:
    """A line now and then."""

    def __init__(self) -> None:
        self._text, self._done, self._total, self._said_s = "", 0, 0, 0.0

    def phase(self, text: str, total: int) -> None:
        self._text, self._done, self._total, self._said_s = text, 0, total, time.monotonic()
        print(f"monta calibrate: {text}", file=sys.stderr, flush=True)

    def step(self) -> None:
        self._done += 1
        if time.monotonic() - self._said_s > SECONDS_BETWEEN_LINES:
            self._said_s = time.monotonic()
            text = f"monta calibrate: {self._text}: {self._done} of {self._total}"
            print(text, file=sys.stderr, flush=True)


@contextmanager
def show_progress(is_first_rank: bool) -> Iterator[Progress]:
    """Progress as this rank shows it: a bar on a terminal, lines into a file."""
    if not is_first_rank:
        yield NoProgress()
    elif importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield LineProgress()
    else:
        with _bar() as progress:
            yield progress


@contextmanager
def _bar() -> Iterator[Progress]:
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        yield _BarProgress(bar)


class _BarProgress:
    """One bar for each phase.

    Args:
        bar: of rich, which is optional.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task: Any = None

    def phase(self, text: str, total: int) -> None:
        self._task = self._bar.add_task(text, total=total)

    def step(self) -> None:
        self._bar.advance(self._task)
