"""A script on ranks that are forks of one process: what they import is imported once.

torchrun starts every rank anew, which costs seconds for each that imports Megatron's training loop.
"""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from free_ports import free_ports
from preloaded import Preloaded

NUM_RANKS = 4
LIMIT_S = 240


class ForkedRanks:
    """CPU ranks that have imported `modules`; each script gets fresh ones."""

    def __init__(self, *modules: str) -> None:
        self._preloaded = Preloaded(
            *modules,
            limit_s=LIMIT_S,
            MONTA_CPU_RANKS="1",
            OMP_NUM_THREADS="1",
            CUDA_DEVICE_MAX_CONNECTIONS="1",
            WORLD_SIZE=str(NUM_RANKS),
            LOCAL_WORLD_SIZE=str(NUM_RANKS),
            MASTER_ADDR="127.0.0.1",
        )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run `SCRIPT ARGUMENTS`, or `-m MODULE ARGUMENTS`, on every rank.

        The first status that is not 0 ends them all, and is the run's.
        """
        (port,) = free_ports(1)
        return self._preloaded.run(run_ranks, str(port), *command)

    def close(self) -> None:
        """End the process that forks them."""
        self._preloaded.close()


def run_ranks(port: str, *command: str) -> None:
    """In a fork of the preloaded process: fork the ranks, and leave with their status."""
    ranks = []
    for rank in range(NUM_RANKS):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=port)
            _run(*command)
            return
        ranks.append(child)

    def end_all(*_: Any) -> None:
        for child in ranks:
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end_all)
    first_failure = 0
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        if status != 0:
            first_failure = first_failure or abs(os.waitstatus_to_exitcode(status))
            end_all()
    sys.exit(first_failure)


def _run(script: str, *arguments: str) -> None:
    if script == "-m":
        sys.argv = list(arguments)
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
