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
    """Shows nothing: for every rank but the first."""

    def phase(self, text: str, total: int) -> None: ...

    def step(self) -> None: ...


class LineProgress:
    """A line now and then.

    Args:
        command: of `monta`, in front of each line.
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
    """Progress as this rank shows it: a bar on a terminal, lines into a file.

    Args:
        command: of `monta`.
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
    # Drawn between measurements: a thread that draws beside them would be measured too.
    with progress.Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        yield _BarProgress(bar)


class _BarProgress:
    """A bar for the phase at hand; the one before goes, so that no terminal is too low.

    Args:
        bar: of rich, which is optional.
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
