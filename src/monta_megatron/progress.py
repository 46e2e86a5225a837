"""Progress on standard error of the first rank: a bar where rich is installed, else lines."""

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SECONDS_BETWEEN_LINES = 5.0


class Progress(Protocol):
    """What a long measurement reports."""

    def phase(self, text: str, total: int) -> None:
        """A new phase of `total` steps begins."""

    def step(self) -> None:
        """One more step is done."""


class NoProgress:
    """Shows nothing: for every rank but the first."""

    def phase(self, text: str, total: int) -> None: ...

    def step(self) -> None: ...


class LineProgress:
    """Prints a line every few seconds.

    Args:
        command: the sub-command of `monta`, named in front of each line.
    """

    def __init__(self, command: str) -> None:
        self._command = command
        self._text, self._done, self._total, self._said_s = "", 0, 0, 0.0

    def phase(self, text: str, total: int) -> None:
        self._text, self._done, self._total, self._said_s = text, 0, total, time.monotonic()
        self._say(text)

    def step(self) -> None:
        self._done += 1
        if time.monotonic() - self._said_s > SECONDS_BETWEEN_LINES:
            self._said_s = time.monotonic()
            self._say(f"{self._text}: {self._done} of {self._total}")

    def _say(self, text: str) -> None:
        print(f"monta {self._command}: {text}", file=sys.stderr, flush=True)


@contextmanager
def show_progress(command: str, is_first_rank: bool) -> Iterator[Progress]:
    """Progress as this rank shows it: a bar on a terminal if rich is installed, else lines.

    Args:
        command: the sub-command of `monta`.
        is_first_rank: whether this rank shows it; the others are silent.
    """
    if not is_first_rank:
        yield NoProgress()
    elif importlib.util.find_spec("rich") is None or not sys.stderr.isatty():
        yield LineProgress(command)
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
    # Drawn only between measurements: a thread that draws during them would be measured too.
    with progress.Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        yield _BarProgress(bar)


class _BarProgress:
    """A bar for the current phase; the previous one is hidden, so that any terminal is tall enough.

    Args:
        bar: rich's `Progress`; rich is optional.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task: Any = None

    def phase(self, text: str, total: int) -> None:
        if self._task is not None:
            self._bar.update(self._task, visible=False)
        self._task = self._bar.add_task(text, total=total)
        self._bar.refresh()

    def step(self) -> None:
        self._bar.advance(self._task)
        self._bar.refresh()
