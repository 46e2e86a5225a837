"""What a rank does in the tests of starting: `slurm_ranks.py place|linger|fail`. No torch."""

import json
import os
import subprocess
import sys

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def place() -> None:
    """Say where this rank is, which has to know where the first one is."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    line = json.dumps([int(os.environ[name]) for name in NAMES])
    # In one piece, as ranks share the pipe.
    os.write(1, f"{line}\n".encode())


def linger() -> None:
    """Stay, with a child as a loader of data has them."""
    child = subprocess.Popen(["sleep", "1000"])
    os.write(1, b"lingers\n")
    child.wait()


def fail() -> None:
    """One rank fails; torchrun and srun end the others."""
    if os.environ["RANK"] == "1":
        sys.exit(3)
    linger()


if __name__ == "__main__":
    {"place": place, "linger": linger, "fail": fail}[sys.argv[1]]()
