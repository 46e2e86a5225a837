"""The rank of this process, and the cause of a failed run. No torch.

The first traceback is the cause: other ranks fail because they have lost the first. torch marks the
lines of a joined rank with "[rank3]: ".
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from monta_megatron.common.first_rank import is_first_rank, linger

_MARK = re.compile(r"^\[rank\d+\]: ?")
# How a training says that its configuration is refused.
_MISTAKE = "monta: error: "
# Two ranks may print theirs line by line in turn.
_TRACEBACK = r"^Traceback \(most recent call last\).*\n(?:(?:Traceback| ).*\n)*(\S.*)"
_CHAINED = r"(?:The above exception was|During handling of the above).*\n"
_CHAIN = re.compile(rf"{_TRACEBACK}(?:(?:\n(?!Traceback).*)*?\n{_CHAINED}{_TRACEBACK})*", re.M)


def cause_of(lines: Iterable[str]) -> str | None:
    """The line that says why a run ended; None if there is none.

    Args:
        lines: what all of its ranks printed, or one of them.
    """
    mark, of_rank = None, []
    for line in filter(None, map(str.rstrip, lines)):
        text = _MARK.sub("", line)
        if mark is None and text.startswith(_MISTAKE):
            return text
        if mark is None and text.startswith("Traceback (most recent call last)"):
            mark = line.removesuffix(text)
        if text and line.removesuffix(text) == mark:
            of_rank.append(text)
    chain = _CHAIN.search("\n".join(of_rank))
    return None if chain is None else f"{mark}{chain[2] or chain[1]}"


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


INTERRUPT_REACHES_ALL_S = 1.0


class ThisRank(NamedTuple):
    """This process among the ranks of its launch, and among those of its node."""

    rank: int
    world_size: int
    local_rank: int


def find_this_rank(command: str, environ: Mapping[str, str] = os.environ) -> ThisRank:
    """Rank of this process, from the variables of a launcher.

    Args:
        command: the sub-command of `monta`, for the message.
        environ: the environment of this process.

    Raises:
        ValueError: no launcher has set them.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        raise ValueError(
            "RANK, WORLD_SIZE: not set, must be; start one process per rank: torchrun "
            f"--nproc-per-node N -m monta_megatron {command} ..., or monta emulate"
        )
    return ThisRank(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
    )


def run_as_rank(run: Callable[[], int]) -> int:
    """Run a command on every rank of a launch, so that Ctrl-C and failures end all of it in order.

    Args:
        run: the command; returns the exit status, or raises ValueError for a user's mistake.
    """
    interrupted = False

    def interrupt(*signal_and_frame: Any) -> None:
        nonlocal interrupted
        interrupted = True
        # A launcher passes on what has reached this rank already.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    handler_before = signal.signal(signal.SIGINT, interrupt)
    try:
        status = run()
    except RuntimeError:
        # An interrupted launch ends rank by rank, so it is no fault that this rank lost its peers:
        # its own interrupt may still be on its way, or autograd may have replaced it by the error
        # about the lost peers.
        time.sleep(INTERRUPT_REACHES_ALL_S)
        if interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        if not interrupted:
            signal.signal(signal.SIGINT, handler_before)
    if status != 0 and not is_first_rank():
        linger()
    return status
