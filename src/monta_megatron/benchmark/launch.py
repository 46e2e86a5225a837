"""This process among the ranks of a launch: what torchrun or srun says. No torch."""

import os
import signal
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

OTHER_RANKS_LINGER_S = 5.0
INTERRUPT_REACHES_ALL_S = 1.0

# torch's variables, and srun's of the same meaning.
AS_SRUN_NAMES = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One rank's place.

    Attributes:
        rank: of all.
        world_size: ranks.
        local_rank: on its node.
    """

    rank: int
    world_size: int
    local_rank: int


def find_launch(command: str, environ: MutableMapping[str, str] = os.environ) -> Launch:
    """The launch that this process is part of; srun's variables are set as torch reads them.

    Args:
        command: of `monta`, for the message.
        environ: of this process.

    Raises:
        ValueError: no launcher, or one of its variables is missing.
    """
    if "RANK" not in environ and environ.keys() >= set(AS_SRUN_NAMES.values()):
        _name_as_torch_does(environ)
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        raise ValueError(
            "RANK, WORLD_SIZE: not set, must be; start one process per rank: torchrun "
            f"--nproc-per-node N -m monta_megatron.cli {command} ..., srun, or monta emulate"
        )
    return Launch(
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
    )


def is_first_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this rank speaks for all; so does a process that no launcher started."""
    return environ.get("RANK", environ.get("SLURM_PROCID", "0")) == "0"


def linger() -> None:
    """Delay the exit of a rank that fails in silence: torchrun ends all ranks as soon as one has
    failed, and by then the first rank has to have said why."""
    time.sleep(OTHER_RANKS_LINGER_S)


def run_as_rank(run: Callable[[], int]) -> int:
    """Run a command that every rank of a launch is given; the first one alone says what is wrong.

    Args:
        run: the command; its value is the exit status, and a ValueError is a user's mistake.
    """
    interrupts = []

    def interrupt(*signal_and_frame: Any) -> None:
        interrupts.append(signal_and_frame)
        raise KeyboardInterrupt

    handler_before = signal.signal(signal.SIGINT, interrupt)
    try:
        status = run()
    except ValueError:
        if is_first_rank():
            raise
        status = 2
    except RuntimeError:
        # A launch that is interrupted ends rank by rank. That this one has lost its peers is no
        # fault then, be it before its own turn, or after: on the way through autograd the
        # interrupt may have been replaced by the loss.
        time.sleep(INTERRUPT_REACHES_ALL_S)
        if interrupts:
            raise KeyboardInterrupt from None
        raise
    finally:
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
