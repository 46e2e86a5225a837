"""A failed run in one line: its cause, from what its ranks printed, and torchrun that says it.

    python -m monta_megatron.common.torchrun --nproc-per-node 8 SCRIPT ARGS...

torchrun itself prints some eighty lines, and its status is always 1; this one ends with the exit
status of the rank that failed first.
"""

import logging
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

# torch marks the lines of a joined rank with "[rank3]: ".
_MARK = re.compile(r"^\[rank\d+\]: ?")
# How a training says that its configuration is refused.
_MISTAKE = "monta: error: "
_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("The above exception was", "During handling of the above")


def cause_of(lines: Iterable[str]) -> str | None:
    """The line that says why a run ended; None if there is none.

    The first rank with a traceback is the cause: others fail because they have lost it. Of an
    exception that was raised from another, the last counts.

    Args:
        lines: what all of its ranks printed, or one of them.
    """
    mark = cause = None
    in_traceback, is_chained = False, True
    for line in filter(None, map(str.rstrip, lines)):
        text = _MARK.sub("", line)
        if mark is None:
            if text.startswith(_MISTAKE):
                return text
            if not text.startswith(_TRACEBACK):
                continue
            mark = line.removesuffix(text)
        if line.removesuffix(text) != mark:
            continue
        if text.startswith(_TRACEBACK):
            if not is_chained and not in_traceback:
                break
            in_traceback, is_chained = True, False
        elif in_traceback and text and not text.startswith(" "):
            cause, in_traceback = f"{mark}{text}", False
        elif text.startswith(_CHAINED):
            is_chained = True
    return cause


def ended(status: int) -> str:
    """End of a process by its exit status; 128 + n stands for signal n."""
    try:
        return f"by signal {status - 128} ({signal.Signals(status - 128).name})"
    except ValueError:
        return f"with exit status {status}"


def why_ended(status: int, log: Path) -> str:
    """End of a run and, where its log tells it, the reason."""
    with log.open(encoding="utf-8", errors="replace") as lines:
        cause = cause_of(lines)
    return ended(status) if cause is None else f"{ended(status)}: {cause}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks of this node and wait for them; returns the exit status."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # It reports every rank that it ends, and every one that failed.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
        print(f"torchrun: rank {rank} ended first, {ended(status)}", file=sys.stderr)
        return status
    except SignalException as error:
        # It has ended the ranks. A step of Slurm takes the highest status of its nodes, which is to
        # be that of the rank that failed, not of the nodes that were ended for it.
        return 130 if error.sigval == signal.SIGINT else 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
