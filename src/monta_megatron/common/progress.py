"""Progress of a long piece of work on standard error: a bar on a terminal, elsewhere lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from monta_megatron.common.tables import has_rich

SECONDS_BETWEEN_LINES = 5.0

Show: TypeAlias = Callable[[str, int, int], None]


class Progress:
    """What a long piece of work reports, phase by phase.

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
            print(f"monta {command}: {state}", file=sys.stderr, flush=True)

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
