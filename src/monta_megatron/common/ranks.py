"""The rank of this process, and the cause of a failed run. No torch.

Ranks come from the variables of torchrun or srun. The first traceback is the cause: other ranks
fail because they have lost the first. torch marks the lines of a joined rank with "[rank3]: ".
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monta_megatron.common.first_rank import AS_SRUN_NAMES, is_first_rank, linger

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
            # One that is not chained to the first is another rank's, maybe between its lines.
            if not chained and cause is not None:
                break
            inside, chained = True, False
        elif text.startswith(_CHAINED):
            chained = True
        elif inside and text and not text.startswith(" "):
            cause, inside = line, False
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


INTERRUPT_REACHES_ALL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ThisRank:
    """This process among the ranks of its launch.

    Attributes:
        rank: its number among all ranks.
        world_size: number of ranks.
        local_rank: its number among the ranks of its node.
    """

    rank: int
    world_size: int
    local_rank: int


def find_this_rank(command: str, environ: MutableMapping[str, str] = os.environ) -> ThisRank:
    """Rank of this process; under srun, sets the variables that torch reads.

    Args:
        command: the sub-command of `monta`, for the message.
        environ: the environment of this process.

    Raises:
        ValueError: there is no launcher, or one of its variables is missing.
    """
    if "RANK" not in environ and environ.keys() >= set(AS_SRUN_NAMES.values()):
        _name_as_torch_does(environ)
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        raise ValueError(
            "RANK, WORLD_SIZE: not set, must be; start one process per rank: torchrun "
            f"--nproc-per-node N -m monta_megatron {command} ..., srun, or monta emulate"
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


def _name_as_torch_does(environ: MutableMapping[str, str]) -> None:
    for name, slurm_name in AS_SRUN_NAMES.items():
        environ[name] = environ[slurm_name]
    if "MASTER_ADDR" not in environ:
        raise ValueError(
            "MASTER_ADDR: not set, must be the host of rank 0 under srun: "
            "MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
        )
    environ.setdefault("MASTER_PORT", "29500")
