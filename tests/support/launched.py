"""A command on 4 CPU ranks of its own, under torchrun."""

import os
import subprocess
import sys

# Seconds; a launch takes 15 where nothing else runs.
LIMIT_S = 240


def launch(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run what follows torchrun's own options.

    Raises:
        subprocess.TimeoutExpired: it takes longer than LIMIT_S; no rank is left then.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "4", *command),
        ],
        env={**os.environ, "MONTA_CPU_RANKS": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    finally:
        # torchrun ends its ranks when it is asked to end, not when it is killed.
        process.terminate()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)
