"""The quickstart's training, which waits for a signal on its way: a job's first start alone does.

    pausing_train.py ITERATION [arguments of train.py]

After ITERATION every rank waits until it has the signal on which Megatron saves and ends, however
fast the machine and however slow the signal.
"""

import os
import runpy
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch  # noqa: F401 - its import starts what the environment asks for

from monta_megatron.common.import_hook import after_import

TRAIN = Path(__file__).parents[2] / "scripts" / "quickstart" / "train.py"
LIMIT_S = 120


def wait_for_signal(training: ModuleType, last_iteration: int) -> None:
    """Before Megatron asks whether to end."""
    decide_exit = training.checkpoint_and_decide_exit

    def waiting(*args: Any, **kwargs: Any) -> Any:
        iteration = args[3] if len(args) > 3 else kwargs["iteration"]
        deadline = time.monotonic() + LIMIT_S
        while iteration == last_iteration and not training.get_signal_handler()._signal_received:
            assert time.monotonic() < deadline, "no signal"
            time.sleep(0.05)
        return decide_exit(*args, **kwargs)

    training.checkpoint_and_decide_exit = waiting  # type: ignore[attr-defined]


def main() -> None:
    iteration = int(sys.argv[1])
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        after_import("megatron.training.training", lambda m: wait_for_signal(m, iteration))
    sys.argv = [str(TRAIN), *sys.argv[2:]]
    sys.path[0] = str(TRAIN.parent)
    runpy.run_path(str(TRAIN), run_name="__main__")


if __name__ == "__main__":
    main()
