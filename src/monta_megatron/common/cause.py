"""Why a run ended, from what its ranks printed. No torch.

The first traceback is the cause: the other ranks fail because they have lost the first. torch marks
the lines of a rank that has joined with "[rank3]: ".
"""

import re
import signal
from collections.abc import Iterable
from pathlib import Path

_MARK = re.compile(r"^\[rank\d+\]: ?")
# How a training says that its configuration is refused.
_MISTAKE = "monta: error: "
_CHAINED = ("The above exception was", "During handling of the above")


def cause_of(lines: Iterable[str]) -> str | None:
    """The line that says why a run ended; None if there is none.

    Args:
        lines: what all of its ranks printed, or one of them.
    """
    rank, cause = None, None
    inside = chained = False
    for line in map(str.rstrip, lines):
        text = _MARK.sub("", line)
        mark = line.removesuffix(text) if text else line
        if rank is None and text.startswith(_MISTAKE):
            return text
        starts = text.startswith("Traceback (most recent call last)")
        if rank is None and starts:
            rank, inside = mark, True
        elif rank is None or mark != rank:
            continue
        elif starts:
            # What is not chained to the first one is another's.
            if not chained:
                break
            inside, chained = True, False
        elif text.startswith(_CHAINED):
            chained = True
        elif inside and text and not text.startswith(" "):
            cause, inside = line, False
    return cause


def ended(status: int) -> str:
    """How a process ended that left this exit status; 128 + n stands for signal n."""
    try:
        return f"by signal {status - 128} ({signal.Signals(status - 128).name})"
    except ValueError:
        return f"with exit status {status}"


def why_ended(status: int, log: Path) -> str:
    """How a run ended and, where its log says it, why."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        cause = cause_of(lines)
    return ended(status) if cause is None else f"{ended(status)}: {cause}"
